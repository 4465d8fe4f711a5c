"""The miniature stands for upstream in the offline tests; this shows what makes that fair, family by family.

Both define packages of the same names, so each is loaded in a process of its own: this file, run as a script, writes
down what one of them is and what it computes on a checkpoint of upstream's making; the tests compare.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mini
import pytest
import torch
from tolerances import TOLERANCES
from upstream_runs import make_tiny

from moss_tts_patches.families import FAMILIES

# What every trainer has in its namespace.
FUNCTIONS = (
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
NAMES = ("Accelerator", "AdamW", "DataLoader", "get_scheduler", "set_seed", "torch")


@dataclass(frozen=True)
class Trainer:
    """What is particular to a family's trainer.

    Attributes:
        names: in the trainer's namespace.
        dataset: class whose items are replaced.
        functions: more functions whose signatures are compared.
        weights: channel weights to compute with, by what is to be seen of them.
        code: folder below the checkout whose files a checkpoint brings along, where it does.
    """

    names: tuple[str, ...]
    dataset: str
    functions: tuple[str, ...] = ()
    weights: dict[str, Any] = field(
        default_factory=lambda: {
            "trainer": [1.0, 8.0, 8.0, 8.0, 8.0],
            "none": None,
            "unequal": [0.5, 1.0, 2.0, 0.0, 4.0],
        }
    )
    code: str | None = None


TRAINERS = {
    "moss_tts_local": Trainer(
        ("MossTTSDelayModel", "MossTTSDelayProcessor", "MossTTSSFTDataset", "_training_loop"), "MossTTSSFTDataset"
    ),
    "moss_tts_delay": Trainer(
        ("MossTTSDelayModel", "MossTTSDelayProcessor", "MossTTSSFTDataset", "_training_loop"), "MossTTSSFTDataset"
    ),
    "moss_tts_realtime": Trainer(
        ("MossTTSRealtime", "MossTTSRealtimeProcessor", "MossTTSRealtimeSFTDataset", "_training_loop"),
        "MossTTSRealtimeSFTDataset",
        weights={"trainer": None},
    ),
    "moss_tts_local_v1.5": Trainer(
        ("AutoModel", "MossTTSLocalV15SFTDataset"),
        "MossTTSLocalV15SFTDataset",
        functions=(
            "compute_supervised_loss",
            "compute_supervised_loss_from_hidden",
            "configure_gradient_checkpointing",
            "first_nonfinite_gradient",
            "is_finite_scalar",
            "load_training_model",
            "unwrap_training_model",
        ),
        code="moss_tts_local_v1.5",
    ),
}


# -- in a process that knows one of the two ---------------------------------------------------------------------------


def import_trainer(root: str, family: str) -> types.ModuleType:
    """Imports sft.py as ``python sft.py`` would find its imports."""
    if importlib.util.find_spec("torchaudio") is None:  # upstream imports it, training never calls it
        stub = types.ModuleType("torchaudio")
        stub.__spec__ = importlib.util.spec_from_loader("torchaudio", None)
        sys.modules["torchaudio"] = stub
    path = Path(root) / family / "finetuning" / "sft.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("sft", path)
    assert spec is not None and spec.loader is not None
    sft = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sft)
    return sft


def family_of(name: str) -> Any:
    return next(family for family in FAMILIES if family.name == name)()


def load_model(sft: Any, family: str, checkpoint: str) -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model_class = getattr(sft, TRAINERS[family].names[0])
    if family == "moss_tts_local_v1.5":
        options["trust_remote_code"] = True
    return model_class.from_pretrained(checkpoint, **options).train()


def micro_batch(family: str, config: Any) -> dict[str, Any]:
    """Padding, a prompt, and scattered positions without a label in some channels."""
    generator = torch.Generator().manual_seed(7)
    batch = family_of(family).sample_batch(config, generator)
    hidden = torch.rand(batch["labels"].shape, generator=generator) < 0.2
    batch["labels"] = batch["labels"].masked_fill(hidden, -100)
    batch.pop("channelwise_loss_weight", None)
    return batch


def loss_of(sft: Any, family: str, model: Any, batch: dict[str, Any], weights: Any) -> torch.Tensor:
    if family == "moss_tts_local_v1.5":
        return sft.compute_supervised_loss(model, **batch, channelwise_loss_weight=weights)
    more = {} if family == "moss_tts_realtime" else {"channelwise_loss_weight": weights}
    return model(**batch, **more).loss


def canned_item(family: str, config: Any, index: int) -> dict[str, Any]:
    """An item that does not depend on how a trainer packs a prompt; lengths differ."""
    batch = family_of(family).sample_batch(config, torch.Generator().manual_seed(index))
    record = 0 if family == "moss_tts_realtime" else 1  # the one without padding
    rows = batch["input_ids"][record, index % 3 :]
    if family == "moss_tts_realtime":
        return {"input_ids": rows, "labels": batch["labels"][record, index % 3 :]}
    return {"input_ids": rows, "loss_mask": torch.arange(1, len(rows)) >= 4, "record_id": str(index)}


def train_on_canned_items(sft: Any, family: str, checkpoint: str, config: Any, output_folder: str) -> dict[str, Any]:
    """Runs the trainer's main(); returns the order in which items were asked for and the steps printed."""
    order: list[int] = []

    def getitem(dataset: Any, index: int) -> dict[str, Any]:
        order.append(index)
        return canned_item(family, config, index)

    getattr(sft, TRAINERS[family].dataset).__getitem__ = getitem
    data = Path(checkpoint) / "train.jsonl"
    sys.argv = ["sft.py", "--model-path", checkpoint, "--train-jsonl", str(data), "--output-dir", output_folder]
    sys.argv += mini.ARGUMENTS.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        sft.main()
    return {"order": order, "losses": [(step.loss, step.rate) for step in mini.read_steps(printed.getvalue())]}


