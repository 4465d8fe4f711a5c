"""The Triton kernel: beside the torch path in Triton's interpreter, and compiled for every supported card without one.

The interpreter has to be chosen before triton is imported, so the cases run in a process of their own: this file.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch
from tolerances import TOLERANCES

from moss_tts_patches.optim import kernel
from moss_tts_patches.optim.adamw_update import AdamWScalars, update_parameter
from moss_tts_patches.optim.blockwise import CodeTables, block_count
from moss_tts_patches.optim.stochastic_rounding import RoundingNoise

SIZES = (1, 255, 257, 3000)
DTYPES = (torch.bfloat16, torch.float32)
CASES = list(itertools.product(SIZES, (True, False), DTYPES, DTYPES))
OFFSET = 2**35 + 256
STEPS = (1, 2, 16)
LR = 1e-4
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)


def states_of(numel: int, quantized: bool) -> dict[str, torch.Tensor]:
    if not quantized:
        return {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
    return {
        "exp_avg_codes": torch.zeros(numel, dtype=torch.uint8),
        "exp_avg_absmax": torch.zeros(block_count(numel)),
        "exp_avg_sq_codes": torch.zeros(numel, dtype=torch.uint8),
        "exp_avg_sq_absmax": torch.zeros(block_count(numel)),
    }


def run_case(update, numel, quantized, dtype, gradient_dtype, bad: float | None = None):
    """Three steps with gradients over many decades, some zero; returns the weights and the states."""
    generator = torch.Generator().manual_seed(numel)
    weight, states = (torch.randn(numel, generator=generator) * 0.02).to(dtype), states_of(numel, quantized)
    tables = CodeTables.build("cpu")
    for step in STEPS:
        gradient = torch.randn(numel, generator=generator) * 10 ** (torch.randn(numel, generator=generator) * 2 - 4)
        gradient[numel // 2 : numel // 2 + 30] = 0
        if bad is not None:
            gradient[numel // 3] = bad
        scalars = AdamWScalars.of(LR, (0.9, 0.999), 1e-8, 0.01, step)
        noise = RoundingNoise.of(2**63 + 5, step, "layers.0.weight", weight.device)
        update(weight, gradient.to(gradient_dtype), states, scalars, noise, tables, OFFSET)
    return {"weight": weight, **states}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("kernel") / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, str(path)], check=True, env=environment, timeout=300)
    return torch.load(path)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_kernel_and_torch_path_agree(interpreted, index):
    numel, _, dtype, _ = CASES[index]
    expected, found = run_case(update_parameter, *CASES[index]), interpreted["cases"][index]
    weight, reference = found["weight"], expected.pop("weight")
    for name, state in expected.items():
        assert torch.equal(found[name], state), name  # moments need no square root: the same bits
    if dtype == torch.float32:
        relative, over_lr = TOLERANCES["optimizer_kernel_fp32_relative"], TOLERANCES["optimizer_kernel_fp32_over_lr"]
        assert torch.allclose(weight, reference, rtol=relative, atol=over_lr * LR)
    else:
        assert (weight != reference).sum() <= TOLERANCES["optimizer_kernel_bf16_share"] * numel


def test_rounding_noise_is_the_same_and_offset_dependent(interpreted):
    """In bfloat16 a different stream shows at once: the control draws from another offset."""
    case = (3000, True, torch.bfloat16, torch.bfloat16)
    found = interpreted["cases"][CASES.index(case)]["weight"]

    def elsewhere(weight, gradient, states, scalars, noise, tables, first_element):
        update_parameter(weight, gradient, states, scalars, noise, tables, first_element - 256)

    assert torch.equal(found, run_case(update_parameter, *case)["weight"])
    assert (found != run_case(elsewhere, *case)["weight"]).float().mean() > 0.01


def test_values_that_are_not_finite_behave_alike(interpreted):
    for bad, found in zip((float("nan"), float("inf")), interpreted["bad"]):
        expected = run_case(update_parameter, 600, True, torch.bfloat16, torch.float32, bad)
        assert torch.equal(found["weight"].isnan(), expected["weight"].isnan()) and found["weight"].isnan().any()
        for name in ("exp_avg_absmax", "exp_avg_sq_absmax"):
            assert torch.equal(found[name].isfinite(), expected[name].isfinite())
            assert not found[name].isfinite().all() and found[name].isfinite().any()


def compiled(capability: int, dtype: str, gradient_dtype: str, quantized: bool):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moss_tts_patches.optim.triton_adamw import adamw_step

    state = "*u8" if quantized else "*fp32"
    pointers = [f"*{dtype}", f"*{gradient_dtype}", state, "*fp32", state, "*fp32", *["*fp32"] * 4]
    types = pointers + ["i64"] * 5 + ["fp32"] * 8 + ["constexpr"] * 2
    signature = dict(zip(adamw_step.arg_names, types, strict=True))
    constants = {"ROWS": kernel.ROWS_PER_PROGRAM, "QUANTIZED": quantized}
    source = ASTSource(adamw_step, signature=signature, constexprs=constants, attrs={})
    options = {"num_warps": kernel.WARPS_PER_PROGRAM, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_for_every_card(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    result = compiled(capability, "bf16", "bf16", True)
    assert f".target sm_{capability}" in result.asm["ptx"]
    assert len(result.asm["cubin"]) > 1000
    # Without fused multiply-add the numbers are those of the torch path; the one exception would be ours to explain.
    assert "fma.rn.f32" not in result.asm["ptx"]
    assert "div.rn.f32" in result.asm["ptx"] and "sqrt.rn.f32" in result.asm["ptx"]


@pytest.mark.parametrize("dtype, gradient_dtype, quantized", [("fp32", "fp32", False), ("bf16", "fp32", True)])
def test_every_variant_compiles(dtype, gradient_dtype, quantized, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "cubin" in compiled(90, dtype, gradient_dtype, quantized).asm


def test_offsets_are_64_bit(tmp_path, monkeypatch):
    """No 32-bit number is widened into an address after the multiplication that may overflow."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ir = compiled(90, "bf16", "bf16", True).asm["ttir"]
    big = [line for line in ir.splitlines() if "tt.addptr" in line and "bf16" in line]
    assert big and all("xi64>" in line for line in big)


def test_one_compilation_serves_all_sizes_and_steps():
    pytest.importorskip("triton")
    from moss_tts_patches.optim.triton_adamw import adamw_step

    specialised = [parameter.name for parameter in adamw_step.params if not parameter.do_not_specialize]
    runtime = {"numel", "first_call", "key", "step_word", "name_word"}
    assert runtime.isdisjoint(specialised)
    assert {parameter.name for parameter in adamw_step.params if parameter.is_constexpr} == {"ROWS", "QUANTIZED"}


def test_the_kernel_is_not_for_the_cpu():
    assert not kernel.usable(torch.device("cpu"))


def test_a_kernel_that_does_not_run_is_one_warning(monkeypatch):
    def broken(device):
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(kernel, "_run_trial", broken)
    kernel.usable.cache_clear()
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler") as caught:
        assert not kernel.usable(torch.device("cuda", 3))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernel.usable(torch.device("cuda", 3))
    kernel.usable.cache_clear()


def main(path: str) -> None:
    """Runs all cases through the kernel; started with TRITON_INTERPRET=1."""
    results = {
        "cases": [run_case(kernel.update_parameter, *case) for case in CASES],
        "bad": [
            run_case(kernel.update_parameter, 600, True, torch.bfloat16, torch.float32, bad)
            for bad in (float("nan"), float("inf"))
        ],
    }
    torch.save(results, path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
