"""An adapter of the real moss_tts_local, merged by the layer and loaded by upstream's own class."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_adapters import record_of
from tolerances import TOLERANCES
from upstream_runs import inputs_fixture, upstream_classes_fixture  # noqa: F401  (fixtures)

from moss_tts_patches.adapters.inspect import describe_folder
from moss_tts_patches.adapters.merge import merge_adapter
from moss_tts_patches.adapters.record import AdapterRecord
from moss_tts_patches.families.local import LocalFamily

pytestmark = pytest.mark.upstream

FAMILY = "moss_tts_local"
# Upstream's checkpoint by itself: through AutoModel and the code that stands in the folder, nothing of ours or of PEFT.
_LOAD = """
import sys, torch
from transformers import AutoModel
folder, batch, output = sys.argv[1:]
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(**torch.load(batch)).loss, output)
assert not any(name.partition(".")[0] in ("moss_tts_patches", "peft") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def base(inputs):
    return inputs / "0"


@pytest.fixture(scope="module")
def batch(base):
    """Random codes behind a prompt, in the layout of upstream's collate function."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (2, 13, 5), generator=generator)
    tokens[..., 0] = torch.randint(0, 390, (2, 13), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, :4] = -100
    return {"input_ids": tokens[:, :-1], "attention_mask": torch.ones(2, 12, dtype=torch.bool), "labels": labels}


def loss_of(model, batch) -> float:
    with torch.no_grad():
        return model.eval()(**batch).loss.item()


@pytest.fixture(scope="module")
def adapter(base, upstream_classes, tmp_path_factory):
    """What training would leave, with random values: backbone, depth model, audio heads and a whole norm."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-epoch-0"
    groups = LocalFamily.adapter_groups
    targets = "|".join(f"({groups[name]})" for name in ("backbone", "depth", "audio_heads"))
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=targets, modules_to_save=["local_transformer.norm"], use_dora=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = get_peft_model(upstream_classes[0].from_pretrained(base), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape) * 0.05)
        model.save_pretrained(folder)
    record_of(str(base), rank=4, alpha=16).write(folder)
    return folder


def test_merged_by_us_is_adapted_by_peft(base, adapter, batch, upstream_classes, upstream_environment, tmp_path):
    model_class = upstream_classes[0]
    base_loss = loss_of(model_class.from_pretrained(base), batch)
    adapted_loss = loss_of(PeftModel.from_pretrained(model_class.from_pretrained(base), adapter), batch)
    merge_adapter(adapter, tmp_path / "merged")
    merged_loss = loss_of(model_class.from_pretrained(tmp_path / "merged"), batch)
    assert abs(merged_loss - adapted_loss) <= TOLERANCES["loss_fp32_relative"] * adapted_loss
    assert abs(merged_loss - base_loss) > 100 * TOLERANCES["loss_fp32_relative"] * base_loss
    print(f"\nbase {base_loss:.6f}, adapted {adapted_loss:.6f}, merged {merged_loss:.6f}")

    torch.save(batch, tmp_path / "batch.pt")
    command = [sys.executable, "-c", _LOAD, *(str(tmp_path / name) for name in ("merged", "batch.pt", "loss.pt"))]
    done = subprocess.run(command, env=upstream_environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "newly initialized" not in done.stderr and "MISSING" not in done.stderr
    assert torch.load(tmp_path / "loss.pt").item() == pytest.approx(merged_loss, rel=TOLERANCES["loss_fp32_relative"])


def test_the_folder_is_upstreams_and_says_what_it_is(base, adapter, tmp_path):
    merge_adapter(adapter, tmp_path / "merged")
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == (names - {"train.jsonl"}) | {"lowmem.json"}
    found, before = describe_folder(tmp_path / "merged"), describe_folder(base)
    assert (found.kind, before.kind, describe_folder(adapter).kind) == ("merged", "full checkpoint", "adapter")
    assert (found.tensors, found.bytes, found.dtypes) == (before.tensors, before.bytes, before.dtypes)
    assert AdapterRecord.read(tmp_path / "merged").kind == "merged"
