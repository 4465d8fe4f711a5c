"""FSDP on two ranks: the loss within the root's forward, through modules; and what the layer asks of a config.

accelerate's plugin needs a GPU, so weights are split by torch's own FSDP here, in the way in which the plugin does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from mini import FAMILIES, clean_environment
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.engines import engine_of
from moss_tts_patches.errors import LowMemError

TESTS = Path(__file__).parent
CASES = ("depth=split,checkpointing=1", "depth=split,checkpointing=0", "depth=whole,checkpointing=1")


@pytest.fixture(scope="module", params=["1", "2"], ids=["FSDP1", "FSDP2"])
def version(request):
    return request.param


def run_ranks(*arguments):
    """Returns the job and its two words of result by family and case."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(TESTS / "sharded_ranks.py")]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *arguments], env=clean_environment(PYTHONPATH=path), capture_output=True, text=True, timeout=300
    )
    return done, {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines() if line.strip()}


@pytest.fixture(scope="module")
def lines(version):
    done, found = run_ranks(version)
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_whole_models(lines, family, case):
    loss, gradient, *_ = lines[family, case]
    assert loss != "failed", lines[family, case]
    assert float(loss) <= TOLERANCES["loss_fp32_relative"]
    assert float(gradient) <= TOLERANCES["gradient_fp32_relative"]


def test_functions_that_take_weights_are_no_way_to_do_it(version):
    """Negative control: the schedule for whole weights fails, or misses the gradients of split layers."""
    done, found = run_ranks(version, "control")
    result = found.get(("moss_tts_local", "control"), ["failed"])
    assert result[0] == "failed" or float(result[1]) > 100 * TOLERANCES["gradient_fp32_relative"], done.stderr[-2000:]


# -- the config -------------------------------------------------------------------------------------------------------


def fsdp(accumulation=2, version=1, **plugin):
    values = {"use_orig_params": True, "state_dict_type": SimpleNamespace(name="FULL_STATE_DICT"), **plugin}
    return SimpleNamespace(
        num_processes=2,
        distributed_type=DistributedType.FSDP,
        is_fsdp2=version == 2,
        gradient_accumulation_steps=accumulation,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**values)),
    )


ARGUMENTS = SimpleNamespace(gradient_accumulation_steps=2)


def test_a_config_like_upstreams_passes():
    engine = engine_of(fsdp())
    engine.check(ARGUMENTS, "full")
    assert engine.autograd_reason is not None and engine.owns_optimizer and engine.loss_inside_forward
    engine_of(fsdp(version=2, use_orig_params=False)).check(ARGUMENTS, "full")  # FSDP2 has nothing else


@pytest.mark.parametrize(
    "changes,method,message",
    [
        ({"use_orig_params": False}, "full", "fsdp_use_orig_params: false"),
        ({"state_dict_type": SimpleNamespace(name="SHARDED_STATE_DICT")}, "full", "Expected FULL_STATE_DICT"),
        ({}, "lora", "METHOD=lora: FSDP joins weights"),
        (
            {"accumulation": 8},
            "full",
            "says 8, and accelerate would follow it, while --gradient-accumulation-steps is 2",
        ),
    ],
)
def test_a_config_that_would_go_wrong_later_is_refused(changes, method, message):
    with pytest.raises(LowMemError, match=message):
        engine_of(fsdp(**changes)).check(ARGUMENTS, method)


def test_the_optimizer_that_comes_back_has_to_be_the_one_that_was_handed_over():
    ours = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    other = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    engine = engine_of(fsdp())
    wrapper = SimpleNamespace(optimizer=ours, zero_grad=None)
    assert engine.prepared_optimizer(ours, [object(), wrapper]) is wrapper
    with pytest.raises(LowMemError, match="accelerate replaced AdamW by Adam"):
        engine.prepared_optimizer(ours, [SimpleNamespace(optimizer=other, zero_grad=None)])


def test_gradients_are_exchanged_at_every_micro_batch():
    """Otherwise they accumulate whole on every GPU; test_engine_bytes.py has the bytes."""
    fake = fsdp()
    fake.gradient_state = SimpleNamespace(plugin_kwargs={"num_steps": 2})
    fake.state.fsdp_plugin.transformer_cls_names_to_wrap = None
    engine_of(fake).before_prepare(SimpleNamespace(layers=[nn.Linear(1, 1)]))
    assert fake.gradient_state.plugin_kwargs == {"num_steps": 2, "sync_each_batch": True}
    assert fake.state.fsdp_plugin.transformer_cls_names_to_wrap == ["Linear"]
