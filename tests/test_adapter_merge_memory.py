"""Issue 5, "Must show" 4: a merge at the real widths of moss_tts_delay needs less memory than its shards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mini import clean_environment
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_adapters import largest_difference, record_of
from tolerances import TOLERANCES

from moss_tts_patches.adapters.safetensors_shards import BLOCK_ELEMENTS, TensorEntry, row_blocks, write_tensors

PREFIX = "base_model.model."

# Arguments: base, adapter, output, and the size of what is held afterwards to show that the meter sees it.
_MEASURE = """
import sys, torch
from pathlib import Path
from moss_tts_patches.adapters.merge import merge_adapter

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

base, adapter, output = map(Path, sys.argv[1:4])
before = status("VmRSS")
merge_adapter(adapter, output, base)
print(status("VmHWM") - before)
held = torch.ones(int(sys.argv[4]), dtype=torch.uint8)
print(status("VmHWM") - before)
"""


def delay_shapes() -> list[dict[str, tuple[int, ...]]]:
    """moss_tts_delay's own widths: one layer of its 36, three of its 33 heads, no embeddings; two shards."""
    widths = {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096)}
    widths |= {"self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (12288, 4096), "mlp.up_proj": (12288, 4096)}
    widths |= {"mlp.down_proj": (4096, 12288)}
    layer = {f"language_model.layers.0.{name}.weight": size for name, size in widths.items()}
    heads = {f"lm_heads.{n}.weight": (1025 if n else 151936, 4096) for n in range(3)}
    return [heads, layer]


def make_delay(folder: Path) -> int:
    """Writes random bf16 shards; returns the size of the largest."""
    folder.mkdir()
    noise = (torch.randn(BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    places, sizes = {}, []
    for number, shapes in enumerate(delay_shapes(), start=1):
        entries = {name: TensorEntry(torch.bfloat16, shape) for name, shape in shapes.items()}
        file = f"model-{number:05d}-of-00002.safetensors"

        def parts(name, entries=entries):
            for first, last in row_blocks(entries[name].shape):
                rows = (last - first, *entries[name].shape[1:])
                yield noise[: rows[0] * rows[1]].reshape(rows)

        write_tensors(folder / file, entries, parts, {}, lambda size: None)
        sizes.append((folder / file).stat().st_size)
        places.update(dict.fromkeys(shapes, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    return max(sizes)


def make_delay_adapter(folder: Path, rank: int = 16) -> None:
    """Every projection and the text head, the largest tensor there is."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for shapes in delay_shapes():
        for name, (rows, width) in shapes.items():
            if "proj" in name or name == "lm_heads.0.weight":
                module = PREFIX + name.removesuffix(".weight")
                tensors[f"{module}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.01
                tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": r".*_proj|lm_heads\.0"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    record_of("away", base_dtype="bfloat16", rank=rank, alpha=32).write(folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux' /proc")
def test_memory_stays_within_one_and_a_half_shards(tmp_path):
    largest = make_delay(tmp_path / "base")
    make_delay_adapter(tmp_path / "adapter")

    bound = TOLERANCES["merge_peak_over_largest_shard"] * largest
    folders = [str(tmp_path / name) for name in ("base", "adapter", "merged")]
    command = [sys.executable, "-c", _MEASURE, *folders, str(int(1.1 * bound))]
    try:
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        peak, control = map(int, done.stdout.split())
        print(f"\nlargest shard {largest / 2**30:.2f} GiB, peak of the merge {peak / 2**30:.2f} GiB")
        assert peak <= bound < control
        check_sample(tmp_path)
    finally:
        for name in ("base", "merged"):  # 3 GB that pytest would keep for three runs
            shutil.rmtree(tmp_path / name, ignore_errors=True)


def check_sample(folder: Path) -> None:
    """The last rows of the largest tensor, which are in the last of its blocks."""
    name, rows = "lm_heads.0.weight", slice(151930, 151936)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    change = adapter[PREFIX + "lm_heads.0.lora_B.weight"][rows] @ adapter[PREFIX + "lm_heads.0.lora_A.weight"] * 2
    with (
        safe_open(folder / "base" / "model-00001-of-00002.safetensors", framework="pt") as before,
        safe_open(folder / "merged" / "model-00001-of-00002.safetensors", framework="pt") as after,
    ):
        expected = before.get_slice(name)[rows].float() + change
        found = after.get_slice(name)[rows].float()
        assert largest_difference({name: found}, {name: expected}) <= 2**-8
        assert largest_difference({name: before.get_slice(name)[rows].float()}, {name: expected}) > 2**-8
