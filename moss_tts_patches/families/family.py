"""What a family has to tell the layer: seams of its trainer, parts of its model, its loss."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..data.rules import RecordRules
from ..errors import SeamError
from ..loss.engine import LossEngine
from .class_patches import RunHooks, patch_model_class


@dataclass(frozen=True)
class Seam:
    """A name that a patch holds on to.

    Attributes:
        name: the name on its holder.
        parameters: parameter names that its signature must have; empty means any.
    """

    name: str
    parameters: tuple[str, ...] = ()

    def find(self, holder: Any, holder_name: str) -> Any:
        """Returns what stands there.

        Raises:
            SeamError: the name is missing or its signature lacks a parameter.
        """
        found = holder.get(self.name) if isinstance(holder, dict) else getattr(holder, self.name, None)
        if found is None:
            raise SeamError(
                f"seam {holder_name}.{self.name}: not found. This version of the layer needs it; upstream seems to "
                "have renamed or removed it. Use the upstream commit named in the README, upgrade moss_tts_patches, "
                "or train without it (MOSS_LOWMEM=0)."
            )
        if self.parameters:
            self._check_signature(found, holder_name)
        return found

    def _check_signature(self, found: Any, holder_name: str) -> None:
        present = inspect.signature(found).parameters
        missing = [name for name in self.parameters if name not in present]
        if missing:
            raise SeamError(
                f"seam {holder_name}.{self.name}: its signature has changed. Expected parameters "
                f"{', '.join(self.parameters)}; missing: {', '.join(missing)}; found: {', '.join(present)}. "
                "Upgrade moss_tts_patches, or train without it (MOSS_LOWMEM=0)."
            )


#: The seven projections of a Qwen3 layer, after the layer's own name.
QWEN3_PROJECTIONS = r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

#: What the layer holds on to in every trainer whose ``main()`` loads a model class by name.
TRAINER_SEAMS = (
    Seam("main"),
    Seam("parse_args"),
    Seam("save_checkpoint", ("accelerator", "model", "model_path", "codec_path", "output_dir", "train_args")),
    Seam("Accelerator"),
    Seam("AdamW"),
    Seam("DataLoader"),
    Seam("get_scheduler"),
    Seam("load_jsonl_for_rank", ("spec", "world_size", "rank")),
    Seam("build_processor"),
)


@dataclass
class LossOutput(ModelOutput):
    """All that upstream's training loops read of a forward pass."""

    loss: torch.Tensor | None = None


@dataclass(frozen=True)
class LabelSummary:
    """What has to be known of a micro-batch's labels before the engine runs.

    Everything that depends on the data's values, and therefore waits for the device, happens here and once.

    Attributes:
        positions: ``[frames]`` int64, flat indices into batch x positions of those with at least one label.
        empty_channels: indices of channels without any label.
    """

    positions: torch.Tensor
    empty_channels: tuple[int, ...] = ()


@dataclass
class TrainingContext:
    """What a family's forward needs from the run: plain values and the engine.

    Attributes:
        engine: computes the loss.
        direct: gradients go to the store during the forward (``fused``, ``staged``).
        loss_scale: returns the factor between the loss and what is back-propagated.
        finite_empty_channels: leave channels without labels out of the printed loss instead of printing nan.
        say_once: logs a line the first time it is called with it.
        summarise_labels: replaces the family's own summary (the planner works on tensors without values).
        every_weight: gradients of several processes meet, so that each weight needs one in every micro-batch, zero
            where its labels are missing.
        inside_forward: the whole loss is computed within one forward of the model that an engine wrapped, also where
            the trainer computes it outside.
    """

    engine: LossEngine
    direct: bool
    loss_scale: Callable[[], float]
    finite_empty_channels: bool
    say_once: Callable[[str], None]
    summarise_labels: Callable[[torch.Tensor], LabelSummary]
    every_weight: bool = False
    inside_forward: bool = False
    expected_contributions: dict[nn.Parameter, int] = field(default_factory=dict)


