#!/usr/bin/env bash
# deepspeed.sh: puts DeepSpeed into .venv/deepspeed, a folder that only the tests for it put on their path: accelerate
# imports an installed deepspeed in every run. Does nothing where it is there already.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=(deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0)
folder=.venv/deepspeed
[[ -f "$folder/installed" && "$(cat "$folder/installed")" == "${packages[*]}" ]] && exit 0

command -v g++ > /dev/null || {
  echo "deepspeed.sh: no g++ here, with which DeepSpeed compiles its AdamW for offload. Install a C++ compiler, or run" \
    "the suite without DeepSpeed: MOSS_TEST_DEEPSPEED=none bash tests/run.sh" >&2
  exit 2
}
echo "deepspeed.sh: installing ${packages[0]} into $folder"
rm -rf "$folder"
DS_BUILD_OPS=0 .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --target "$folder" "${packages[@]}"
printf '%s\n' "${packages[*]}" > "$folder/installed"
