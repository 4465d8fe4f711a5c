"""``moss-lowmem merge``: makes a checkpoint that upstream loads out of an adapter and its base."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .refusal import refuse


def merge(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder, such as output/checkpoint-epoch-2.")],
    base: Annotated[
        str | None, typer.Option(help="Folder or hub id of the base model; by default the one it was trained on.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write, new or empty; by default ADAPTER-merged.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; by default what it was trained in.")
    ] = None,
) -> None:
    """Merge ADAPTER into its base model, on the CPU and in little memory.

    The result is a full checkpoint in upstream's own form, which its inference loads without PEFT.

    An adapter of a 4-bit base (QLoRA) is merged into the 16-bit model. A merge that fails leaves nothing behind.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..adapters import mute_bitsandbytes
    from ..errors import LowMemError

    mute_bitsandbytes()
    path = Path(os.path.abspath(adapter))
    from ..adapters.merge import merge_adapter
    from ..families import FAMILIES

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("merging")
        try:
            merge_adapter(
                path,
                output if output is not None else path.with_name(path.name + "-merged"),
                base,
                dtype,
                lambda line: typer.echo(f"[lowmem] {line}"),
                # An adapter of another tool does not say its family; no two families clash in these names.
                tied=[pattern for family in FAMILIES for pattern in family.tied_modules],
                progress=lambda shard, done, total: bar.update(task, description=shard, completed=done, total=total),
            )
        except (LowMemError, OSError) as error:
            refuse(error)
