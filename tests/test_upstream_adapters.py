"""LoRA and QLoRA through the real, unmodified trainers of all families, and what they save in a process without us."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import LAUNCHER
from mini import read_steps
from safetensors import safe_open
from safetensors.torch import load_file
from tolerances import TOLERANCES
from upstream_runs import layer_variables, make_tiny, run_script, upstream_variables

pytestmark = pytest.mark.upstream

FAMILIES = ("moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5", "moss_tts_realtime")
STEPS = 20
ARGUMENTS = (
    "--per-device-batch-size 2 --gradient-accumulation-steps 1 --num-epochs 10 --mixed-precision no "
    f"--learning-rate 5e-3 --warmup-ratio 0 --max-train-steps {STEPS}"
)

# Python imports this at start-up in every process; in the trainer's it says at the end what the trained model's loss
# is, and which of its frozen weights are no longer the base's.
REPORTER = """
import atexit, gc, json, os, sys

def report():
    if "moss_tts_patches.session" not in sys.modules:
        return
    from moss_tts_patches.session import Session
    import torch
    from safetensors.torch import load_file
    sessions = [thing for thing in gc.get_objects() if isinstance(thing, Session)]
    if not sessions or sessions[0].model is None or not sessions[0].clock.steps:
        return
    session = sessions[0]
    model, family = session.model, session.family
    # bitsandbytes' kernel for evaluation on the CPU cannot do layers narrower than a quantisation block.
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    batch = family.sample_batch(model.config, torch.Generator().manual_seed(3))
    with torch.no_grad():
        loss = family.training_output(model, batch, session.loop.context).loss.item()
    base = load_file(os.path.join(os.environ["MODEL_PATH"], "model.safetensors"))
    found = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    changed = [name for name, tensor in base.items() if tensor.shape != found[name].shape
               or not torch.equal(tensor, found[name].to(tensor.dtype))]
    four_bit = any("4bit" in type(module).__name__ for module in model.modules())
    kept = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "lora_" not in name]
    kinds = {name: [type(p).__name__, str(p.dtype), p.requires_grad] for name, p in model.named_parameters()}
    folder = os.environ["REPORT_FOLDER"]
    torch.save(batch, os.path.join(folder, "batch.pt"))
    with open(os.path.join(folder, "report.json"), "w") as file:
        json.dump({"loss": loss, "changed": changed, "kinds": kinds, "kept": kept if four_bit else []}, file)

# The layer registers its own last line when the model is ready; anything earlier runs after bitsandbytes is gone.
register = atexit.register

def register_both(function, *arguments, **options):
    register(function, *arguments, **options)
    if getattr(function, "__name__", "") == "_report_end":
        register(report)
    return function

atexit.register = register_both
"""

# A process that has never heard of the layer: upstream's classes and PEFT.
RELOAD = """
import importlib, importlib.util, json, sys
import torch
family, base, adapter, merged, batch, kept = sys.argv[1:]
batch = torch.load(batch)
if family == "moss_tts_local_v1.5":
    from transformers import AutoModel
    sys.path.insert(0, family + "/finetuning")
    spec = importlib.util.spec_from_file_location("sft", family + "/finetuning/sft.py")
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    def load(path, **options):
        return AutoModel.from_pretrained(
            path, trust_remote_code=True, dtype=torch.float32, attn_implementation="sdpa", **options
        )
    def loss(model):
        return trainer.compute_supervised_loss(model, **batch).item()
else:
    module, name = {
        "moss_tts_local": ("moss_tts_local.modeling_moss_tts", "MossTTSDelayModel"),
        "moss_tts_delay": ("moss_tts_delay.modeling_moss_tts", "MossTTSDelayModel"),
        "moss_tts_realtime": ("moss_tts_realtime.mossttsrealtime.modeling_mossttsrealtime", "MossTTSRealtime"),
    }[family]
    model_class = getattr(importlib.import_module(module), name)
    def load(path, **options):
        return model_class.from_pretrained(path, dtype=torch.float32, **options)
    def loss(model):
        return model(**batch).loss.item()
from peft import PeftModel
def still(model):
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    return model
with torch.no_grad():
    result = {"base": loss(load(base).eval())}
    result["adapter"] = loss(PeftModel.from_pretrained(load(base), adapter).eval())
    result["merged"] = loss(load(merged).eval())
    if json.loads(kept):  # the layers that are not in 4 bit
        from transformers import BitsAndBytesConfig
        four_bit = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=json.loads(kept),
        )
        quantised = load(base, quantization_config=four_bit, device_map="cpu")
        result["adapter on 4 bit"] = loss(still(PeftModel.from_pretrained(quantised, adapter)))
assert not any(name.startswith("moss_tts_patches") for name in sys.modules)
print("RESULT" + json.dumps(result))
"""


@dataclass(frozen=True)
class Trained:
    """A finished run and what its process said about its model."""

    family: str
    base: Path
    folder: Path
    output: str
    report: dict[str, Any]
    environment: dict[str, str]

    @property
    def checkpoint(self) -> Path:
        """The adapter of the last epoch."""
        found = sorted(self.folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)
        return next(path for path in reversed(found) if not path.name.endswith("-merged"))

    @property
    def merged(self) -> Path:
        return self.checkpoint.with_name(self.checkpoint.name + "-merged")

    def reload(self, upstream: Path) -> dict[str, float]:
        """Losses of base, adapter and merged folder by upstream's classes alone."""
        batch = self.folder.parent / "batch.pt"
        kept = json.dumps(self.report["kept"])
        command = [sys.executable, "-c", RELOAD, self.family, self.base, self.checkpoint, self.merged, batch, kept]
        done = subprocess.run(command, env=self.environment, cwd=upstream, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.partition("RESULT")[2])


