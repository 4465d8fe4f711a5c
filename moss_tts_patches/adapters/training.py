"""The adapter side of one training: from the base's precision to the merged checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import LowMemError, NumericsError, first_ten
from ..optim.gradients import GradientStore
from .injection import Adapters, inject
from .plan import AdapterPlan
from .quantised_base import check_quantised, loading_options, quantised_modules
from .record import ADAPTER, AdapterRecord
from .saving import save_adapter

# Upstream's default is 1e-5, which is right for all weights; PEFT's and QLoRA's recipes use 1e-4 to 2e-4.
USUAL_LEARNING_RATE = 1e-4
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AdapterTraining:
    """Makes, checks and saves the adapters of a run.

    Args:
        plan: what to make.
        groups: the family's target groups.
        family: its name, for the record.
        settings: the layer's, for the record.
        merge: ``last``, ``all`` or ``none``.
        say: logs a line.
    """

    def __init__(
        self,
        plan: AdapterPlan,
        groups: Mapping[str, str],
        family: str,
        *,
        settings: dict[str, Any],
        merge: str,
        say: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self._groups, self._family = groups, family
        self._settings, self._merge, self._say = settings, merge, say
        self._base_model = ""
        self._quantised: list[str] = []
        self._loading_options: dict[str, Any] = {}
        self._base_dtype = ""
        self.adapters: Adapters | None = None

    def started(self, base_model: str, learning_rate: float | None) -> None:
        """The trainer's arguments are known."""
        path = Path(base_model)
        self._base_model = str(path.resolve()) if path.exists() else base_model
        if learning_rate is not None and learning_rate < USUAL_LEARNING_RATE / 2:
            self._say(
                f"learning_rate={learning_rate:g} is low for adapters, which usually train at {USUAL_LEARNING_RATE:g} "
                "to 2e-4 (--learning-rate)"
            )

    def structure_known(self, model: nn.Module, mixed_precision: str, device: torch.device) -> None:
        """Prepares the loading of a base in 4 bit.

        Args:
            model: of upstream's class, on the meta device.
            mixed_precision: ``no``, ``bf16`` or ``fp16``.
            device: of the training.
        """
        if self.plan.method == "qlora":
            self._quantised = quantised_modules(model, self._groups)
            dtype = _DTYPES.get(mixed_precision, torch.float32)
            self._loading_options = loading_options(model, self._quantised, dtype, device)

    def loading_options(self) -> dict[str, Any]:
        """Returns what ``from_pretrained`` is given besides the trainer's arguments."""
        return self._loading_options

    def model_loaded(self, model: nn.Module, seed: int) -> Adapters:
        """Puts the adapters in."""
        if self.plan.method == "qlora":
            check_quantised(model, self._quantised)
        floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self._base_dtype = str(max(set(floating), key=floating.count)).removeprefix("torch.")
        self.adapters = inject(model, self.plan, self._groups, base_model=self._base_model, seed=seed)
        self._say(self.adapters.describe())
        return self.adapters

    def check_gradients(self, store: GradientStore) -> None:
        """Before the first update: every adapter must have learnt something.

        Raises:
            NumericsError: some received no gradient at all; names up to ten.
        """
        assert self.adapters is not None
        without = [name for name, p in self.adapters.named_parameters() if not store.has_received(p)]
        if without:
            raise NumericsError(
                f"adapter: {len(without)} trained tensors received no gradient in the first optimizer step: "
                f"{first_ten(without)}. "
                "No weight was touched. The training loss does not depend on them: leave them out of "
                "MOSS_LOWMEM_LORA_TARGETS, or give the batch labels for their codebooks."
            )

    def save(self, folder: Path, name: str, steps: int, tensors: dict[str, torch.Tensor]) -> None:
        """Writes the adapter where upstream's model would be.

        Args:
            folder: to write into.
            name: the checkpoint's final name.
            steps: optimizer steps done.
            tensors: of :meth:`.injection.Adapters.state_dict`, whole.
        """
        assert self.adapters is not None
        save_adapter(self.adapters, folder, self._record(name, steps), tensors)

    def _record(self, name: str, steps: int) -> AdapterRecord:
        import accelerate
        import peft
        import transformers

        from .. import __version__

        assert self.adapters is not None
        packages = {"torch": torch, "transformers": transformers, "accelerate": accelerate, "peft": peft}
        epoch = re.search(r"epoch-(\d+)$", name)
        return AdapterRecord(
            kind=ADAPTER,
            family=self._family,
            base_model=self._base_model,
            base_dtype=self._base_dtype,
            method=self.plan.method,
            rank=self.adapters.config.r,
            alpha=self.adapters.config.lora_alpha,
            targets=self.plan.targets or tuple(n for n in self._groups if n in ("backbone", "depth")),
            fully_trained=self.plan.also_train,
            steps=steps,
            epoch=int(epoch[1]) if epoch else -1,
            settings=self._settings,
            versions={"moss_tts_patches": __version__, **{n: module.__version__ for n, module in packages.items()}},
        )

    def saved(self, checkpoint: Path, is_last: bool) -> None:
        """Merges a checkpoint that has just been written, where that is wanted.

        A merge that fails costs nothing but itself: the adapter is whole, and can be merged later.

        Raises:
            LowMemError: the last checkpoint could not be merged.
        """
        if self._merge == "none" or (self._merge == "last" and not is_last):
            return
        from .merge import merge_adapter

        merged = checkpoint.with_name(checkpoint.name + "-merged")
        try:
            merge_adapter(checkpoint, merged, say=self._say, replace=True)
        except LowMemError as error:
            self._say(f"merge failed; the adapter {checkpoint.name} is whole, moss-lowmem merge does it later: {error}")
            if is_last:
                raise
