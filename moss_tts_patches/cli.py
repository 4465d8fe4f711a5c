"""``moss-lowmem``: the layer for commands of your own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import NoReturn

import typer

from . import __version__
from .commands.check_data import check_data
from .commands.configs import configs
from .commands.doctor import doctor
from .commands.inspect import inspect
from .commands.merge import merge
from .commands.plan import plan
from .commands.refusal import refuse
from .commands.report import report
from .launch.interpreter import activating_environment, problem_with, python_of

CANNOT_RUN = 126  # a shell's own status for a file that is no program
NOT_FOUND = 127  # a shell's own status for a command that does not exist

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train MOSS-TTS with its official scripts in less memory.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moss_tts_patches {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    pass


@app.command(
    # Everything after the first word belongs to CMD, --help and `--` included.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
    epilog="Example: moss-lowmem run accelerate launch moss_tts_local/finetuning/sft.py --model-path …",
)
def run(context: typer.Context) -> None:
    """Run CMD with the layer switched on: CMD [ARGUMENTS...].

    It sets MOSS_LOWMEM=1 (unless you set it) and AUTOWRAPT_BOOTSTRAP for CMD and every process it starts, and says
    afterwards whether memory was full if CMD is killed.
    """
    command = list(context.args)
    if not command:
        refuse("run needs a command: moss-lowmem run accelerate launch …/sft.py …")
    environment = activating_environment(os.environ)
    program = shutil.which(command[0])
    if program is None:
        refuse(f"{command[0]}: command not found.", NOT_FOUND)
    if _switched_on(environment):
        python = python_of(program)
        problem = problem_with(python, environment) if python is not None else None
        if problem is not None:
            refuse(problem)
        _supervise(program, command, environment, python)
    _replace_process(program, command, dict(os.environ))


app.command("check-data")(check_data)
app.command("configs")(configs)
app.command("doctor")(doctor)
app.command("inspect")(inspect)
app.command("merge")(merge)
app.command("plan")(plan)
app.command("report")(report)


def _switched_on(environment: dict[str, str]) -> bool:
    """Reads and checks the variables; pydantic, which that takes, is not imported for ``--version``."""
    from .errors import LowMemError
    from .settings import load_settings, parse_switch

    try:
        switched_on = parse_switch(environment)
        if switched_on:
            load_settings()
    except LowMemError as error:
        refuse(error)
    return switched_on


def _supervise(program: str, command: list[str], environment: dict[str, str], python: str | None) -> NoReturn:
    from .launch.supervise import prepared_environment, supervise

    sys.stdout.flush()
    try:
        status = supervise(program, command, prepared_environment(environment, python))
    except OSError as error:
        refuse(f"{command[0]}: {error.strerror or error}.", CANNOT_RUN)
    raise typer.Exit(status)


def _replace_process(program: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    if os.name == "nt":  # exec there starts a second process and lets the shell go on without waiting for it
        raise typer.Exit(subprocess.run([program, *command[1:]], env=environment).returncode)
    os.execvpe(program, command, environment)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="moss-lowmem")


if __name__ == "__main__":
    main()
