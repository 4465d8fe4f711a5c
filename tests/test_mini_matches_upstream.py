"""The miniature stands for upstream in the offline tests; this shows what makes that fair.

Both define a package ``moss_tts_local``, so each is loaded in a process of its own: this file, run as a script, writes
down what one of them is and what it computes; the tests compare.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import mini
import pytest
import torch
from tolerances import TOLERANCES

TRAINER_FUNCTIONS = (
    "build_processor",
    "configure_torch_backends",
    "copy_inference_assets",
    "copy_support_files",
    "load_jsonl_for_rank",
    "main",
    "model_init_context",
    "parse_args",
    "processor_init_context",
    "resolve_attn_implementation",
    "resolve_inference_asset",
    "resolve_torch_dtype",
    "resolve_warmup_steps",
    "save_checkpoint",
    "shard_paths_for_rank",
    "validate_args",
)
TRAINER_NAMES = (
    "Accelerator",
    "AdamW",
    "DataLoader",
    "MossTTSDelayModel",
    "MossTTSDelayProcessor",
    "MossTTSSFTDataset",
    "_training_loop",
    "get_scheduler",
    "set_seed",
    "torch",
)
# Channel weights to compute with: the trainer's default rule, upstream's None, and unequal ones.
WEIGHTS = {"trainer": [1.0, 8.0, 8.0, 8.0, 8.0], "none": None, "unequal": [0.5, 1.0, 2.0, 0.0, 4.0]}


def random_batch(config: Any) -> dict[str, torch.Tensor]:
    """Left padding, a prompt, pad codes, and scattered positions without a label in some channels."""
    generator = torch.Generator().manual_seed(7)
    shape = (3, 18)
    text = torch.randint(0, config.vocab_size, (*shape, 1), generator=generator)
    codes = torch.randint(0, config.audio_vocab_size + 1, (*shape, config.n_vq), generator=generator)
    rows = torch.cat([text, codes], dim=-1)
    attention_mask = torch.ones(3, 17, dtype=torch.bool)
    attention_mask[0, :4] = False
    labels = rows[:, 1:].clone()
    labels[:, :6] = -100
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return {"input_ids": rows[:, :-1], "attention_mask": attention_mask, "labels": labels}


def train_on_canned_items(sft: Any, checkpoint: str, output_folder: str) -> dict[str, Any]:
    """Runs the trainer's main() on items that do not depend on how it packs a prompt.

    Returns the order in which items were asked for and the steps printed.
    """
    order: list[int] = []

    def canned_item(dataset: Any, index: int) -> dict[str, torch.Tensor]:
        order.append(index)
        rows = random_batch(dataset.processor.model_config)["input_ids"][index % 3, index % 5 :]
        return {"input_ids": rows, "loss_mask": torch.arange(1, len(rows)) >= 6}

    sft.MossTTSSFTDataset.__getitem__ = canned_item
    data = Path(checkpoint) / "train.jsonl"
    sys.argv = ["sft.py", "--model-path", checkpoint, "--train-jsonl", str(data), "--output-dir", output_folder]
    sys.argv += mini.ARGUMENTS.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        sft.main()
    return {"order": order, "losses": [(step.loss, step.rate) for step in mini.read_steps(printed.getvalue())]}


def describe(root: str, checkpoint: str, output_folder: str) -> dict[str, Any]:
    """Loads the package below ``root`` and returns its names, its model's structure, losses and gradients."""
    if importlib.util.find_spec("torchaudio") is None:  # upstream imports it, training never calls it
        stub = types.ModuleType("torchaudio")
        stub.__spec__ = importlib.util.spec_from_loader("torchaudio", None)
        sys.modules["torchaudio"] = stub
    sys.path.insert(0, root)
    from moss_tts_local.finetuning import sft

    torch.set_num_threads(1)
    sys.argv = ["sft.py", "--train-jsonl", "data.jsonl"]
    model = sft.MossTTSDelayModel.from_pretrained(checkpoint, torch_dtype=torch.float32, attn_implementation="eager")
    model.train()
    batch = random_batch(model.config)
    computed = {}
    for name, weights in WEIGHTS.items():
        model.zero_grad()
        output = model(**batch, channelwise_loss_weight=weights)
        output.loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}
        computed[name] = {"loss": output.loss.item(), "loss_all": output.loss_all.tolist(), "gradients": gradients}
    return {
        "functions": {name: list(inspect.signature(getattr(sft, name)).parameters) for name in TRAINER_FUNCTIONS},
        "names": [name for name in TRAINER_NAMES if hasattr(sft, name)],
        "arguments": vars(sft.parse_args()),
        "forward": list(inspect.signature(sft.MossTTSDelayModel.forward).parameters),
        "state": {key: list(value.shape) for key, value in model.state_dict().items()},
        "frozen": [key for key, p in model.named_parameters() if not p.requires_grad],
        "output": sorted(output.keys()),
        "attention": [
            part.config._attn_implementation for part in (model.model.language_model, model.local_transformer)
        ],
        "computed": computed,
        "trained": train_on_canned_items(sft, checkpoint, output_folder),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the miniature and upstream say of themselves, on one checkpoint made by the miniature."""
    upstream = os.environ.get("MOSS_TTS_REPO")
    if not upstream:
        pytest.skip("needs MOSS_TTS_REPO, the folder of a MOSS-TTS checkout")
    folder = tmp_path_factory.mktemp("parity")
    checkpoint = mini.make_mini_inputs(folder / "checkpoint", records=12)
    results = []
    for name, root in (("miniature", mini.MINI), ("upstream", Path(upstream).resolve())):
        target = folder / f"{name}.pt"
        subprocess.run(
            [sys.executable, __file__, str(root), str(checkpoint), str(target)],
            env=mini.clean_environment(HF_MODULES_CACHE=str(folder / "modules")),
            cwd=folder,
            check=True,
            timeout=mini.SECONDS_ALLOWED,
        )
        results.append(torch.load(target))
    return results[0], results[1]


def worst_gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    errors = {key: ((found[key] - expected[key]).norm() / expected[key].norm()).item() for key in expected}
    return max(errors.values())


@pytest.mark.upstream
@pytest.mark.parametrize(
    "aspect", ["functions", "names", "arguments", "forward", "state", "frozen", "output", "attention"]
)
def test_the_seams_are_the_same(both: tuple[dict[str, Any], dict[str, Any]], aspect: str) -> None:
    miniature, upstream = both
    assert miniature[aspect] == upstream[aspect]
    assert upstream[aspect]


@pytest.mark.upstream
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_loss_and_gradients_are_the_same(both: tuple[dict[str, Any], dict[str, Any]], weights: str) -> None:
    miniature, upstream = (side["computed"][weights] for side in both)
    bound = TOLERANCES["miniature_relative"]
    assert miniature["loss"] == pytest.approx(upstream["loss"], rel=bound)
    assert miniature["loss_all"] == pytest.approx(upstream["loss_all"], rel=bound)
    trained = {key: value for key, value in upstream["gradients"].items() if value.any()}
    assert worst_gradient_error({key: miniature["gradients"][key] for key in trained}, trained) <= bound
    silent = upstream["gradients"].keys() - trained.keys()
    assert not any(miniature["gradients"][key].any() for key in silent)
    assert bool(silent) == (weights == "unequal")  # one codebook has weight 0 there, and only there


@pytest.mark.upstream
def test_training_draws_the_same_order_and_prints_the_same_losses(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    miniature, upstream = (side["trained"] for side in both)
    assert miniature["order"] == upstream["order"]
    assert sorted(upstream["order"]) == list(range(12)) != upstream["order"]
    assert [rate for _, rate in miniature["losses"]] == [rate for _, rate in upstream["losses"]]
    losses = [loss for loss, _ in upstream["losses"]]
    assert [loss for loss, _ in miniature["losses"]] == pytest.approx(losses, abs=TOLERANCES["printed_loss"])
    assert len(losses) == 3


@pytest.mark.upstream
def test_the_comparison_sees_a_difference(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Negative control: other channel weights, and one gradient off by a hundred-thousandth."""
    upstream = both[1]["computed"]
    bound = TOLERANCES["miniature_relative"]
    assert upstream["none"]["loss"] != pytest.approx(upstream["trainer"]["loss"], rel=bound)
    gradients = upstream["trainer"]["gradients"]
    assert worst_gradient_error(upstream["none"]["gradients"], gradients) > bound
    name = "local_transformer.layers.0.self_attn.q_norm.weight"
    assert worst_gradient_error({**gradients, name: gradients[name] * (1 + 1e-5)}, gradients) > bound


if __name__ == "__main__":
    package_root, checkpoint_folder, result_file = sys.argv[1:]
    torch.save(describe(package_root, checkpoint_folder, result_file + ".output"), result_file)
