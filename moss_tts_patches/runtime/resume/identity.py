"""What makes a resume point belong to a training: the family, the model, the records, the order they come in.

Each check is a *value* that lists differences; the caller decides that one is an error and another a warning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

#: Options that the position in the data order depends on.
ORDER = ("per_device_batch_size", "gradient_accumulation_steps", "seed")
#: Options that a run may change on the way; the new value counts from then on.
LEARNING = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "warmup_steps",
    "warmup_ratio",
    "lr_scheduler_type",
    "num_epochs",
    "max_train_steps",
)
#: Options that change what is computed in another way; worth a line.
MENTIONED = ("model_path", "max_grad_norm", "mixed_precision", "channelwise_loss_weight", "n_vq")

#: Settings that do so.
MENTIONED_SETTINGS = ("corrections", "lora_dropout")

# Read of each tensor: another fine-tune of the same base differs in nearly every element.
_SAMPLED = 64
# Ends of a config's keys: where it came from and how this machine runs it, not what the model is.
_INCIDENTAL = ("name_or_path", "transformers_version", "dtype", "use_cache", "attn_implementation")


def records_fingerprint(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a hash of the records and their order.

    Lists, which are codes for the most part, count with their length and their ends: 6 us a record instead of 200.
    """
    digest = hashlib.sha256()
    for record in records:
        digest.update(repr([(key, _outline(value)) for key, value in record.items()]).encode())
    return digest.hexdigest()


def _outline(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        ends = [*value[:2], *value[len(value) // 2 : len(value) // 2 + 1], *value[-2:]]
        return len(value), [_outline(item) for item in ends]
    if isinstance(value, Mapping):
        return [(key, _outline(item)) for key, item in value.items()]
    return value


def model_fingerprint(model: nn.Module) -> str:
    """Returns a hash of the config and of the frozen weights, which a point does not hold."""
    digest = hashlib.sha256(json.dumps(_essential(_config(model)), sort_keys=True, default=str).encode())
    _add_weights(digest, model, trained=False)
    return digest.hexdigest()


def base_fingerprint(model: nn.Module) -> str:
    """Returns a hash of the weights that are trained, as the trainer has loaded them.

    A point replaces them, so that another base under the same config would be forgotten without a word.
    """
    digest = hashlib.sha256()
    _add_weights(digest, model, trained=True)
    return digest.hexdigest()


def _add_weights(digest: Any, model: nn.Module, *, trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad is trained:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(_sample(parameter.detach()))


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return config.to_dict() if config is not None else {}


def _essential(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _essential(v) for k, v in value.items() if not str(k).endswith(_INCIDENTAL)}
    return value


def _sample(tensor: torch.Tensor) -> bytes:
    """Bytes of up to 64 elements spread over the tensor."""
    flat = tensor.reshape(-1)
    if not flat.numel():
        return b""
    step = max(1, flat.numel() // _SAMPLED)
    return flat[::step][:_SAMPLED].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def why_not(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Why a point cannot be of the training that has just parsed its arguments, or None.

    Args:
        saved: the point's values.
        now: ``family``, ``settings`` and ``arguments`` of the training.
    """
    if saved["family"] != now["family"]:
        return f"it is {saved['family']}'s, and this trainer is {now['family']}'s"
    method = differing(saved["settings"], now["settings"], ("method",))
    if method:
        return f"other weights are trained ({describe(method)})"
    arguments, position = now["arguments"], saved["position"]
    order = differing(saved["arguments"], arguments, ORDER)
    if order:
        return f"other options that decide which record comes when ({describe(order)})"
    most, epochs = arguments.get("max_train_steps"), arguments.get("num_epochs")
    if (most and position["steps"] > most) or (epochs is not None and position["epoch"] >= epochs):
        return (
            f"it stands at step {position['steps']} in epoch {position['epoch']}, after the end that --max-train-steps "
            f"{most} and --num-epochs {epochs} set"
        )
    if position["skipped"] and not arguments.get("skip_nonfinite_batches"):
        return "it has left out micro-batches that were not finite; it needs --skip-nonfinite-batches again"
    return None


def differing(saved: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Returns, for each name whose value is another one, what was saved and what is now."""
    return {
        name: (saved.get(name), current.get(name))
        for name in names
        if _plain(saved.get(name)) != _plain(current.get(name))
    }


def describe(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name}: saved {old}, now {new}" for name, (old, new) in differences.items())


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
