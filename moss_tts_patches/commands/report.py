"""``moss-lowmem report``: pictures of a training from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .refusal import refuse


def report(
    output_dir: Annotated[Path, typer.Argument(help="A training's output folder, finished or still running.")],
) -> None:
    """Draw a training's loss, memory and throughput into its output folder, and one HTML page with all of them."""
    from ..errors import LowMemError
    from ..runtime.plots import write_report

    try:
        written = write_report(output_dir)
    except LowMemError as error:
        refuse(error)
    for path in written:
        typer.echo(path)
