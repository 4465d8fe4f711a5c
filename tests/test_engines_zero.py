"""DeepSpeed ZeRO-2 and ZeRO-3 on two CPU ranks that really split, beside DDP on two ranks.

accelerate takes a DeepSpeed job on CPUs for one process; ``rank_server.py`` lets it see the ranks, as it does on GPUs.
"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import deepspeed_packages
import pytest
import torch
from accelerate.utils import DistributedType
from mini import FAMILIES, MINI, command_line, make_mini_inputs
from ranks import EXACT, LAYER, RankServer, layer
from test_training_runs import assert_same_weights
from tolerances import TOLERANCES
from torch import nn

from moss_tts_patches.engines import engine_of
from moss_tts_patches.errors import LowMemError

needs_deepspeed = pytest.mark.skipif(not deepspeed_packages.is_there(), reason=deepspeed_packages.REASON)
needs_compiler = pytest.mark.skipif(not deepspeed_packages.can_compile(), reason="DeepSpeedCPUAdam needs g++")

LIKE_UPSTREAM = {**EXACT, "MOSS_LOWMEM_CORRECTIONS": "learning_rate_steps,gradient_clipping"}
LORA = {"MOSS_LOWMEM_METHOD": "lora", "MOSS_LOWMEM_LORA_DROPOUT": "0", "MOSS_LOWMEM_MERGE": "none"}
# Two processes of 3 s a step are slow: in CI the family with a depth model trains in full, and the one whose ZeRO-3
# load upstream gets wrong too; adapters are those of v1.5, with code of its own.
FULL = FAMILIES if deepspeed_packages.EVERY_CASE else ("moss_tts_local", "moss_tts_realtime")
ADAPTED = FAMILIES if deepspeed_packages.EVERY_CASE else ("moss_tts_local_v1.5",)
# A gradient norm that clipping changes, and an eps above single gradients' noise.
OPTIONS = ("--max-grad-norm", "0.1", "--adam-eps", "1e-6", "--num-epochs", "2")


def zero(stage, folder, offload=False):
    """What `accelerate launch` makes of lowmem:zero2 and lowmem:zero3, but that no weight is too small to be split."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
            **({"offload_param": {"device": "cpu"}} if offload and stage == 3 else {}),
        },
    }
    path = folder / f"zero{stage}-{offload}.json"
    path.write_text(json.dumps(config))
    names = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    return {**names, "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(stage == 3).lower()}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    return functools.partial(zero, folder=folder)


@pytest.fixture(scope="module")
def server():
    with RankServer(**deepspeed_packages.variables()) as running:
        yield running


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    root = tmp_path_factory.mktemp("zero")
    inputs = functools.cache(
        lambda family: make_mini_inputs(root / f"{family.replace('.', '_')}_zero", family=family, records=8)
    )

    @functools.cache
    def training(family, layer=(), check=True, options=OPTIONS):
        output = root / f"job{len(list(root.glob('job*')))}"
        arguments = command_line(inputs(family), output, *options)
        return server.run(
            f"{family}/finetuning/sft.py", arguments, output, folder=MINI, environment=dict(layer), check=check
        )

    return training


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("family", FULL)
def test_full_training_equals_ddp(run, engine, family, stage):
    """ZeRO-3 also with ranks that have different numbers of supervised frames; clipping at the trainer's norm."""
    expected = run(family, layer(LIKE_UPSTREAM))
    found = run(family, layer(LIKE_UPSTREAM, engine(stage)))
    assert found.losses == pytest.approx(expected.losses, abs=TOLERANCES["printed_loss_unit"])
    assert found.rates == expected.rates
    assert_same_weights(found.weights(), expected.weights())  # names and shapes too: nothing is missing, nothing split
    assert found.writers == {"0"}  # under ZeRO-3 the others have empty weights
    assert f"engine='DeepSpeed ZeRO-{stage}'" in found.outputs[0]


@needs_deepspeed
@pytest.mark.parametrize(
    "family,stage,method",
    [("moss_tts_local", 2, {}), ("moss_tts_local", 3, LORA), ("moss_tts_local_v1.5", 3, {})],
    ids=["local-2", "local-3-lora", "v1.5-3"],
)
def test_validation_equals_ddp_and_disturbs_nothing(run, engine, family, stage, method):
    """3 records held out, in batches of 2: one process has a batch of two records, the other one of one."""
    held = {"MOSS_LOWMEM_VALID_SHARE": "0.4", "MOSS_LOWMEM_VALID_STEPS": "1"}
    expected, found = (run(family, layer(LIKE_UPSTREAM, held, method, one)) for one in ({}, engine(stage)))
    assert found.losses == pytest.approx(expected.losses, abs=TOLERANCES["printed_loss_unit"])
    losses = [valid_losses(job) for job in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCES["printed_loss"]) and len(losses[0]) > 1
    name = "adapter_model.safetensors" if method else "model.safetensors"
    assert (found.folder / "best" / name).exists()


def valid_losses(job):
    lines = [json.loads(line) for line in (job.folder / "lowmem_log.jsonl").read_text().splitlines()]
    return [values["valid_loss"] for values in lines if "valid_loss" in values]


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_equal_ddp_and_are_saved_whole(run, engine, family, stage):
    expected, found = (run(family, layer(LIKE_UPSTREAM, LORA, one)) for one in ({}, engine(stage)))
    assert found.losses == pytest.approx(expected.losses, abs=TOLERANCES["printed_loss_unit"])
    name = "adapter_model.safetensors"
    assert_same_weights(found.weights(name), expected.weights(name))


@needs_deepspeed
@needs_compiler
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_keeps_the_update_rule(run, engine, stage):
    """accelerate puts another optimizer in the place of ours, with decoupled weight decay as ours."""
    family = FAMILIES[0]
    expected = run(family, layer(LIKE_UPSTREAM))
    found = run(family, layer(LIKE_UPSTREAM, engine(stage, offload=True)))
    assert_same_weights(found.weights(), expected.weights())


@needs_deepspeed
def test_the_accumulation_of_the_config_has_to_be_the_trainers(run, engine):
    more = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}
    done = run(FAMILIES[0], layer(LAYER, engine(2), more), check=False)
    assert all(done.statuses)
    assert "says 8, and accelerate would follow it, while --gradient-accumulation-steps is 2" in done.outputs[0]
    assert "Traceback" not in done.outputs[0]


