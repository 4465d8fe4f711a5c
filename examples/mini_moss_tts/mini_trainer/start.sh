# Sourced by the run_train.sh of a family, which sets `family` and `default_options`: starts the miniature's trainer from
# the same environment variables as upstream's run_train.sh.
# shellcheck shell=bash

stop() {
  echo "run_train.sh (miniature): $1" >&2
  exit 2
}

trainer="$family/finetuning/sft.py"
[[ -f "$trainer" ]] || stop "$trainer is not below $PWD; run this script in the miniature's folder."
[[ "${SKIP_PREPARE:-0}" == 1 ]] \
  || stop "SKIP_PREPARE=${SKIP_PREPARE:-0}: there is no codec here to make audio codes with; set SKIP_PREPARE=1 and use data that has them (make_demo_data.py)."
[[ -n "${MODEL_PATH:-}" ]] || stop "MODEL_PATH is not set; expected a checkpoint folder, as make_demo_data.py writes it."

prepared="${PREPARED_JSONL:-train_with_codes.jsonl}"
shards="${prepared%.jsonl}.rank*.jsonl"
if [[ ! -e "$prepared" ]] && compgen -G "$shards" > /dev/null; then
  prepared="$shards"
fi

read -r -a options <<< "${TRAIN_EXTRA_ARGS_STR:-$default_options}"
launcher=(accelerate launch)
if [[ -n "${ACCELERATE_CONFIG_FILE:-}" ]]; then
  launcher+=(--config_file "$ACCELERATE_CONFIG_FILE")
fi
exec "${launcher[@]}" "$trainer" \
  --model-path "$MODEL_PATH" \
  --codec-path "${CODEC_PATH:-none}" \
  --train-jsonl "${TRAIN_JSONL:-$prepared}" \
  --output-dir "${OUTPUT_DIR:-output/mini_moss_tts_sft}" \
  "${options[@]}"
