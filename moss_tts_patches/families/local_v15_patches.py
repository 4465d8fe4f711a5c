"""What MOSS-TTS-Local v1.5 has patched: names of its trainer, a method of its backbone's attention, its data set.

Facts about upstream in this file are from ``moss_tts_local_v1.5/`` at commit 58b20a0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import SeamError
from .class_patches import RunHooks
from .family import Seam

_BATCH = "moss_lowmem_batch"  # the argument that carries the trainer's batch through an engine's wrapper
ATTENTION_MASK = Seam("_causal_attention_mask", ("attention_mask", "query_length", "key_length", "device"))


def patch_trainer(session: RunHooks) -> None:
    """Rebinds what the trainer loads, checkpoints, computes and checks with; its ``main`` looks these names up."""
    for name, wrap, reason in (
        ("load_training_model", _checked_loader, "checks first, then shapes the model"),
        ("configure_gradient_checkpointing", _layer_checkpointing, "backbone layers only, wrapped one by one"),
        ("compute_supervised_loss", _chunked_loss, "the chunked loss"),
        ("first_nonfinite_gradient", _seen_gradient, "gradients may be on the host, or spoilt by clipping"),
        ("is_finite_scalar", agreed_finite, "all processes skip a batch, or none; or MOSS_LOWMEM_NONFINITE decides"),
    ):
        upstream = getattr(session.trainer, name)
        session.ledger.apply(session.trainer, name, functools.wraps(upstream)(wrap(session, upstream)), reason)
    if session.corrects("prompt_length"):
        dataset = session.trainer.MossTTSLocalV15SFTDataset
        packed = _labelled_from_first_frame(session, dataset.__getitem__)
        session.ledger.apply(dataset, "__getitem__", packed, "labels from the first frame on")


def agreed_finite(session: RunHooks, upstream: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    """Has all processes give one answer: one that skips its batch alone leaves the others waiting in the backward.

    Where the layer looks at gradients it has none: the loop would end with a traceback, or wait for the device in every
    micro-batch.
    """

    def is_finite_scalar(value: torch.Tensor) -> bool:
        if session.checks_gradients:
            return True
        finite = upstream(value)
        if not torch.distributed.is_initialized():
            return finite
        agreed = torch.tensor(int(finite), device=value.device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
        return bool(agreed)

    return is_finite_scalar


def unwrap(model: Any) -> Any:
    """The model inside what accelerate made of it."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _checked_loader(session: RunHooks, upstream: Callable[..., Any]) -> Callable[..., Any]:
    def load_training_model(*, accelerator: Any, model_path: str, model_dtype: Any, attn_implementation: str) -> Any:
        model_class, config = remote_class(model_path)
        config.attn_implementation = attn_implementation
        session.before_model_load(model_class, config)
        with _loading_with(session.trainer, session.loading_options()):
            model = session.guarded("load", upstream)(
                accelerator=accelerator,
                model_path=model_path,
                model_dtype=model_dtype,
                attn_implementation=attn_implementation,
            )
        if session.corrects("depth_attention"):
            _follow_attention_flag(session, model, attn_implementation)
        if session.corrects("padded_attention_rows"):
            attention = type(model.transformer.layers[0].self_attn)
            mask = _mask_without_empty_rows(ATTENTION_MASK.find(attention, attention.__name__))
            session.ledger.apply(attention, ATTENTION_MASK.name, mask, "no padded row without a key")
        session.model_loaded(model)
        if session.loss_inside_forward:
            forward = _forward_with_loss(session, type(model).forward)
            session.ledger.apply(type(model), "forward", forward, "the loss within the forward")
        return model

    return load_training_model


@contextmanager
def _loading_with(trainer: Any, options: dict[str, Any]) -> Iterator[None]:
    """Adds ``options`` to the call of ``AutoModel.from_pretrained`` that the trainer's loader makes."""
    if not options:
        yield
        return
    upstream = trainer.AutoModel

    class AutoModel(upstream):  # type: ignore[misc, valid-type]
        @classmethod
        def from_pretrained(cls, *args: Any, **given: Any) -> Any:
            return upstream.from_pretrained(*args, **{**given, **options})

    trainer.AutoModel = AutoModel
    try:
        yield
    finally:
        trainer.AutoModel = upstream


def remote_class(model_path: str) -> tuple[Any, Any]:
    """Resolves the model class that the checkpoint brings, and its config, as ``AutoModel`` will.

    Raises:
        SeamError: the checkpoint brings none.
    """
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=True)
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModel")
    if reference is None:
        raise SeamError(
            f"seam config.json.auto_map.AutoModel: not found in {model_path}. Expected a checkpoint of "
            "MOSS-TTS-Local v1.5, which brings its own code; check MODEL_PATH, or train with MOSS_LOWMEM=0."
        )
    return get_class_from_dynamic_module(reference, model_path), config