@needs_deepspeed
def test_what_is_handed_over_is_said(run, engine):
    done = run(FAMILIES[0], layer(LAYER, engine(2)))
    assert "optimizer=adamw instead_of=adamw8bit reason='DeepSpeed splits the states" in done.outputs[0]


# -- without DeepSpeed ------------------------------------------------------------------------------------------------


def accelerator(stage=2, clipping="auto", saves=True):
    plugin = SimpleNamespace(
        deepspeed_config={"zero_optimization": {"stage": stage}, "gradient_clipping": clipping},
        zero3_save_16bit_model=saves,
        zero3_init_flag=True,
    )
    return SimpleNamespace(
        num_processes=2,
        distributed_type=DistributedType.DEEPSPEED,
        gradient_accumulation_steps=2,
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )


ARGUMENTS = SimpleNamespace(gradient_accumulation_steps=2, max_grad_norm=0.5)


@pytest.mark.parametrize(
    "changes,method,message",
    [
        ({}, "qlora", "DeepSpeed cannot split weights in 4 bit"),
        ({"stage": 3, "saves": False}, "full", "zero3_save_16bit_model: false"),
        ({"clipping": 2.0}, "full", "gradient_clipping: 2.0.*--max-grad-norm is 0.5"),
    ],
)
def test_a_config_that_would_go_wrong_later_is_refused(changes, method, message):
    with pytest.raises(LowMemError, match=message):
        engine_of(accelerator(**changes)).check(ARGUMENTS, method)


def test_clipping_follows_the_trainer():
    for corrected, expected in ((True, 0.5), (False, "auto")):
        fake = accelerator()
        engine_of(fake).settle_clipping(ARGUMENTS, corrected=corrected)
        assert fake.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] == expected


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_class_that_cannot_be_built_in_parts_is_loaded_whole(in_parts):
    fake = accelerator(stage=3)
    engine_of(fake).settle_loading(in_parts)
    assert fake.state.deepspeed_plugin.zero3_init_flag is in_parts


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """Stands in for DeepSpeed's, which is Adam or AdamW by an attribute."""

    def __init__(self, adam_w_mode):
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.adam_w_mode = adam_w_mode


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_adam_without_decoupled_weight_decay_is_noticed(decoupled):
    ours, engine = torch.optim.AdamW([nn.Parameter(torch.ones(1))]), engine_of(accelerator())
    wrapper = SimpleNamespace(optimizer=SimpleNamespace(optimizer=DeepSpeedCPUAdam(decoupled)), zero_grad=None)
    if decoupled:
        assert engine.prepared_optimizer(ours, [wrapper]) is wrapper
    else:
        with pytest.raises(LowMemError, match="accelerate replaced AdamW"):
            engine.prepared_optimizer(ours, [wrapper])


def test_tied_weights_are_saved_once():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = engine_of(accelerator()).complete(copies, model)
    assert found["0.weight"] is found["1.weight"]
