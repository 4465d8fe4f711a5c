#!/usr/bin/env python3
"""Writes down how closely loss and gradients agree with upstream's code: what tests/test_fidelity.py asserts on.

    MOSS_TTS_REPO=/path/to/MOSS-TTS python benchmarks/fidelity.py [--json FILE]

Takes about a minute on one core and writes benchmarks/results/fidelity.json. Ends with status 1, and the figures
written, where one of them is above what the tests allow.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from machine import describe_run
from upstream_local import TESTS, find_upstream

sys.path.insert(0, str(TESTS))
from fidelity import BF16_SEEDS, Upstream, allowed, cases, is_close

RESULT = Path(__file__).resolve().parent / "results" / "fidelity.json"
PACKAGES = ("torch", "transformers", "peft", "moss_tts_patches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repository = find_upstream()
    families: dict[str, Upstream] = {}
    rows, failed = [], []
    for case in cases():
        if case.family not in families:
            families[case.family] = Upstream(repository, case.family)
        found, bounds = families[case.family].compare(case), allowed(case)
        rows.append({**asdict(case), **asdict(found), "loss_allowed": bounds[0], "gradient_allowed": bounds[1]})
        if not is_close(case, found):
            failed.append(str(case))
        print(f"{case!s:45} loss={found.loss_difference:.1e} gradients={found.gradient_error:.3g}", flush=True)
    result = {
        **describe_run(PACKAGES, torch.device("cpu"), repository),
        "command": "python benchmarks/fidelity.py",
        "bf16_batches": BF16_SEEDS,
        "rows": rows,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"above what the tests allow: {', '.join(failed)}")


if __name__ == "__main__":
    main()
