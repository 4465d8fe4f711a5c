#!/usr/bin/env bash
# Compares simulated peaks with a real card's, under a cap of 16 GiB, in a few minutes:
# MOSS_TTS_REPO=/path/to/MOSS-TTS bash benchmarks/gpu_check.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python benchmarks/gpu.py --caps 16 --json benchmarks/results/gpu.json "$@"
