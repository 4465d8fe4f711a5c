#!/usr/bin/env bash
# venv.sh [EXTRA]: makes .venv in the project root, with the package, one of its extras, and the versions that were
# tested. Does nothing where that has been done already. PYTHON names the Python to start from (default: python3).
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$(pwd -P)"
extra="${1:-}"
python="$root/.venv/bin/python"
constraints=tests/constraints.txt

# A virtual environment holds its own path in its scripts: one that came along with a moved checkout is of no use.
if ! grep -qsF "$root/.venv" .venv/bin/activate || ! "$python" -c '' 2> /dev/null; then
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || { echo "venv.sh: ${PYTHON:-python3} is not a Python 3.10 or newer; name one in PYTHON." >&2; exit 2; }
  echo "venv.sh: making $root/.venv"
  "${PYTHON:-python3}" -m venv --clear .venv
fi

# What was installed, by the content of the files that say what to install.
stamp=".venv/installed_${extra:-package}"
wanted="$(cat setup.cfg pyproject.toml "$constraints" | cksum)"
if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
  # torch first and alone: it is nine tenths of the download, and once it is there nothing below asks for another build.
  torch="$(grep '^torch==' "$constraints")"
  echo "venv.sh: installing $torch"
  "$python" -m pip install --quiet "$torch"
  echo "venv.sh: installing moss_tts_patches${extra:+[$extra]}"
  "$python" -m pip install --quiet --constraint "$constraints" --editable ".${extra:+[$extra]}"
  printf '%s\n' "$wanted" > "$stamp"
fi
