#!/usr/bin/env bash
# Run it in the miniature's folder: SKIP_PREPARE=1 MODEL_PATH=… TRAIN_JSONL=… bash moss_tts_delay/finetuning/run_train.sh
set -euo pipefail
family=moss_tts_delay
default_options="--per-device-batch-size 1 --gradient-accumulation-steps 8 --mixed-precision bf16 --gradient-checkpointing"
. "$(dirname "${BASH_SOURCE[0]}")/../../mini_trainer/start.sh"
