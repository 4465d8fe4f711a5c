#!/usr/bin/env bash
# Trains MOSS-TTS with its own, unmodified run_train.sh, in little memory:
#
#     MOSS_LOWMEM=1 bash run_train_lowmem.sh        (--help says the rest)
#
# It trains nothing itself. It finds the official script, makes sure that the layer will reach the process that trains,
# and hands over. Every variable of the official script works as it does there.
# Kept to what bash 3.2 knows, which is the bash that macOS has.
set -euo pipefail
unset CDPATH # with it, `cd` prints where it went, into the answers that are read below

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
caller="$PWD"

usage() {
  cat << 'TEXT'
Usage: [VARIABLE=VALUE ...] bash run_train_lowmem.sh [--demo | --help]

  --demo   without MOSS-TTS and without downloading a model: trains a miniature twice, without and with the
           layer, and compares (under 3 minutes on 2 cores, most of it pip)
  --help   this text

Variables of this script:
  MOSS_LOWMEM          1 (default here): with the layer; 0: the official script alone
  MOSS_TTS_REPO        the MOSS-TTS checkout (default: the current folder, its parents, ./MOSS-TTS)
  MOSS_LOWMEM_FAMILY   which family of models to train (default: moss_tts_local)
  ACCELERATE_CONFIG_FILE  lowmem:ddp, lowmem:fsdp, lowmem:zero2, lowmem:zero3 and their -offload use all visible GPUs
                       (`moss-lowmem configs` says more); otherwise a file, as for the official script
  MOSS_LOWMEM_ENGINE   auto (default): one plain process where an engine over several GPUs would have only one;
                       keep: the accelerate config as it is given

All variables of the official run_train.sh: MODEL_PATH CODEC_PATH RAW_JSONL PREPARED_JSONL TRAIN_JSONL OUTPUT_DIR
PREP_DEVICE SKIP_PREPARE ACCELERATE_CONFIG_FILE PREP_ACCELERATE_ARGS_STR PREP_EXTRA_ARGS_STR TRAIN_EXTRA_ARGS_STR.
Relative paths in them, and the defaults, start from the folder you stand in. (Paths inside a JSONL file are read by
MOSS-TTS itself, from its own folder: make those absolute.)

The layer's own settings, MOSS_LOWMEM_*, are listed in README.md.
TEXT
}

log() {
  printf '[%s] [lowmem] %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$1"
}

stop() {
  printf '[lowmem] error: %s\n' "$1" >&2
  exit 2
}

# Any Python at all, for questions that need only its standard library. In an environment, it is the environment's own.
any_python() {
  command -v python3 || command -v python \
    || stop "no python3 on the PATH. Activate the environment in which you train, or install Python 3.10 or newer."
}

# The Python that `accelerate` belongs to, once it is certain that the layer reaches it. A second Python is the
# commonest way to train without the layer and never be told.
python_of_accelerate() {
  local python
  [[ -f "$here/moss_tts_patches/launch/interpreter.py" ]] \
    || stop "moss_tts_patches is not beside this script, in $here. Run the script from its own repository."
  python="$(any_python)" || exit
  "$python" "$here/moss_tts_patches/launch/interpreter.py"
}

is_upstream() {
  [[ -f "$1/$family/finetuning/run_train.sh" && -f "$1/$family/finetuning/sft.py" ]]
}

find_upstream() {
  local looked_for="$family/finetuning/run_train.sh and sft.py beside it" folder="$caller"
  local clone="git clone https://github.com/OpenMOSS/MOSS-TTS"
  if [[ -n "${MOSS_TTS_REPO:-}" ]]; then
    is_upstream "$MOSS_TTS_REPO" \
      || stop "MOSS_TTS_REPO=$MOSS_TTS_REPO is not a MOSS-TTS checkout: looked there for $looked_for. Correct it, or: $clone"
    printf '%s\n' "$MOSS_TTS_REPO"
    return
  fi
  until is_upstream "$folder"; do
    if [[ "$folder" == / ]]; then
      is_upstream "$caller/MOSS-TTS" \
        || stop "no MOSS-TTS checkout in $caller, its parents, or $caller/MOSS-TTS: looked for $looked_for. Get it with: $clone (or name yours in MOSS_TTS_REPO)"
      folder="$caller/MOSS-TTS"
      break
    fi
    folder="$(dirname "$folder")"
  done
  printf '%s\n' "$folder"
}

# The value that the official script gives a variable that nobody set, as that very version of it says.
official_default() {
  sed -n 's/^'"$1"'="${'"$1"':-\(.*\)}"$/\1/p' "$repo/$family/finetuning/run_train.sh"
}

