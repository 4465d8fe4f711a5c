"""What ZeRO needs for each model on one GPU, by DeepSpeed's own estimators, in GiB of model states.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/zero.py [--deepspeed FOLDER]

The estimators know weights, gradients and optimizer states only, no activations and no buffers for communication. They
take parameter counts: those of upstream's classes, built on the meta device. DeepSpeed is imported in a process of its
own, from ``--deepspeed`` or ``MOSS_TEST_DEEPSPEED`` (a folder made by the pip command below), else from the
environment; where it is in none of them the script runs that command into a temporary folder. It is not among the
requirements, as accelerate imports an installed DeepSpeed in every training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from comparison import MODELS
from machine import describe_run

from moss_tts_patches.units import GIB

OUTPUT = Path(__file__).resolve().parent / "results/zero.json"
REQUIREMENTS = ("deepspeed==0.19.8", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")

# Run in a process of its own: counts come in by standard input, rows go out by a file, as deepspeed prints when it is
# imported. Both stages are asked for one GPU of one node; ``zero_init`` is what accelerate uses for from_pretrained.
WORKER = """
import json, sys
import deepspeed
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage2
rows = []
for model, count in json.load(sys.stdin).items():
    total, largest = count["parameters"], count["largest_layer"]
    found = {
        "ZeRO-3, one GPU": stage3(total, largest, cpu_offload=False, cpu_offload_params=False),
        "ZeRO-2, optimizer offloaded": stage2(total, cpu_offload=True),
        "ZeRO-3, optimizer offloaded": stage3(total, largest, cpu_offload=True, cpu_offload_params=False),
        "ZeRO-3, optimizer and weights offloaded": stage3(total, largest, cpu_offload=True, cpu_offload_params=True),
    }
    rows += [{"model": model, "name": name, "state_bytes": memory[1], "host_bytes": memory[0], **count}
             for name, memory in found.items()]
json.dump({"deepspeed": deepspeed.__version__, "rows": rows}, open(sys.argv[1], "w"))
"""


def count_parameters(repository: Path) -> dict[str, dict[str, int]]:
    """Counts all parameters, tied ones once, and those of the largest module; on the meta device.

    Source: DeepSpeed, ``runtime/zero/stage3.py``, ``model_to_params``.
    """
    from moss_tts_patches.memory.full_ladder import Wanted, make_subject
    from moss_tts_patches.memory.rungs import MicroBatch

    counts = {}
    for model, (family, size) in MODELS.items():
        subject = make_subject(Wanted(family, size, None, repository, MicroBatch(1, 600, 350), {}))
        with torch.device("meta"):
            built = subject.model_class(subject.config)
        layers = (sum(p.numel() for p in module.parameters(recurse=False)) for module in built.modules())
        counts[model] = {"parameters": sum(p.numel() for p in built.parameters()), "largest_layer": max(layers)}
    return counts


def estimate(counts: dict[str, dict[str, int]], folder: str | None) -> dict[str, Any]:
    """Asks DeepSpeed, from a folder or from the environment.

    Raises:
        SystemExit: it cannot be imported; with what it said.
    """
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [environment.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "rows.json"
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(result)],
            input=json.dumps(counts),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"benchmarks/zero.py: DeepSpeed's estimators cannot be imported:\n{done.stderr[-1500:]}\n"
                f"Install them beside the environment: {' '.join(install_command('FOLDER'))}; then --deepspeed FOLDER."
            )
        return json.loads(result.read_text(encoding="utf-8"))


def install_command(folder: str) -> list[str]:
    return [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *REQUIREMENTS]


def main() -> None:
    """Estimates, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", default=os.environ.get("MOSS_TEST_DEEPSPEED"), metavar="FOLDER")
    parser.add_argument("--json", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    repository = Path(os.environ["MOSS_TTS_REPO"])
    counts = count_parameters(repository)
    if arguments.deepspeed or find_spec("deepspeed") is not None:
        found = estimate(counts, arguments.deepspeed)
    else:
        with tempfile.TemporaryDirectory() as folder:
            print("DeepSpeed is not here; installing it into a temporary folder", flush=True)
            subprocess.run(install_command(folder), env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)
            found = estimate(counts, folder)
    for row in found["rows"]:
        print(f"{row['model']:14} {row['name']:40} states {row['state_bytes'] / GIB:6.2f} GiB  "
              f"host {row['host_bytes'] / GIB:6.2f} GiB")  # fmt: skip
    head = describe_run(("torch", "transformers"), torch.device("cpu"), repository)
    head["versions"]["deepspeed"] = found["deepspeed"]
    arguments.json.write_text(json.dumps({**head, "rows": found["rows"]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
