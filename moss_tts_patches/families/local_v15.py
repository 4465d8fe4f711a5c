"""MOSS-TTS-Local v1.5: a Qwen3 backbone, GPT-2 blocks over one frame's codebooks, heads tied to the embeddings.

Two things set this family apart: its loss lives in the trainer and runs outside accelerate's autocast, and its model
class comes with the checkpoint and is unknown until the checkpoint is resolved. So the patches stand on names of the
trainer. Facts about upstream in this file are from ``moss_tts_local_v1.5/`` at commit 58b20a0.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..data.rules import RecordRules
from ..loss.embedding import summed_embeddings
from ..loss.problem import IGNORE_INDEX, Channel, FrameLoss, Lookup, Stage
from .class_patches import RunHooks
from .family import (
    QWEN3_PROJECTIONS,
    Family,
    LossOutput,
    Seam,
    TrainingContext,
    check_parts,
    shrink_qwen3,
)
from .local_v15_loss import (
    channel_shares,
    channel_weights,
    depth_output,
    embedding_tables,
    expected_contributions,
    learned_labels,
    text_head,
)
from .local_v15_patches import ATTENTION_MASK, patch_trainer, remote_class, unwrap

_BATCH = ("input_ids", "attention_mask", "labels", "channelwise_loss_weight")


class LocalV15Family(Family):
    """See :class:`.family.Family`."""

    name: ClassVar[str] = "moss_tts_local_v1.5"
    trainer_seams: ClassVar[tuple[Seam, ...]] = (
        Seam("main"),
        Seam("parse_args"),
        Seam(
            "save_checkpoint",
            ("accelerator", "model", "model_path", "codec_path", "output_dir", "train_args", "global_step", "epoch"),
        ),
        Seam("Accelerator"),
        Seam("AdamW"),
        Seam("DataLoader"),
        Seam("get_scheduler"),
        Seam("load_jsonl_for_rank", ("spec", "world_size", "rank")),
        Seam("build_processor"),
        Seam("MossTTSLocalV15SFTDataset"),
        Seam("load_training_model", ("accelerator", "model_path", "model_dtype", "attn_implementation")),
        Seam("configure_gradient_checkpointing", ("model", "scope", "use_reentrant", "impl")),
        Seam("compute_supervised_loss", ("model", *_BATCH)),
        Seam("first_nonfinite_gradient", ("model",)),
        Seam("is_finite_scalar", ("value",)),
        Seam("resolve_torch_dtype", ("mixed_precision",)),
        Seam("resolve_attn_implementation", ("requested", "device", "dtype")),
    )
    class_seams: ClassVar[tuple[Seam, ...]] = (
        Seam("forward", ("input_ids", "attention_mask", "inputs_embeds", "use_cache", "return_dict")),
        Seam("_global_hidden_to_local", ("hidden_states",)),
        Seam("_use_binary_local_text_head"),
    )
    training_arguments: ClassVar[frozenset[str]] = frozenset(_BATCH)
    extra_checkpoints: ClassVar[int] = 1  # checkpoint-last
    leaves_windows_open: ClassVar[bool] = False  # its trainer trains on whole windows only
    loads_in_parts: ClassVar[bool] = False  # its constructor copies rows of one head into another
    # Its heads are its embeddings: neither can carry an adapter, so there is no group of them.
    tied_modules: ClassVar[tuple[str, ...]] = (
        r"text_lm_head",
        r"transformer\.embed_tokens",
        r"audio_lm_heads\.\d+",
        r"audio_embeddings\.\d+",
    )
    adapter_groups: ClassVar[dict[str, str]] = {
        "backbone": r"transformer\.layers\.\d+\." + QWEN3_PROJECTIONS,
        "depth": r"local_transformer\.h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(fc_in|fc_out))",
    }

    @classmethod
    def recognises(cls, namespace: dict[str, Any]) -> bool:
        # No other trainer has any of these; one that lost some is still this one, so that the loss can be named.
        own = {"load_training_model", "configure_gradient_checkpointing", "compute_supervised_loss"}
        own |= {"compute_supervised_loss_from_hidden", "first_nonfinite_gradient", "MossTTSLocalV15SFTDataset"}
        return sum(callable(namespace.get(name)) for name in own) >= len(own) // 2

    def model_class(self, namespace: dict[str, Any]) -> None:
        return None

    def class_and_config(self, namespace: dict[str, Any], arguments: Any, device: torch.device) -> tuple[Any, Any]:
        model_class, config = remote_class(arguments.model_path)
        dtype = namespace["resolve_torch_dtype"](arguments.mixed_precision)
        resolve = namespace["resolve_attn_implementation"]
        config.attn_implementation = resolve(arguments.attn_implementation, device=device, dtype=dtype)
        return model_class, config

    def check_structure(self, model: Any) -> None:
        config = model.config
        check_parts(
            self.name,
            model,
            {
                "transformer.embed_tokens": None,
                "transformer.layers": config.qwen3_config.num_hidden_layers,
                "transformer.norm": None,
                "local_transformer.h": None,
                "local_transformer.ln_f": None,
                "audio_embeddings": config.n_vq,
                "audio_lm_heads": config.n_vq,
                "text_lm_head": None,
            },
        )
        attention = type(model.transformer.layers[0].self_attn)
        ATTENTION_MASK.find(attention, attention.__name__)

    def backbone(self, model: Any) -> nn.Module:
        return model.transformer

    def depth_model(self, model: Any) -> nn.Module | None:
        return model.local_transformer

    def unread_embeddings(self, model: Any) -> Sequence[tuple[nn.Module, str]]:
        return ()  # the text head of this family is never multiplied, but it is the input embedding

    def decides_on_nonfinite(self, arguments: Any) -> bool:
        return bool(getattr(arguments, "skip_nonfinite_batches", False))

    def autograd_reason(self, arguments: Any) -> str | None:
        if not self.decides_on_nonfinite(arguments):
            return None
        return (
            "--skip-nonfinite-batches drops a micro-batch after its loss is known; the other schedules have added its "
            "gradients by then"
        )

    def is_last_checkpoint(self, name: str, arguments: Any, steps: int) -> bool:
        return name == "checkpoint-last"

    def record_rules(self, config: Any) -> RecordRules:
        # Prompt as moss_tts_local's.
        codebooks = getattr(config, "n_vq", 12)
        sizes = getattr(config, "audio_codebook_sizes", None) or [getattr(config, "audio_vocab_size", 1024)] * codebooks
        return RecordRules(
            layout="speech",
            code_limits=tuple(sizes),
            audio_start=getattr(config, "audio_start_token_id", 151669),
            audio_end=getattr(config, "audio_end_token_id", 151670),
            template_bytes=400,
            prompt="parts",
        )

    # -- patches -------------------------------------------------------------------------------------------------

    def install(self, session: RunHooks) -> None:
        patch_trainer(session)

    def reference_loss(self, upstream_forward: Callable[..., Any], model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return upstream_forward(model, **batch)

    def loss_of_trainer(self, namespace: dict[str, Any]) -> Callable[..., torch.Tensor]:
        return namespace["compute_supervised_loss"]

    # -- loss ----------------------------------------------------------------------------------------------------

    def training_output(self, model: Any, batch: dict[str, Any], context: TrainingContext) -> LossOutput:
        base = unwrap(model)
        labels = learned_labels(base, batch["labels"])
        summary = context.summarise_labels(labels)
        shares = channel_shares(batch["channelwise_loss_weight"], labels.shape[-1], summary.empty_channels)
        if context.every_weight:
            shares = [share or 0.0 for share in shares]
        hidden = self._backbone_hidden(model, base, batch, context)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, summary.positions)
        # Outside autocast upstream computes in the parameters' own dtype; accelerate made the hidden states float32.
        rows = base._global_hidden_to_local(rows).to(base.local_transformer.ln_f.weight.dtype)
        frame_labels = labels.reshape(-1, labels.shape[-1]).index_select(0, summary.positions)
        problem = self.frame_loss(base, frame_labels, shares, channel_weights(batch["channelwise_loss_weight"], shares))
        loss, _ = context.engine.loss(problem, rows, context.loss_scale())
        context.expected_contributions = expected_contributions(base, problem, context)
        return LossOutput(loss=loss)

    @staticmethod
    def _backbone_hidden(model: Any, base: Any, batch: dict[str, Any], context: TrainingContext) -> torch.Tensor:
        """Returns ``[batch, positions, hidden]`` from the trainer's own model, as accelerate prepared it."""
        ids = batch["input_ids"]
        inputs = {"input_ids": ids}
        if context.direct and torch.is_grad_enabled():
            codes = ids[..., 1:].masked_fill(ids[..., 1:] == base.config.audio_pad_token_id, IGNORE_INDEX)
            present = torch.cat([ids[..., :1], codes], dim=-1)
            inputs = {"inputs_embeds": summed_embeddings(embedding_tables(base), present, context.engine.store)}
        # Within its own forward the model must not be called: an engine's hooks would run a second time.
        run = base.forward if context.inside_forward else model
        output = run(**inputs, attention_mask=batch["attention_mask"], use_cache=False, return_dict=True)
        return output.last_hidden_state

    def frame_loss(
        self,
        model: Any,
        labels: torch.Tensor,
        shares: Sequence[float | None],
        weights: Sequence[float] | None = None,
    ) -> FrameLoss:
        """Describes the loss over the supervised frames.

        Args:
            model: an instance of the model class.
            labels: ``[frames, channels]`` int64; with a binary text head its classes 0 and 1 in channel 0.
            shares: each channel's share of the loss; None leaves the channel out: it has no label, and upstream's
                graph does not contain its head.
            weights: one per channel, see :class:`..loss.problem.FrameLoss`.

        Source: upstream ``sft.py``, ``compute_supervised_loss_from_hidden``: the mean over a channel's labels times its
        share; codebook c is read at position c, the text head too at position 0; the depth model sees the hidden state
        and then the labels of all codebooks but the last.
        """
        codebooks = model.config.n_vq
        counts = (labels != IGNORE_INDEX).sum(dim=0).clamp(min=1)
        kept = [index for index, share in enumerate(shares) if share is not None]
        factors = torch.tensor([shares[index] for index in kept], dtype=torch.float32, device=labels.device)
        return FrameLoss(
            depth=Stage(functools.partial(depth_output, model), (model.local_transformer,)),
            lookups=tuple(
                Lookup(model.audio_embeddings[index], labels[:, index + 1], position=index + 1)
                for index in range(codebooks - 1)
            ),
            channels=tuple(
                Channel(
                    name="text" if index == 0 else f"codebook {index - 1}",
                    position=max(index - 1, 0),
                    adapter=None,
                    projection=text_head(model) if index == 0 else model.audio_lm_heads[index - 1],
                    labels=labels[:, index],
                )
                for index in kept
            ),
            coefficients=factors / counts[kept],
            positions=codebooks,
            weights=None if weights is None else tuple(weights[index] for index in kept),
        )

    # -- simulation and self check -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def simulated_precision(self, model: Any) -> Iterator[None]:
        from accelerate.utils.operations import convert_outputs_to_fp32

        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
        try:
            yield
        finally:
            del model.forward

    def simulated_upstream_output(
        self, upstream_forward: Callable[..., Any], model: Any, batch: dict[str, Any], supervised: int
    ) -> LossOutput:
        with _EveryChannelHasLabels():
            return LossOutput(loss=upstream_forward(model, **batch))

    def full_size_config(self, config_class: Any, size: str) -> Any:
        # Qwen3-4B as its model card says, the depth model as this family's README says (1 block, inner size 9728).
        if size != "4b":
            raise ValueError(f"{self.name} size {size!r}: expected 4b.")
        backbone = {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        }
        depth = {
            "vocab_size": 151936,
            "n_embd": 2560,
            "n_layer": 1,
            "n_head": 32,
            "n_inner": 9728,
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-6,
            "position_embedding_type": "rope",
            **_NO_DROPOUT,
        }
        config = config_class(qwen3_config=backbone, gpt2_config=depth)
        config.attn_implementation = config.local_transformer_attn_implementation = "sdpa"
        return config

    def shrunken_config(self, config: Any) -> Any:
        small = copy.deepcopy(config)
        backbone = small.qwen3_config
        shrink_qwen3(backbone)
        small.hidden_size = small.local_hidden_size = small.gpt2_config.n_embd = backbone.hidden_size
        small.vocab_size = small.gpt2_config.vocab_size = backbone.vocab_size
        small.n_vq, small.audio_vocab_size, small.audio_codebook_sizes = 3, 11, [11, 11, 11]
        small.audio_pad_token_id = small.audio_pad_code = 11
        small.pad_token_id, small.audio_assistant_slot_token_id, small.audio_end_token_id = 0, 7, 8
        # Flash attention needs a GPU, and both others give the same numbers.
        small.attn_implementation = small.local_transformer_attn_implementation = "eager"
        small.local_transformer_layers = 2
        for name, value in {"n_head": 4, "n_inner": 40, **_NO_DROPOUT}.items():
            setattr(small.gpt2_config, name, value)
        return small

    def sample_batch(self, config: Any, generator: torch.Generator) -> dict[str, Any]:
        batch, positions, prompt = 2, 12, 4
        text = torch.full((batch, positions + 1, 1), config.audio_assistant_slot_token_id)
        text[:, :prompt] = torch.randint(9, config.vocab_size, (batch, prompt, 1), generator=generator)
        text[:, -1] = config.audio_end_token_id
        codes = torch.randint(0, config.audio_vocab_size, (batch, positions + 1, config.n_vq), generator=generator)
        codes[:, 1] = config.audio_pad_token_id
        tokens = torch.cat([text, codes], dim=-1)
        attention_mask = torch.ones(batch, positions, dtype=torch.bool)
        attention_mask[0, :2] = False
        labels = tokens[:, 1:].clone()
        labels[:, : prompt - 2] = IGNORE_INDEX  # leaves one label that the binary text head does not know
        labels[:, prompt - 2, 1:] = IGNORE_INDEX
        labels[:, -1, 1:] = IGNORE_INDEX  # the frame that ends the audio has a text label only
        weights = [1.0 + 0.5 * index for index in range(config.n_vq + 1)]
        return {
            "input_ids": tokens[:, :-1],
            "attention_mask": attention_mask,
            "labels": labels,
            "channelwise_loss_weight": weights,
        }


class _EveryChannelHasLabels(TorchFunctionMode):
    """Answers upstream's questions about values with yes; it asks each channel for ``(labels != -100).any()``."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if function is torch.Tensor.__bool__ else function(*args, **(kwargs or {}))


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
