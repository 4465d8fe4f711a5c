#!/usr/bin/env bash
# The one script for a machine with a CUDA card: memory, time and host traffic of full-size steps, under 8 minutes.
#     MOSS_TTS_REPO=/path/to/MOSS-TTS bash benchmarks/gpu.sh
# Needs this package, its requirements and a checkout; no weights, no download. What the card or the RAM cannot do is
# left out and said. Results: benchmarks/results/gpu.json, shown on docs/benchmarks.md.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
# As a training is started: with the allocator's settings, and with a word about what killed it.
exec "$python" -m moss_tts_patches.launch.supervise "$python" benchmarks/gpu.py --minutes 7.5 \
  --json benchmarks/results/gpu.json "$@"
