"""``moss-lowmem inspect``: says what a folder is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..units import GIB, KIB, MIB
from .refusal import refuse

if TYPE_CHECKING:
    from ..adapters.inspect import FolderDescription

NOT_WHOLE = 1


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of a checkpoint or an adapter.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what PATH is: a full checkpoint, an adapter, a merged checkpoint, or broken and why.

    The exit status is 0 if it is whole, 1 if it is broken, 2 if there is no such folder. Weights are not read.
    """
    from ..adapters.inspect import describe_folder
    from ..errors import LowMemError

    try:
        found = describe_folder(path)
    except (LowMemError, OSError) as error:
        refuse(error)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{found.path}: {found.kind}")
        for name, value in _lines(found):
            typer.echo(f"  {name + ':':<15}{value}")
    if not found.is_whole:
        raise typer.Exit(NOT_WHOLE)


def _lines(found: FolderDescription) -> Iterator[tuple[str, str]]:
    """Yields what is known, in words."""
    for problem in found.problems:
        yield "problem", problem
    known = {
        "family": found.family,
        "base": found.base,
        "method": found.method,
        "rank": found.rank,
        "alpha": found.alpha,
        "targets": ", ".join(found.targets),
        "fully trained": ", ".join(found.fully_trained),
        "steps": found.steps,
        "epoch": found.epoch,
    }
    for name, value in known.items():
        if value not in (None, ""):
            yield name, str(value)
    if found.dtypes is not None:
        yield "tensors", f"{found.tensors}, {_size(found.bytes)}"
        yield "dtypes", ", ".join(f"{name} {_size(size)}" for name, size in found.dtypes.items())


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
