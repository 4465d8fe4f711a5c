"""A copy of the miniature in which chosen micro-batches go wrong, for tests of what becomes of such a step."""

from __future__ import annotations

import shutil
from pathlib import Path

from mini import MINI

# POISON names micro-batches of the whole training, from 0, finished ones included; POISON_RANK the process that has
# them. POISON_WHERE: forward (hidden states become nan) or backward (their gradient becomes inf, the loss stays good).
# WATCH_FILE gets the index of every record that is fetched.
_POISON = """
import os as _os

import torch as _torch

_honest, _seen = train_micro_batch, [0]


def _spoil(module, inputs, hidden):
    if _os.environ.get("POISON_WHERE") == "backward":
        # Not by a factor: 0 * inf would be nan, which is another fault.
        hidden.register_hook(lambda gradient: _torch.full_like(gradient, float("inf")))
        return hidden
    return hidden * float("nan")


def train_micro_batch(accelerator, model, batch, *rest):
    number, _seen[0] = _seen[0], _seen[0] + 1
    wanted = str(number) in _os.environ.get("POISON", "").split(",") and batch["input_ids"].shape[1] > 1
    if not wanted or str(accelerator.process_index) != _os.environ.get("POISON_RANK", "0"):
        return _honest(accelerator, model, batch, *rest)
    modules = dict(accelerator.unwrap_model(model).named_modules())
    [last] = [module for name, module in modules.items() if name.split(".")[-1] == "norm" and "local" not in name]
    handle = last.register_forward_hook(_spoil)
    try:
        return _honest(accelerator, model, batch, *rest)
    finally:
        handle.remove()


def _watched(dataset_class):
    class Watched(dataset_class):
        def __getitem__(self, index):
            with open(_os.environ["WATCH_FILE"], "a") as file:
                print(index, file=file)
            return super().__getitem__(index)

    return Watched


if "WATCH_FILE" in _os.environ:
    for _name, _value in list(globals().items()):
        if _name.endswith("SFTDataset"):
            globals()[_name] = _watched(_value)


"""
_MAIN = 'if __name__ == "__main__":\n'


def poisoned_trainer(folder: Path) -> Path:
    """Makes the copy below ``folder``, all four families; returns its root."""
    copy = folder / "trainer"
    shutil.copytree(MINI, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for script in copy.glob("*/finetuning/sft.py"):
        text = script.read_text(encoding="utf-8")
        assert text.count(_MAIN) == 1
        script.write_text(text.replace(_MAIN, _POISON + _MAIN), encoding="utf-8")
    return copy
