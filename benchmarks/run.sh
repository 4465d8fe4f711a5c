#!/usr/bin/env bash
# Writes every number and picture that README and docs quote, from an empty benchmarks/results:
# MOSS_TTS_REPO=/path/to/MOSS-TTS bash benchmarks/run.sh [STEP…]
# Without arguments all steps run, about an hour of one CPU core; a step that fails ends the run. Needs the extra `dev`,
# no GPU, no weights; downloads DeepSpeed for its estimators unless MOSS_TEST_DEEPSPEED names a folder with it.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -d "${MOSS_TTS_REPO:-}/moss_tts_local" ]]; then
  echo "benchmarks/run.sh: MOSS_TTS_REPO=${MOSS_TTS_REPO:-} is no MOSS-TTS checkout." \
    "Get one: git clone https://github.com/OpenMOSS/MOSS-TTS" >&2
  exit 2
fi
results=benchmarks/results
mkdir -p "$results"

# -- steps: one function each, in the order in which they run ---------------------------------------------------------

ladders() { python benchmarks/ladders.py; }           # docs/memory.md
comparison() { python benchmarks/comparison.py; }     # upstream, a LoRA script and every rung, by length
zero() { python benchmarks/zero.py; }                 # DeepSpeed's estimates
scaling() { python benchmarks/scaling.py; }           # docs/scaling.md
adapters() { python benchmarks/adapters.py --json "$results/adapters.json"; }
full_simulations() {                                  # what README's tables quote
  python benchmarks/memory.py --json "$results/memory-local.json"
  local baselines=("upstream" "upstream, checkpointing" "staged" "staged, both on host"
    "staged, both and idle weights on host")
  for size in 8b 1.7b; do
    python benchmarks/memory.py --family moss_tts_delay --size "$size" --positions 600 --only "${baselines[@]}" \
      --json "$results/memory-delay-$size.json"
  done
  python benchmarks/memory.py --family moss_tts_local_v1.5 --positions 600 --only "${baselines[@]}" \
    "staged, gradients on host" --json "$results/memory-local-v1.5.json"
  python benchmarks/memory.py --family moss_tts_realtime --positions 600 --only "${baselines[@]}" \
    --json "$results/memory-realtime-1.7b.json"
}
optimizers() { python benchmarks/optimizers.py --device cpu; }
convergence() { python benchmarks/convergence.py; }   # and docs/images/convergence.png
time_on_cpu() { python benchmarks/time_cpu.py; }
learning() { python benchmarks/learning.py; }         # and docs/images/learning.png
fidelity() { python benchmarks/fidelity.py; }
long_runs() { python benchmarks/resume.py --json "$results/resume.json"; }
cuda() {
  if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    bash benchmarks/gpu.sh
  else
    echo "no CUDA card here: docs/benchmarks.md says so, row by row"
  fi
}
picture() {                                           # docs/images/memory.png, data-flow.png
  python benchmarks/plot_memory.py
  python docs/draw_data_flow.py
}
page() { python benchmarks/page.py; }                 # docs/benchmarks.md

steps=(ladders comparison zero scaling adapters full_simulations optimizers convergence time_on_cpu learning fidelity
  long_runs cuda picture page)

# ---------------------------------------------------------------------------------------------------------------------

[[ $# -eq 0 ]] || steps=("$@")
python benchmarks/machine.py
for step in "${steps[@]}"; do
  if ! declare -F "$step" >/dev/null; then
    echo "benchmarks/run.sh: no step $step." >&2
    exit 2
  fi
  echo "== $step"
  began=$SECONDS
  "$step"
  echo "== $step took $((SECONDS - began)) s"
done
