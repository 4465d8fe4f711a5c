"""The compensated sum as a Triton kernel: the torch path's bits in Triton's interpreter, compiled for every card.

The interpreter has to be chosen before triton is imported, so the cases run in a process of their own: this file.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from moss_tts_patches.optim.compensated_sum import (
    COMPILE_OPTIONS,
    ELEMENTS_PER_PROGRAM,
    add_by_kernel,
    add_by_torch,
)

SIZES = (1, 1023, 1025, 5000)
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)


def run_case(add, numel):
    """Twenty additions over many orders of magnitude, with zeros and with ties."""
    generator = torch.Generator().manual_seed(numel)
    spread = 10 ** (torch.randn(numel, generator=generator) * 3)
    total, error = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int8)
    for step in range(20):
        value = (torch.randn(numel, generator=generator) * spread).bfloat16()
        if step % 3 == 0:
            value = total * 2.0**-9  # half of a last place: ties in the rounding
        add(total, error, value)
    return total, error


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("kernel") / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, str(path)], check=True, env=environment, timeout=300)
    return torch.load(path)


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_the_kernel_gives_the_bits_of_the_torch_path(interpreted, index):
    total, error = run_case(add_by_torch, SIZES[index])
    found_total, found_error = interpreted[index]
    assert torch.equal(found_total, total)
    assert torch.equal(found_error, error)
    if SIZES[index] > 1:
        assert error.unique().numel() > 10  # so that the error buffer is worth comparing
        plain = run_case(lambda total, error, value: total.add_(value), SIZES[index])[0]
        assert not torch.equal(found_total, plain)


def test_values_that_are_not_finite_reach_the_sum():
    for bad in (float("inf"), float("nan")):
        total, error = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int8)
        add_by_torch(total, error, torch.tensor([1.0, bad, 1.0, 1.0], dtype=torch.bfloat16))
        assert total.isfinite().tolist() == [True, False, True, True]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_for_every_card(capability, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moss_tts_patches.optim.triton_sum import compensated_add

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = dict(zip(compensated_add.arg_names, ["*bf16", "*i8", "*bf16", "i64", "constexpr"], strict=True))
    source = ASTSource(compensated_add, signature=signature, constexprs={"ELEMENTS": ELEMENTS_PER_PROGRAM}, attrs={})
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=COMPILE_OPTIONS)
    assert f".target sm_{capability}" in result.asm["ptx"]
    assert "div.rn.f32" in result.asm["ptx"] and "fma.rn.f32" not in result.asm["ptx"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save([run_case(add_by_kernel, size) for size in SIZES], sys.argv[1])
