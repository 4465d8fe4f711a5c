"""How a command of ``moss-lowmem`` says that it cannot do what it was asked."""

from __future__ import annotations

from typing import NoReturn

import typer

#: Exit status of every command where what it was given is at fault, as typer's own for a wrong option.
BAD_INPUT = 2


def refuse(message: object, status: int = BAD_INPUT) -> NoReturn:
    """Ends the command with one line on standard error.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"[lowmem] error: {message}", err=True)
    raise typer.Exit(status)
