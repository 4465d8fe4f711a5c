#!/usr/bin/env bash
# The project's whole check: format, lint, types, tests. Arguments go to pytest.
# With MOSS_TTS_REPO set to a MOSS-TTS checkout, the tests against the real upstream run too.
# MOSS_TEST_DEEPSPEED: another folder with DeepSpeed than .venv/deepspeed, or `none` to leave its tests out.
# MOSS_TEST_ZERO=all runs ZeRO with all families instead of one for each case.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tests/venv.sh test
if [[ -z "${MOSS_TEST_DEEPSPEED:-}" ]]; then
  bash tests/deepspeed.sh
  export MOSS_TEST_DEEPSPEED="$PWD/.venv/deepspeed"
fi
export PATH="$PWD/.venv/bin:$PATH" # `accelerate` and `moss-lowmem` are those of this environment
python="$PWD/.venv/bin/python"

"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
exec "$python" -m pytest "$@"
