"""What a run says of itself before its first step and after its last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..units import GIB
from .report import StepClock, describe_module, describe_parameters, peak_memory

if TYPE_CHECKING:
    from ..session import Session


def start_lines(session: Session) -> Iterator[str]:
    """Yields the log's first lines: versions, patches, what the model's parts compute with, the plan, sizes.

    Args:
        session: a run whose model, stores and optimizer are ready.
    """
    import accelerate
    import transformers

    settings, family, model = session.settings, session.family, session.model
    placement = session.stores.placement
    yield (
        f"moss_tts_patches={__version__} torch={torch.__version__} transformers={transformers.__version__} "
        f"accelerate={accelerate.__version__} family={family.name}"
    )
    yield "patched=" + ",".join(patch.place for patch in session.ledger)
    backbone, depth = family.backbone(model), family.depth_model(model)
    yield f"{describe_module('backbone', backbone)} {describe_module('depth', depth)}"
    yield (
        f"plan schedule={session.decisions.schedule} chunk_frames={settings.chunk_frames} "
        f"checkpointed_layers={session.checkpointed_layers} optimizer={settings.optimizer} "
        f"gradients={placement.gradients} states={placement.states} weights={placement.weights} "
        f"corrections={','.join(settings.corrections) or 'none'}"
    )
    yield f"{describe_parameters(model)} kept_off_gpu={session.parked_bytes / GIB:.2f}GiB"


def describe_run(session: Session) -> dict[str, Any]:
    """Returns what ``lowmem_log.jsonl`` says of the run before its first step, as JSON values."""
    choice = session.decisions.choice
    return {
        "family": session.family.name,
        "moss_tts_patches": __version__,
        "method": session.settings.method,
        "schedule": session.decisions.schedule,
        "plan": None if choice is None else choice.rung.name,
        "plan_bytes": {} if choice is None else choice.planned_bytes(),
    }


def end_line(clock: StepClock, device: torch.device) -> str:
    """Returns the log's last line; this process has done a step."""
    return f"steps={clock.steps} median_step_time={clock.median_seconds():.2f}s {peak_memory(device)}"


def nothing_left_line(steps: int) -> str:
    """Returns what a resumed training of so many steps says that had done them all."""
    return (
        f"resume: this training had come to its end (step {steps} of {steps}), and nothing is trained now. For another "
        "one set OUTPUT_DIR to a new folder, or MOSS_LOWMEM_RESUME=off to train this one anew."
    )