class Family(ABC):
    """Base of the families."""

    name: ClassVar[str]
    trainer_seams: ClassVar[tuple[Seam, ...]]
    class_seams: ClassVar[tuple[Seam, ...]]
    #: What upstream's loop passes to the model in training, and nothing else.
    training_arguments: ClassVar[frozenset[str]]
    #: Named sets of modules for adapters, each a regular expression over whole module names. ``backbone`` and ``depth``
    #: are the projections of all layers: what is adapted by default, and what QLoRA stores in 4 bit.
    adapter_groups: ClassVar[dict[str, str]]
    #: Modules whose weight is another one's too, as regular expressions over whole names: no adapter may be on them.
    tied_modules: ClassVar[tuple[str, ...]] = ()
    #: Checkpoints that the trainer writes beside one an epoch.
    extra_checkpoints: ClassVar[int] = 0
    #: Whether an accumulation window goes on into the next epoch where files were sharded by rank.
    leaves_windows_open: ClassVar[bool] = True
    #: Whether upstream's own trainer can checkpoint activations; the planner compares with what upstream can do.
    upstream_checkpoints: ClassVar[bool] = True
    #: Whether the class can be built while ZeRO-3 takes every weight apart at once.
    loads_in_parts: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def recognises(cls, namespace: dict[str, Any]) -> bool:
        """Whether this trainer namespace is this family's."""

    @abstractmethod
    def model_class(self, namespace: dict[str, Any]) -> type[nn.Module] | None:
        """The class whose ``from_pretrained`` the trainer calls; None where the checkpoint's own code brings it."""

    def class_and_config(self, namespace: dict[str, Any], arguments: Any, device: torch.device) -> tuple[Any, Any]:
        """The class that the trainer will load, and its config, before it does so.

        Args:
            namespace: the trainer's.
            arguments: its parsed command line.
            device: of the training.
        """
        model_class: Any = self.model_class(namespace)
        return model_class, model_class.config_class.from_pretrained(arguments.model_path)

    @abstractmethod
    def check_structure(self, model: nn.Module) -> None:
        """Checks parts, list lengths and shapes of an instance; raises SeamError."""

    @abstractmethod
    def backbone(self, model: nn.Module) -> nn.Module:
        """The transformer whose layers are checkpointed."""

    @abstractmethod
    def depth_model(self, model: nn.Module) -> nn.Module | None:
        """The transformer over one frame's codebooks, or None."""

    @abstractmethod
    def unread_embeddings(self, model: nn.Module) -> Sequence[tuple[nn.Module, str]]:
        """Embeddings that training never reads, as ``(parent module, attribute)``."""

    @abstractmethod
    def training_output(self, model: nn.Module, batch: dict[str, Any], context: TrainingContext) -> Any:
        """The forward pass of the trainer's call, with the engine's loss; only ``.loss`` is read of its result."""

    @abstractmethod
    def full_size_config(self, config_class: Any, size: str) -> Any:
        """The config of a released size (for example ``1.7b``); raises ValueError for another one."""

    @abstractmethod
    def shrunken_config(self, config: Any) -> Any:
        """A copy of a model config with a few small layers, for the self check."""

    @abstractmethod
    def sample_batch(self, config: Any, generator: torch.Generator) -> dict[str, Any]:
        """A small random batch with unsupervised positions and padding, as the trainer would pass it."""

    def extend_parser(self, parser: Any) -> None:  # noqa: B027  (most families need nothing here)
        """Adds options that the layer understands and this trainer's parser does not."""

    def autograd_reason(self, arguments: Any) -> str | None:
        """Why a run with these parsed arguments needs the ``autograd`` schedule, or None."""
        return None

    def decides_on_nonfinite(self, arguments: Any) -> bool:
        """Whether an option of the trainer's own says what becomes of losses and gradients that are not finite."""
        return False

    @abstractmethod
    def record_rules(self, config: Any) -> RecordRules:
        """What a training record must be for a model of this config; release values where the config has none."""

    def install(self, session: RunHooks) -> None:
        """Patches what is this family's own: by default the model class that the trainer names."""
        patch_model_class(session, self.model_class(vars(session.trainer)), self.training_arguments)

    def is_last_checkpoint(self, name: str, arguments: Any, steps: int) -> bool:
        """Whether the checkpoint that the trainer has just written is the run's last.

        Args:
            name: of its folder.
            arguments: the trainer's, parsed.
            steps: optimizer steps done.
        """
        most = getattr(arguments, "max_train_steps", None)
        return name == f"checkpoint-epoch-{arguments.num_epochs - 1}" or (most is not None and steps >= most)

    def reference_loss(self, upstream_forward: Callable[..., Any], model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Upstream's own loss on a batch, for the self check."""
        return upstream_forward(model, **batch).loss

    def loss_of_trainer(self, namespace: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """The trainer's own way from a prepared model and the arguments of a micro-batch to its loss."""
        return lambda model, **batch: model(**batch).loss

    def simulated_batch(self, config: Any, records: int, positions: int) -> dict[str, Any]:
        """Inputs as the trainer passes them, all zero; no mask: transformers drops a mask without padding.

        Returns:
            ids and labels ``[records, positions, channels]`` int64, and one weight per channel.
        """
        channels = config.n_vq + 1
        return {
            "input_ids": torch.zeros((records, positions, channels), dtype=torch.int64),
            "attention_mask": None,
            "labels": torch.zeros((records, positions, channels), dtype=torch.int64),
            "channelwise_loss_weight": [1.0] * channels,
        }

    def simulated_upstream_output(
        self, upstream_forward: Callable[..., Any], model: Any, batch: dict[str, Any], supervised: int
    ) -> Any:
        """Upstream's own forward on :meth:`simulated_batch`, for tensors without values.

        A family whose upstream looks at values (which positions have labels) runs the same modules on ``supervised``
        positions here.
        """
        return upstream_forward(model, **batch)

    def simulated_precision(self, model: nn.Module) -> AbstractContextManager[object]:
        """Mixed precision around the loss of a simulated step, as accelerate sets it up for this trainer."""
        return torch.autocast("cpu", torch.bfloat16)

    def check_trainer(self, namespace: dict[str, Any]) -> None:
        """Checks every seam of the trainer and of its model class; raises SeamError naming the first that fails."""
        for seam in self.trainer_seams:
            seam.find(namespace, "sft.py")
        model_class = self.model_class(namespace)
        if model_class is not None:
            self.check_class(model_class)

    def check_class(self, model_class: type[nn.Module]) -> None:
        """Checks every seam of the model class; raises SeamError naming the first that fails."""
        for seam in self.class_seams:
            seam.find(model_class, model_class.__name__)


def check_parts(family: str, model: nn.Module, expected: Mapping[str, int | None]) -> None:
    """Checks that an instance has the parts that the layer works with.

    Args:
        family: for the message.
        model: an instance of upstream's class.
        expected: number of entries by path; None where the part is no list.

    Raises:
        SeamError: a part is missing or has another number of entries.
    """
    for path, length in expected.items():
        try:
            part: Any = model.get_submodule(path)
        except AttributeError:
            raise SeamError(
                f"seam {type(model).__name__}.{path}: not found on the model. Expected the structure of {family} at "
                "upstream 58b20a0; upgrade moss_tts_patches, or train with MOSS_LOWMEM=0."
            ) from None
        if length is not None and len(part) != length:
            raise SeamError(
                f"seam {type(model).__name__}.{path}: found {len(part)} entries, expected {length} from the config."
            )


def shrink_qwen3(config: Any) -> None:
    """Makes a Qwen3 backbone's config small enough for the self check, grouped attention kept; no dropout."""
    config.vocab_size, config.pad_token_id = 61, 0
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 48, 2
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
    config.attention_dropout = 0.0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]


def supervised_positions(labels: torch.Tensor, ignore_index: int) -> LabelSummary:
    """Finds the positions with a label in any channel; labels ``[batch, positions, channels]``.

    One synchronisation with the device, at the start of the loss.
    """
    present = labels.reshape(-1, labels.shape[-1]) != ignore_index
    positions = present.any(dim=-1).nonzero().squeeze(-1)
    if not len(positions):
        # One frame without a label adds exactly nothing, and every gradient still arrives (as zero).
        positions = torch.zeros(1, dtype=torch.int64, device=labels.device)
    empty = (~present.any(dim=0)).nonzero().squeeze(-1).tolist()
    return LabelSummary(positions, tuple(empty))