@pytest.fixture(scope="module")
def base_of(upstream_repo, torchaudio_stub, tmp_path_factory):
    """Makes a family's tiny checkpoint and data, once."""
    root = tmp_path_factory.mktemp("base")
    # v1.5's code is cached by the folder's name.
    return lambda family: make_tiny(upstream_repo, family, root / family.replace(".", "_"))


@pytest.fixture(scope="module")
def train(upstream_repo, base_of, tmp_path_factory):
    """Runs a trainer's own run_train.sh through our launcher."""
    stub = tmp_path_factory.mktemp("stub")
    (stub / "torchaudio.py").write_text("", encoding="utf-8")
    (stub / "sitecustomize.py").write_text(REPORTER, encoding="utf-8")

    def run(family: str, arguments: str = ARGUMENTS, **layer: str) -> Trained:
        folder = tmp_path_factory.mktemp("run")
        base = base_of(family)
        environment = upstream_variables(stub, tmp_path_factory.mktemp("hf_modules")) | {"REPORT_FOLDER": str(folder)}
        training = environment | layer_variables(upstream_repo, family)
        training |= {f"MOSS_LOWMEM_{name.upper()}": value for name, value in layer.items()}
        status, output = run_script(LAUNCHER, upstream_repo, base, folder / "output", arguments, training)
        assert status == 0, output[-4000:]
        report = json.loads((folder / "report.json").read_text())
        return Trained(family, base, folder / "output", output, report, environment)

    return run


@pytest.fixture(scope="module", params=FAMILIES)
def lora(request, train):
    return train(request.param, method="lora", lora_rank="8", lora_alpha="16")


def test_lora_trains_and_upstream_alone_loads_both_folders(lora, upstream_repo):
    steps = read_steps(lora.output)
    assert len(steps) == STEPS
    first, last = (sum(step.loss for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last < 0.98 * first
    assert lora.report["changed"] == []
    assert {dtype for _, dtype, trained in lora.report["kinds"].values() if trained} == {"torch.float32"}
    found = lora.reload(upstream_repo)
    for folder in ("adapter", "merged"):
        assert found[folder] == pytest.approx(lora.report["loss"], rel=TOLERANCES["reloaded_loss"]), folder
    assert abs(found["base"] - found["adapter"]) > 100 * TOLERANCES["reloaded_loss"] * found["base"]


def test_what_the_folders_hold(lora):
    names = {path.name for path in lora.checkpoint.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "lowmem.json", "finetune_args.json"} <= names
    assert {"tokenizer.json", "processor_config.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    trained = sum(1 for _, _, trained in lora.report["kinds"].values() if trained)
    with safe_open(lora.checkpoint / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == trained
        assert all(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (not a dict)
    base, merged = load_file(lora.base / "model.safetensors"), load_file(lora.merged / "model.safetensors")
    assert base.keys() == merged.keys()
    assert not any("lora_" in name or "base_layer" in name for name in merged)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    adapted = {
        name.split(".base_layer")[0] + ".weight" for name in lora.report["kinds"] if ".base_layer.weight" in name
    }
    assert changed == adapted
    assert {"config.json", "lowmem.json"} <= {path.name for path in lora.merged.iterdir()}


def test_only_the_last_epoch_is_merged(lora):
    assert [path.name for path in lora.folder.glob("*-merged")] == [lora.merged.name]


@pytest.mark.parametrize("family", ["moss_tts_local", "moss_tts_delay", "moss_tts_local_v1.5"])
def test_qlora_trains_saves_and_merges_on_the_cpu(train, upstream_repo, family):
    run = train(family, method="qlora", lora_rank="8")
    steps = read_steps(run.output)
    assert sum(s.loss for s in steps[-5:]) < 0.98 * sum(s.loss for s in steps[:5])
    kinds = run.report["kinds"]
    quantised = {name for name, (kind, dtype, _) in kinds.items() if kind == "Params4bit"}
    projections = re.compile(
        r".*layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.base_layer\.weight"
        r"|local_transformer\.h\.\d+\.(attn\.c_(attn|proj)|mlp\.fc_(in|out))\.base_layer\.weight"
    )
    assert quantised == {name for name in kinds if projections.fullmatch(name)}
    for name, (_, dtype, trained) in kinds.items():
        assert dtype == ("torch.uint8" if name in quantised else "torch.float32"), name
        assert trained == ("lora_" in name), name
    found = run.reload(upstream_repo)
    assert found["adapter on 4 bit"] == pytest.approx(run.report["loss"], rel=TOLERANCES["reloaded_loss"])
    # The merged one stands on the 16 or 32 bit base, as the adapter does where that is loaded.
    assert found["merged"] == pytest.approx(found["adapter"], rel=TOLERANCES["reloaded_loss"])
    assert abs(found["merged"] - found["adapter on 4 bit"]) > TOLERANCES["reloaded_loss"] * found["merged"]
