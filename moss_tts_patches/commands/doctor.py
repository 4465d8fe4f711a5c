"""``moss-lowmem doctor``: everything that would end a training, before it starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .refusal import refuse

if TYPE_CHECKING:
    from ..doctor import Finding

FOUND_ERRORS = 1


def doctor(
    output_dir: Annotated[
        Path | None, typer.Option(help="Where checkpoints go: room, a trial save, other runs.")
    ] = None,
    model_path: Annotated[Path | None, typer.Option(help="The model's folder: how large a checkpoint is.")] = None,
    checkpoints: Annotated[int, typer.Option(min=1, help="How many checkpoints will be kept: one an epoch.")] = 3,
    config_file: Annotated[str, typer.Option(help="The accelerate config; by default ACCELERATE_CONFIG_FILE.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Check this machine, the output folder and the accelerate config before a training.

    Ends with status 1 where something would end the training. Messages are Chinese where LC_ALL or LANG is.
    """
    from ..doctor import run_checks
    from ..doctor.facts import SaveTarget, gather_facts
    from ..doctor.storage import weight_bytes
    from ..errors import EnvironmentProblem
    from ..memory.full_ladder import find_checkpoint
    from ..messages import Messages, language_of

    say = Messages(language_of(os.environ))
    target = None
    try:
        model_folder = None if model_path is None else find_checkpoint(str(model_path))
    except EnvironmentProblem as error:
        refuse(error)
    if output_dir is not None:
        size = None if model_folder is None else weight_bytes(model_folder)
        arguments = {} if model_path is None else {"model_path": str(model_path)}
        target = SaveTarget(output_dir, size, checkpoints, arguments)
    findings = run_checks(
        gather_facts(
            target=target,
            config_file=config_file or os.environ.get("ACCELERATE_CONFIG_FILE", ""),
            prepare_device=prepare_device(os.environ.get("PREP_DEVICE"), os.environ.get("SKIP_PREPARE")),
        ),
        say,
    )
    failed = any(found.severity == "error" for found in findings)
    if as_json:
        content = {"ok": not failed, "findings": [found.to_dict() for found in findings]}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        _print_table(findings)
    if failed:
        raise typer.Exit(FOUND_ERRORS)


def prepare_device(device: str | None, skips: str | None) -> str | None:
    """Where upstream's run_train.sh will prepare the data; None where it will not."""
    return None if skips == "1" else device or "auto"


_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=True)
    for name in ("check", "severity", "evidence", "advice"):
        table.add_column(name, overflow="fold")
    for found in findings:
        colour = _COLOURS[found.severity]
        severity = f"[{colour}]{found.severity}[/{colour}]"
        table.add_row(found.check, severity, escape(found.evidence), escape(found.advice))
    Console().print(table)