def _follow_attention_flag(session: RunHooks, model: Any, wanted: str) -> None:
    """Has the depth model use the attention that the flag asked for, and leaves the stored config alone."""
    depth = model.local_transformer
    if depth.attn_implementation == wanted:
        return
    session.say_once(
        f"correction=depth_attention depth={wanted} (the checkpoint's config says {depth.attn_implementation}; "
        "upstream's --attn-implementation does not reach it)"
    )
    depth.attn_implementation = depth.config._attn_implementation = wanted
    for block in depth.h:
        block.attn.attn_implementation = wanted


def _mask_without_empty_rows(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Lets every query attend to its own position.

    A padded query has no key at all in upstream's mask, and CUDA's attention kernels turn such a row into NaN
    gradients (OpenMOSS/MOSS-TTS#196). Its output is multiplied by zero afterwards; real queries see themselves anyway.
    """

    @functools.wraps(upstream)
    def _causal_attention_mask(
        self: Any, attention_mask: Any, query_length: int, key_length: int, device: torch.device
    ) -> torch.Tensor:
        mask = upstream(self, attention_mask, query_length, key_length, device)
        if attention_mask is None:
            return mask
        queries = torch.arange(key_length - query_length, key_length, device=device)
        return mask | (queries.unsqueeze(-1) == torch.arange(key_length, device=device))

    return _causal_attention_mask


def _labelled_from_first_frame(session: RunHooks, upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Has the labels of a record begin right after the token that opens its audio.

    Upstream takes for the prompt's length that of the prompt it would generate from, which it tokenizes in parts. The
    record itself it tokenizes as a whole, and where the tokenizer joins a full stop and the line break after it, the
    record is a token shorter than its parts: the first frame falls into the prompt. With an empty text it is a token
    longer, and the token that opens the audio gets a label.

    Source: upstream ``finetuning/dataset.py``, ``_pack_record``; ``processing_moss_tts.py``,
    ``_build_generation_or_voice_clone_codes`` and ``_get_unified_codes``.
    """

    @functools.wraps(upstream)
    def __getitem__(self: Any, index: int) -> dict[str, Any]:
        item = upstream(self, index)
        missing = {"input_ids", "loss_mask"} - set(item)
        if missing:
            raise SeamError(
                f"seam sft.py.MossTTSLocalV15SFTDataset: its items have no {', '.join(sorted(missing))}, which the "
                "correction prompt_length needs. Leave it out of MOSS_LOWMEM_CORRECTIONS, or upgrade moss_tts_patches."
            )
        text = item["input_ids"][:, 0]  # [positions]
        opening = int((text == self.processor.model_config.audio_start_token_id).nonzero()[-1])
        # The mask is over labels, of which the first is the second position.
        mask = torch.arange(len(text) - 1) >= opening
        if not torch.equal(mask, item["loss_mask"]):
            session.say_once(
                "correction=prompt_length labels begin at the first frame (upstream measures the prompt by its parts, "
                "which leaves it without a label where a text's last token joins the line break)"
            )
        return {**item, "loss_mask": mask}

    return __getitem__


def _layer_checkpointing(session: RunHooks, upstream: Callable[..., Any]) -> Callable[..., Any]:
    def configure_gradient_checkpointing(model: Any, *, scope: str, use_reentrant: bool, impl: str) -> None:
        if impl == "model_internal" and not session.corrects("wrapped_checkpointing"):
            upstream(model, scope=scope, use_reentrant=use_reentrant, impl=impl)
            return
        if impl == "model_internal":
            session.say_once(
                "correction=wrapped_checkpointing backbone layers are wrapped one by one (upstream's model_internal "
                "recomputes every layer as the last one: wrong gradients under an unchanged loss)"
            )
        session.enable_checkpointing()

    return configure_gradient_checkpointing


def _chunked_loss(session: RunHooks, upstream: Callable[..., Any]) -> Callable[..., Any]:
    session.remember_forward(upstream)

    def compute_supervised_loss(model: Any, **batch: Any) -> torch.Tensor:
        if unwrap(model) is not session.model:
            return upstream(model, **batch)
        output = model(**{_BATCH: batch}) if session.loss_inside_forward else session.forward(model, batch)
        return output.loss

    return compute_supervised_loss


def _forward_with_loss(session: RunHooks, upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Brings the loss into the forward, outside which FSDP has nothing but slices of the weights it needs."""

    @functools.wraps(upstream)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        batch = options.pop(_BATCH, None)
        if batch is None:
            return upstream(self, *args, **options)
        # The trainer's loss is computed outside the autocast that accelerate puts around the forward.
        with torch.autocast(batch["input_ids"].device.type, enabled=False):
            return session.forward(self, batch)

    return forward


def _seen_gradient(session: RunHooks, upstream: Callable[..., Any]) -> Callable[..., Any]:
    def first_nonfinite_gradient(model: Any) -> str | None:
        # Found before clipping, which turns every gradient into nan where the norm is one.
        return session.nonfinite_gradients[0] if session.nonfinite_gradients else upstream(model)

    return first_nonfinite_gradient
