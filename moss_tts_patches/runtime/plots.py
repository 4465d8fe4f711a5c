"""Pictures and a page of a training's log."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import DataError, EnvironmentProblem
from ..units import GIB
from .progress import LOG_NAME, RunLog, read_log

PAGE = "lowmem_report.html"
_SIZE_INCHES, _DPI = (8.0, 4.5), 120


def write_report(folder: Path) -> list[Path]:
    """Draws loss, memory and throughput of a training, and a page that holds them all.

    Args:
        folder: a training's output folder.

    Returns:
        The files, the page last.

    Raises:
        DataError: there is no log, or no step in it.
        EnvironmentProblem: matplotlib is missing.
    """
    log = folder / LOG_NAME
    if not log.is_file():
        raise DataError(f"report: {log} not found. Expected the output folder of a training with the layer.")
    run = read_log(log)
    if not run.steps:
        raise DataError(f"report: {log} has no step yet. Wait for the first one.")
    figure_class = _figure_class()
    pictures = []
    for name, draw in (("loss", _draw_loss), ("memory", _draw_memory), ("throughput", _draw_throughput)):
        path = folder / f"lowmem_{name}.png"
        _save(figure_class, draw, run, path)
        pictures.append(path)
    page = folder / PAGE
    page.write_text(_page(folder.name, run, pictures), encoding="utf-8")
    return [*pictures, page]


def _figure_class() -> Any:
    try:
        # Not pyplot: it would look for a display and keep every figure.
        from matplotlib.figure import Figure
    except ImportError:
        raise EnvironmentProblem(
            "report: matplotlib is not installed. Install it with: pip install 'moss_tts_patches[report]'"
        ) from None
    return Figure


def _save(figure_class: Any, draw: Callable[[Any, RunLog], None], run: RunLog, path: Path) -> None:
    figure = figure_class(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    draw(axes, run)
    figure.savefig(path, dpi=_DPI)


def _draw_loss(axes: Any, run: RunLog) -> None:
    """The mean of each window in front, each codebook behind it; what was measured on other records as points."""
    steps = run.steps
    numbers = [one["step"] for one in steps]
    for name in dict.fromkeys(name for one in steps for name in one["loss_by_codebook"]):
        values = [_number(one["loss_by_codebook"].get(name)) for one in steps]
        axes.plot(numbers, values, linewidth=0.7, alpha=0.5, label=name)
    axes.plot(numbers, [_number(one["loss"]) for one in steps], color="black", linewidth=1.8, label="loss")
    if run.validation:
        points = [_number(one["valid_loss"]) for one in run.validation]
        axes.plot([one["step"] for one in run.validation], points, "o", color="tab:red", label="validation", zorder=3)
    axes.set_ylabel("cross entropy")
    axes.legend(fontsize=6, ncols=4)


def _draw_memory(axes: Any, run: RunLog) -> None:
    """Bytes in use at each step, and what was planned."""
    steps = run.steps
    numbers = [one["step"] for one in steps]
    for name in dict.fromkeys(name for one in steps for name in one["memory_bytes"]):
        values = [_number(one["memory_bytes"].get(name)) / GIB for one in steps]
        axes.plot(numbers, values, label=name.replace("_", " "))
    for name, planned in run.about.get("plan_bytes", {}).items():
        axes.axhline(planned / GIB, linestyle="--", color="gray", label=f"{name.replace('_', ' ')}, planned")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _draw_throughput(axes: Any, run: RunLog) -> None:
    steps = run.steps
    numbers = [one["step"] for one in steps]
    axes.plot(numbers, [one["frames"] / max(one["seconds"], 1e-9) for one in steps], label="frames")
    axes.plot(numbers, [one["positions"] / max(one["seconds"], 1e-9) for one in steps], label="positions")
    axes.set_ylabel("per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _page(title: str, run: RunLog, pictures: list[Path]) -> str:
    """Returns a page that needs no other file."""
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(text))}</td></tr>" for name, text in _facts(run)
    )
    images = "".join(
        f'<h2>{path.stem.removeprefix("lowmem_")}</h2><img alt="{path.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        for path in pictures
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font-family:sans-serif;max-width:60rem;margin:2rem auto}img{max-width:100%}"
        "th{text-align:left;padding-right:2rem;font-weight:normal;color:#555}</style>"
        f"<h1>{html.escape(title)}</h1><table>{rows}</table>{images}</html>\n"
    )


def _facts(run: RunLog) -> list[tuple[str, Any]]:
    steps = run.steps
    first, last = steps[0], steps[-1]
    seconds = sum(one["seconds"] for one in steps)
    facts = [
        ("steps", f"{first['step']} to {last['step']}"),
        ("epochs", f"{last['epoch']:.2f}"),
        ("loss", f"{_number(first['loss']):.4f} to {_number(last['loss']):.4f}"),
        ("hours", f"{seconds / 3600:.2f}"),
        ("frames per second", f"{sum(one['frames'] for one in steps) / max(seconds, 1e-9):.1f}"),
    ]
    for name in dict.fromkeys(name for one in steps for name in one["memory_bytes"]):
        most = max(one["memory_bytes"].get(name, 0) for one in steps)
        facts.append((f"{name.replace('_', ' ')} memory, at most", f"{most / GIB:.2f} GiB"))
    for name, planned in run.about.get("plan_bytes", {}).items():
        facts.append((f"{name.replace('_', ' ')} memory, planned", f"{planned / GIB:.2f} GiB"))
    left_out = sum(1 for one in steps if one.get("skipped"))
    if left_out:
        facts.append(("steps left out, gradients not finite", str(left_out)))
    if run.validation:
        best = min(run.validation, key=lambda one: math.inf if one["valid_loss"] is None else one["valid_loss"])
        facts.append(("validation loss, best", f"{_number(best['valid_loss']):.4f} at step {best['step']}"))
    return facts + [(name, value) for name, value in run.about.items() if name != "plan_bytes" and value is not None]