from_caller() {
  case "$1" in
    "" | /*) printf '%s\n' "$1" ;;
    *) printf '%s\n' "${caller%/}/$1" ;;
  esac
}

# TRAIN_JSONL may be several: upstream splits it at commas and strips each part.
list_from_caller() {
  local rest="$1," item list=""
  while [[ -n "$rest" ]]; do
    item="${rest%%,*}"
    rest="${rest#*,}"
    item="${item#"${item%%[![:space:]]*}"}"
    item="${item%"${item##*[![:space:]]}"}"
    [[ -z "$item" ]] || list="$list${list:+,}$(from_caller "$item")"
  done
  printf '%s\n' "$list"
}

# A model is a folder or a name on a model hub; only a folder that exists is taken for one.
model_from_caller() {
  if [[ -n "$1" && "$1" != /* && -d "$caller/$1" ]]; then from_caller "$1"; else printf '%s\n' "$1"; fi
}

# The official script only works from inside the checkout, but paths are meant from where the user stands.
resolve_paths() {
  case "$caller" in
    *[],*?[]*) stop "$caller: MOSS-TTS reads , * ? [ ] in the path of a JSONL file as a list or a pattern. Rename the folder, or start from another one." ;;
  esac
  local name value
  for name in RAW_JSONL PREPARED_JSONL OUTPUT_DIR; do
    value="${!name:-$(official_default "$name")}"
    [[ -z "$value" ]] || export "$name=$(from_caller "$value")"
  done
  for name in MODEL_PATH CODEC_PATH; do
    [[ -z "${!name:-}" ]] || export "$name=$(model_from_caller "${!name}")"
  done
  # Words like auto, and paths that do not exist, are left for the settings to judge.
  for name in MOSS_LOWMEM_LORA_INIT MOSS_LOWMEM_LORA_CONFIG MOSS_LOWMEM_RESUME; do
    value="${!name:-}"
    [[ -z "$value" || "$value" == /* || ! -e "$caller/$value" ]] || export "$name=$(from_caller "$value")"
  done
  [[ -z "${TRAIN_JSONL:-}" ]] || TRAIN_JSONL="$(list_from_caller "$TRAIN_JSONL")"
  [[ -z "${MOSS_LOWMEM_VALID_JSONL:-}" ]] || export MOSS_LOWMEM_VALID_JSONL="$(list_from_caller "$MOSS_LOWMEM_VALID_JSONL")"
  # A config may be the user's or one of the checkout's own.
  if [[ -n "${ACCELERATE_CONFIG_FILE:-}" && -f "$caller/$ACCELERATE_CONFIG_FILE" ]]; then
    ACCELERATE_CONFIG_FILE="$(from_caller "$ACCELERATE_CONFIG_FILE")"
  fi
}

run_demo() {
  local python
  python="$(any_python)" || exit
  # From the root folder: Python imports from where it stands, and that may be beside the package.
  if ! (cd / && "$python" -c 'import accelerate, moss_tts_patches' 2> /dev/null); then
    bash "$here/tests/venv.sh" || stop "could not install the package into $here/.venv; what pip said is above."
    python="$here/.venv/bin/python"
  fi
  exec "$python" "$here/examples/mini_moss_tts/compare_demo.py" ${1+"$@"} # bash 3.2 takes an empty "$@" for an unset variable
}

case "${1:-}" in
  --help | -h)
    usage
    exit 0
    ;;
  --demo)
    shift
    run_demo ${1+"$@"}
    ;;
  "") ;;
  *) stop "'$1' is not an option of this script (--demo, --help). Options of the training go into TRAIN_EXTRA_ARGS_STR." ;;
esac

# 1. On or off? Whoever calls this script wants the layer, so unset means 1 here; anything unclear must not be guessed.
MOSS_LOWMEM="${MOSS_LOWMEM-1}"
case "$MOSS_LOWMEM" in
  0 | 1) export MOSS_LOWMEM ;;
  *) stop "MOSS_LOWMEM='$MOSS_LOWMEM' is not a value: use 1 for the layer, 0 for the official script alone." ;;
esac
family="${MOSS_LOWMEM_FAMILY-moss_tts_local}"

# 2. Settings and family, checked before anything is looked for, so that a slip is called by its name.
if [[ "$MOSS_LOWMEM" == 1 ]]; then
  python="$(python_of_accelerate)"
  (cd / && exec "$python" -m moss_tts_patches.launch settings "$family")
fi

# 3. The checkout. Standing in it, paths stay as they are: what is saved beside the weights is then upstream's, word for
#    word.
repo="$(find_upstream)"
repo="$(cd "$repo" && pwd -P)"
if [[ "$repo" != "$(pwd -P)" ]]; then
  resolve_paths
fi
cd "$repo"

if [[ "$MOSS_LOWMEM" == 1 ]]; then
  # 4. The engine. ZeRO-3 over 8 processes, as in upstream's config, shards nothing where there is one GPU.
  #    Two lines come back: the config for accelerate, and what to tell the user.
  answer="$("$python" -m moss_tts_patches.launch engine "${ACCELERATE_CONFIG_FILE:-}")"
  { IFS= read -r config && IFS= read -r line; } <<< "$answer"
  export ACCELERATE_CONFIG_FILE="$config"
  log "$line"

  # 5. The start-up hook of every Python from here on. It does nothing except in the trainer.
  case ",${AUTOWRAPT_BOOTSTRAP:-}," in
    *,moss_tts_patches,*) ;;
    *) export AUTOWRAPT_BOOTSTRAP="${AUTOWRAPT_BOOTSTRAP:+$AUTOWRAPT_BOOTSTRAP,}moss_tts_patches" ;;
  esac
  log "family=$family upstream=$repo python=$python"
fi

# 6. From here it is upstream's own script. With the layer a small process stays above it: it passes signals on, and says
#    whether memory was full if the system kills the training, which can say nothing itself then.
if [[ "$MOSS_LOWMEM" == 1 ]]; then
  exec "$python" -m moss_tts_patches.launch.supervise bash "$family/finetuning/run_train.sh"
fi
exec bash "$family/finetuning/run_train.sh"
