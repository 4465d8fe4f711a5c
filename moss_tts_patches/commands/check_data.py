"""``moss-lowmem check-data``: what the start of a training finds in its files, without the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..launch.families import SUPPORTED
from .refusal import refuse

if TYPE_CHECKING:
    from ..data.report import DataReport

FAULTY = 1


def check_data(
    files: Annotated[list[str], typer.Argument(help="JSONL files, folders or patterns, as --train-jsonl takes them.")],
    model_path: Annotated[
        Path | None, typer.Option(help="The checkpoint to be trained: its codebooks, and exact positions.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help=f"Its family, where config.json does not tell: {', '.join(SUPPORTED)}.")
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(envvar="MOSS_TTS_REPO", help="The MOSS-TTS checkout, where the checkpoint has no prompt code."),
    ] = None,
    max_positions: Annotated[
        int | None, typer.Option(min=1, help="List longer records as MOSS_LOWMEM_MAX_POSITIONS would leave them out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check prepared training files: JSON, fields, audio codes, and how long each record is in training.

    Ends with status 0 if every record can be trained on, 1 if one cannot or there is none, 2 if the check could not
    be made. With --model-path positions are the trainer's own (upstream's prompt code is run for that); without, upper
    bounds.
    """
    from ..data.check import check_files
    from ..data.files import find_files
    from ..errors import LowMemError
    from .counting import rules_and_counter

    try:
        paths = find_files([part for name in files for part in ([name] if Path(name).exists() else name.split(","))])
        rules, counter, note = rules_and_counter(model_path, family, repo)
        report = check_files(paths, rules, counter, max_positions)
    except LowMemError as error:
        refuse(error)
    if note is not None:
        report.notes.append(note)
    typer.echo(json.dumps(report.as_values(), ensure_ascii=False, indent=2) if as_json else _text(report))
    raise typer.Exit(FAULTY if report.faults or not report.records else 0)


def _text(report: DataReport) -> str:
    from ..data.report import listed

    lines = [line.removeprefix("data ") for line in report.summary()]
    if report.too_long:
        lines += [f"{len(report.too_long)} records are too long:", *listed(report.too_long)]
    lines.append(report.fault_list() if report.faults else "no faulty record")
    return "\n".join(lines)
