"""``moss-lowmem check-data``: what the start of a training finds in its files, without the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..launch.families import SUPPORTED, family_problem

if TYPE_CHECKING:
    from ..data.check import Counter
    from ..data.report import DataReport
    from ..data.rules import RecordRules

FAULTY, BAD_INPUT = 1, 2

# An entry of config.json that one family alone has; the family without one is the last resort.
_MARKS = {
    "rvq": "moss_tts_realtime",
    "gpt2_config": "moss_tts_local_v1.5",
    "local_num_layers": "moss_tts_local",
    "n_vq": "moss_tts_delay",
}


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

    try:
        paths = find_files([part for name in files for part in ([name] if Path(name).exists() else name.split(","))])
        rules, counter, note = _counting(model_path, family, repo)
        report = check_files(paths, rules, counter, max_positions)
    except LowMemError as error:
        _stop(str(error))
    if note is not None:
        report.notes.append(note)
    typer.echo(json.dumps(report.as_values(), ensure_ascii=False, indent=2) if as_json else _text(report))
    raise typer.Exit(FAULTY if report.faults or not report.records else 0)


def _counting(
    model_path: Path | None, family: str | None, repo: Path | None
) -> tuple[RecordRules, Counter, str | None]:
    """Returns rules and what counts positions, and why the numbers are upper bounds only (None if they are not)."""
    from ..data.check import make_counter
    from ..data.processors import load_processor, stored_config
    from ..errors import DataError
    from ..families import FAMILIES
    from ..settings import load_settings

    config = None if model_path is None else stored_config(model_path)
    name = family if family is not None else _family_of(config)
    problem = family_problem(name)
    if problem is not None:
        raise DataError(problem.replace("MOSS_LOWMEM_FAMILY=", "--family "))
    rules = next(known for known in FAMILIES if known.name == name)().record_rules(config)
    if load_settings().corrects("prompt_length"):
        rules = rules.with_prompt_length()
    if model_path is None:
        return rules, make_counter(rules, None), "positions are upper bounds: --model-path gives the trainer's own"
    folders = [model_path]
    if repo is not None:
        folders += [repo / name, repo / name / "mossttsrealtime"]
    try:
        return rules, make_counter(rules, load_processor(model_path, folders)), None
    except Exception as error:  # upstream's code, whatever it raises; the codes can be checked without it
        return rules, make_counter(rules, None), f"positions are upper bounds: {error}"


def _family_of(config: Any) -> str:
    from ..errors import DataError

    for mark, name in _MARKS.items():
        if hasattr(config, mark):
            return name
    raise DataError(f"data: of which family are the records? Name a checkpoint (--model-path), or one of {SUPPORTED}.")


def _text(report: DataReport) -> str:
    from ..data.report import listed

    lines = [line.removeprefix("data ") for line in report.summary()]
    if report.too_long:
        lines += [f"{len(report.too_long)} records are too long:", *listed(report.too_long)]
    lines.append(report.fault_list() if report.faults else "no faulty record")
    return "\n".join(lines)


def _stop(message: str) -> NoReturn:
    typer.echo(f"[lowmem] error: {message}", err=True)
    raise typer.Exit(BAD_INPUT)