def describe(root: str, family: str, checkpoint: str, output_folder: str) -> dict[str, Any]:
    """Returns a trainer's names, its model's structure, losses and gradients."""
    sft, trainer = import_trainer(root, family), TRAINERS[family]
    torch.set_num_threads(1)
    sys.argv = ["sft.py", "--train-jsonl", "data.jsonl"]
    model = load_model(sft, family, checkpoint)
    batch, computed = micro_batch(family, model.config), {}
    for name, weights in trainer.weights.items():
        model.zero_grad()
        loss = loss_of(sft, family, model, batch, weights)
        loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        computed[name] = {"loss": loss.item(), "gradients": gradients}
    functions = {name: inspect.signature(getattr(sft, name)) for name in (*FUNCTIONS, *trainer.functions)}
    return {
        "functions": {
            name: [(p.name, p.kind.name) for p in signature.parameters.values()]
            for name, signature in functions.items()
        },
        "names": [name for name in (*NAMES, *trainer.names) if hasattr(sft, name)],
        "arguments": vars(sft.parse_args()),
        "forward": list(inspect.signature(type(model).forward).parameters),
        "state": {key: list(value.shape) for key, value in model.state_dict().items()},
        "frozen": [key for key, p in model.named_parameters() if not p.requires_grad],
        "attention": attention_of(family, model),
        "computed": computed,
        "trained": train_on_canned_items(sft, family, checkpoint, model.config, output_folder),
    }


def attention_of(family: str, model: Any) -> list[str]:
    """What the backbone, and the depth model where there is one, really use after eager was asked for."""
    layer = family_of(family)
    parts = [layer.backbone(model), layer.depth_model(model)]
    return [part.config._attn_implementation for part in parts if part is not None]


# -- the tests --------------------------------------------------------------------------------------------------------


def with_code(checkpoint: Path, root: Path, folder: Path, trainer: Trainer) -> Path:
    """The checkpoint, with this side's code in it where the trainer loads its model from there."""
    if trainer.code is None:
        return checkpoint
    shutil.copytree(checkpoint, folder)
    for path in (root / trainer.code).glob("*.py"):
        shutil.copy2(path, folder / path.name)
    return folder


