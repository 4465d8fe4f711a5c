"""What long runs cost besides training: the data check, resume points, the replay, and kills. Needs no GPU.

    MOSS_TTS_REPO=… python benchmarks/resume.py --json benchmarks/results/resume.json

Seconds are of one process's CPU where "cpu" is in a name, else by the clock of a machine that may have other work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from machine import describe_run
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_resume_kill import KEEP, kill_a_writer, payload

from moss_tts_patches.adapters.injection import inject
from moss_tts_patches.adapters.plan import AdapterPlan
from moss_tts_patches.cores import cores
from moss_tts_patches.data.check import RecordCheck, make_counter
from moss_tts_patches.data.install import no_garbage_collection
from moss_tts_patches.data.pool import examiners
from moss_tts_patches.data.processors import load_processor
from moss_tts_patches.families import FAMILIES
from moss_tts_patches.memory.upstream_source import SOURCES, load_classes
from moss_tts_patches.optim.optimizers import AdamW8bit
from moss_tts_patches.runtime.resume.point import points_in, write_point
from moss_tts_patches.runtime.resume.tensors import write_weights

PACKAGES = ("torch", "transformers", "tokenizers", "orjson", "numpy", "moss_tts_patches")
RECORDS = {(300, 32): 600, (100, 12): 2400}  # by frames and codebooks: 29 and 12 MB
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "make", "toast")
FULL_SIZE = (
    ("moss_tts_local", "1.7b"),
    ("moss_tts_delay", "8b"),
    ("moss_tts_local_v1.5", "4b"),
    ("moss_tts_realtime", "1.7b"),
)
SAVED_BYTES = 2**30
KILLS = 50
REPLAYED_EPOCHS, MINI_RECORDS = 100, 400


def check_rows(checkpoint: Path, repository: Path, folder: Path) -> list[dict[str, Any]]:
    """Records a second of the check alone and of a training's reading, by one process and by several."""
    family = next(family() for family in FAMILIES if family.name == "moss_tts_local")
    processor = load_processor(checkpoint, [checkpoint, repository / family.name])
    rows = []
    for (frames, codebooks), count in RECORDS.items():
        path = folder / f"{frames}.jsonl"
        write_records(path, count, frames, codebooks)
        rules = family.record_rules(SimpleNamespace(n_vq=codebooks, audio_vocab_size=1024))
        for keeps in (False, True):
            for workers in sorted({1, max(2, cores())}):
                for exact in (True, False):
                    counter = make_counter(rules, processor if exact else None)
                    cpu, seconds = best_of_two(partial(read_all, path, rules, counter, keeps, workers))
                    rows.append(
                        {
                            "frames": frames,
                            "codebooks": codebooks,
                            "records": count,
                            "keeps_records": keeps,
                            "exact_positions": exact,
                            "workers": workers,
                            "records_a_second": round(count / seconds),
                            "records_a_cpu_second_of_this_process": round(count / cpu),
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def write_records(path: Path, count: int, frames: int, codebooks: int) -> None:
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            codes = [rng.choices(range(1024), k=codebooks) for _ in range(frames)]
            text = " ".join(rng.choices(WORDS, k=25)) + "."
            file.write(json.dumps({"id": str(number), "text": text, "audio_codes": codes}) + "\n")


def read_all(path: Path, rules: Any, counter: Any, keeps: bool, workers: int) -> None:
    with no_garbage_collection(), examiners(rules, keeps, workers) as examine:  # as a training reads them
        check = RecordCheck(counter, examine)
        kept = [record for record in check.read(path) if keeps]
    assert len(check.finish().positions) == (len(kept) if keeps else check.finish().records)


def best_of_two(run: Callable[[], object]) -> tuple[float, float]:
    found = []
    for _ in range(2):
        began = time.process_time(), time.perf_counter()
        run()
        found.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return min(cpu for cpu, _ in found), min(seconds for _, seconds in found)


def size_rows(repository: Path) -> list[dict[str, Any]]:
    """Bytes of a resume point of each full-size model: weights as they are trained, and 8-bit states."""
    rows = []
    for name, size in FULL_SIZE:
        family = next(family() for family in FAMILIES if family.name == name)
        source = SOURCES[name]
        model_class, config_class = load_classes(repository / source.folder, source)
        for method in ("full", "lora"):
            with torch.device("meta"):
                model = model_class(family.full_size_config(config_class, size)).to(torch.bfloat16)
                if method == "lora":
                    plan = AdapterPlan("lora", options={"r": 16, "lora_alpha": 32})
                    inject(model, plan, family.adapter_groups, base_model="simulated", seed=0)
                else:
                    for parent, attribute in family.unread_embeddings(model):
                        getattr(parent, attribute).requires_grad_(False)
            trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            optimizer = AdamW8bit(trained)
            weights = sum(p.numel() * p.element_size() for _, p in trained)
            states = sum(spec.size(p.numel()) for _, p in trained for spec in optimizer.layout_of(p).values())
            row = {"family": name, "size": size, "method": method, "weight_bytes": weights, "state_bytes": states}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def save_figures(folder: Path) -> dict[str, Any]:
    """Writes a point of 1 GiB, and as many bytes by themselves: what the disk takes without any of it."""
    count = 16
    parameters = {
        f"layer.{number}": nn.Parameter(torch.randn(SAVED_BYTES // count // 2).to(torch.bfloat16))
        for number in range(count)
    }
    began = time.perf_counter(), time.process_time()
    values = {"position": {"steps": 1}}
    write_point(folder / "points", values, {0: {}}, lambda inner: write_weights(inner, parameters), print)
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    began_plain = time.perf_counter()
    block = os.urandom(2**25)
    with open(folder / "plain", "wb") as file:
        for _ in range(SAVED_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    plain = time.perf_counter() - began_plain
    found = {"bytes": SAVED_BYTES, "seconds": seconds, "cpu_seconds": cpu, "disk_seconds": plain}
    print(json.dumps(found), flush=True)
    return found


def kill_figures(folder: Path) -> dict[str, int]:
    """Kills writers at random moments; after each, every point that is found has to be whole."""
    root, moments = folder / "killed", random.Random(8)
    resumable = torn = early = 0
    first = 1
    for _ in range(KILLS):
        kill_a_writer(moments.uniform(0.02, 0.12), root, first)
        torn += root.exists() and any(".incomplete-" in path.name for path in root.iterdir())
        points = points_in(root)
        early += first == 1 and not points  # killed in the very first save: there is nothing to resume yet
        whole = [
            point
            for point in points
            if all(
                (point.folder / f"part-{part}.safetensors").read_bytes() == payload(point.step + part)
                for part in range(3)
            )
        ]
        assert len(whole) == len(points), "a torn point was taken for whole"
        resumable += bool(whole)
        first = max([first, *(point.step for point in points)]) + 1
    found = {
        "kills": KILLS,
        "before_the_first_save_was_done": early,
        "resumable": resumable,
        "in_the_middle_of_a_save": torn,
        "keep": KEEP,
    }
    print(json.dumps(found), flush=True)
    return found


def replay_figures(folder: Path) -> dict[str, Any]:
    """Lets the miniature's trainer run through finished micro-batches: CPU of a long replay less that of a short one.

    The points are those of a real first step, moved to the end of the training by their counts.
    """
    from mini import make_mini_inputs, run_mini

    inputs = make_mini_inputs(folder / "inputs", records=MINI_RECORDS, frames=(2, 2))
    once = ("--per-device-batch-size", "1", "--gradient-accumulation-steps", "1")
    environment = {
        "MOSS_LOWMEM": "1",
        "AUTOWRAPT_BOOTSTRAP": "moss_tts_patches",
        "MOSS_LOWMEM_SAVE_STEPS": "1",
        "MOSS_LOWMEM_LONGEST_FIRST": "0",
        "MOSS_LOWMEM_SELF_CHECK": "0",
    }
    first = run_mini(inputs, folder / "out", *once, "--max-train-steps", "1", environment=environment)
    point = next(iter(points_in(first.folder / "resume")))
    cpu = {}
    for epochs in (2, REPLAYED_EPOCHS):
        manifest = point.folder / "point.json"
        values = json.loads(manifest.read_text(encoding="utf-8"))
        done = epochs * MINI_RECORDS - 2
        values["position"] |= {"epoch": epochs - 1, "batches": MINI_RECORDS - 2, "micro_batches": done, "steps": done}
        manifest.write_text(json.dumps(values), encoding="utf-8")
        variables = {**environment, "MOSS_LOWMEM_SAVE_STEPS": "0", "MOSS_LOWMEM_RESUME": str(point.folder)}
        before = children_cpu()
        arguments = (*once, "--num-epochs", str(epochs))
        run = run_mini(inputs, folder / f"out{epochs}", *arguments, environment=variables)
        cpu[epochs] = children_cpu() - before
        assert f"resume replayed={done} micro-batches" in run.output, run.output[-2000:]
        print(next(line for line in run.output.splitlines() if "resume replayed=" in line), flush=True)
    passed = (REPLAYED_EPOCHS - 2) * MINI_RECORDS
    found = {"micro_batches": passed, "cpu_seconds": cpu[REPLAYED_EPOCHS] - cpu[2]}
    found["micro_batches_a_cpu_second"] = round(passed / found["cpu_seconds"])
    print(json.dumps(found), flush=True)
    return found


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measures and prints; writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="for exact positions: a moss_tts_local one, of any size")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repository = Path(os.environ["MOSS_TTS_REPO"])
    results = describe_run(PACKAGES, torch.device("cpu")) | {"usable_cores": cores()}
    with tempfile.TemporaryDirectory(prefix="moss_lowmem_resume_") as name:
        folder = Path(name)
        checkpoint = arguments.checkpoint or make_checkpoint(repository, folder / "tiny")
        results["replay"] = replay_figures(folder)
        results["kills"] = kill_figures(folder)
        results["sizes"] = size_rows(repository)
        results["save"] = save_figures(folder)
        results["check"] = check_rows(checkpoint, repository, folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def make_checkpoint(repository: Path, folder: Path) -> Path:
    """Makes a tiny checkpoint in a process of its own, as the tests do."""
    import subprocess

    script = Path(__file__).parents[1] / "tests" / "make_tiny.py"
    subprocess.run([sys.executable, script, repository, "moss_tts_local", folder], check=True, capture_output=True)
    return folder


if __name__ == "__main__":
    main()
