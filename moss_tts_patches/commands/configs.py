"""``moss-lowmem configs``: ready accelerate configs for several GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .refusal import refuse


def configs(
    name: Annotated[str | None, typer.Argument(help="The config to copy; without it, all are listed.")] = None,
    destination: Annotated[Path | None, typer.Argument(help="The file to write (default: NAME.yaml here).")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes (default: the GPUs that are visible here).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """List the accelerate configs that come with the layer, or copy one to change it.

    ACCELERATE_CONFIG_FILE=lowmem:NAME bash run_train_lowmem.sh uses one as it is. For several machines copy it and set
    num_machines, machine_rank, main_process_ip, main_process_port, and num_processes over all of them.
    """
    from ..errors import LowMemError
    from ..launch.configs import PREFIX, config_names, config_text, describe_config
    from ..launch.engine import visible_gpus

    if name is None:
        for known in config_names():
            typer.echo(f"{PREFIX}{known:<14} {describe_config(known)}")
        return
    name = name.removeprefix(PREFIX)
    target = Path(f"{name}.yaml") if destination is None else destination
    try:
        text = config_text(name, processes or max(1, visible_gpus(os.environ)))
        with open(target, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except LowMemError as error:
        refuse(error)
    except FileExistsError:
        refuse(f"{target} is there already; --force writes over it.")
    except OSError as error:
        refuse(f"{target}: {error.strerror}.")
    typer.echo(target)