@pytest.fixture(scope="module", params=TRAINERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Trainer]:
    """What the miniature and upstream say of themselves, on one checkpoint made by upstream's classes."""
    if not os.environ.get("MOSS_TTS_REPO"):
        pytest.skip("needs MOSS_TTS_REPO, the folder of a MOSS-TTS checkout")
    family, upstream = request.param, Path(os.environ["MOSS_TTS_REPO"]).resolve()
    folder = tmp_path_factory.mktemp("parity")
    # Delay's own choice of 151,936 tokens is for generating, which the miniature does not do.
    make_tiny(upstream, family, folder / "checkpoint", "--vocab-size", "640")
    results = []
    for name, root in (("miniature", mini.MINI), ("upstream", upstream)):
        checkpoint = with_code(folder / "checkpoint", root, folder / f"{name}_checkpoint", TRAINERS[family])
        target = folder / f"{name}.pt"
        done = subprocess.run(
            [sys.executable, __file__, str(root), family, str(checkpoint), str(target)],
            env=mini.clean_environment(HF_MODULES_CACHE=str(folder / f"{name}_modules"), PYTHONDONTWRITEBYTECODE="1"),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=mini.SECONDS_ALLOWED,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        results.append(torch.load(target))
    return results[0], results[1], TRAINERS[family]


def worst_gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    errors = {key: ((found[key] - expected[key]).norm() / expected[key].norm()).item() for key in expected}
    return max(errors.values())


@pytest.mark.upstream
@pytest.mark.parametrize("aspect", ["functions", "names", "arguments", "forward", "state", "frozen", "attention"])
def test_the_seams_are_the_same(both: tuple[Any, Any, Trainer], aspect: str) -> None:
    miniature, upstream, _ = both
    assert miniature[aspect] == upstream[aspect]
    assert upstream[aspect] or aspect == "frozen"


@pytest.mark.upstream
def test_loss_and_gradients_are_the_same(both: tuple[Any, Any, Trainer]) -> None:
    bound = TOLERANCES["miniature_relative"]
    for weights in both[2].weights:
        miniature, upstream = (side["computed"][weights] for side in both[:2])
        assert miniature["loss"] == pytest.approx(upstream["loss"], rel=bound)
        assert miniature["gradients"].keys() == upstream["gradients"].keys()
        trained = {key: value for key, value in upstream["gradients"].items() if value.any()}
        assert worst_gradient_error({key: miniature["gradients"][key] for key in trained}, trained) <= bound
        silent = upstream["gradients"].keys() - trained.keys()
        assert not any(miniature["gradients"][key].any() for key in silent)


@pytest.mark.upstream
def test_training_draws_the_same_order_and_prints_the_same_losses(both: tuple[Any, Any, Trainer]) -> None:
    miniature, upstream = (side["trained"] for side in both[:2])
    assert miniature["order"] == upstream["order"]
    assert sorted(upstream["order"]) == list(range(12)) != upstream["order"]
    assert [rate for _, rate in miniature["losses"]] == [rate for _, rate in upstream["losses"]]
    losses = [loss for loss, _ in upstream["losses"]]
    assert [loss for loss, _ in miniature["losses"]] == pytest.approx(losses, abs=TOLERANCES["printed_loss"])
    assert len(losses) == 3


@pytest.mark.upstream
def test_the_comparison_sees_a_difference(both: tuple[Any, Any, Trainer]) -> None:
    """Negative control: other channel weights, and one gradient off by a hundred-thousandth."""
    upstream, bound = both[1]["computed"], TOLERANCES["miniature_relative"]
    gradients = upstream["trainer"]["gradients"]
    if "none" in upstream:
        assert upstream["none"]["loss"] != pytest.approx(upstream["trainer"]["loss"], rel=bound)
        trained = {key: value for key, value in gradients.items() if value.any()}
        others = {key: upstream["none"]["gradients"][key] for key in trained}
        assert worst_gradient_error(others, trained) > bound
    trained = {key: value for key, value in gradients.items() if value.any()}
    name = next(key for key in trained if key.endswith("layers.0.self_attn.q_norm.weight"))
    assert worst_gradient_error({**trained, name: trained[name] * (1 + 1e-5)}, trained) > bound


if __name__ == "__main__":
    package_root, family_name, checkpoint_folder, result_file = sys.argv[1:]
    torch.save(describe(package_root, family_name, checkpoint_folder, result_file + ".output"), result_file)
