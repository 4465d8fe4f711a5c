"""Run as a script: loads what takes seconds once, then forks a trainer of the miniature for each line it reads.

A trainer in a forked process runs its ``sft.py`` as ``__main__``, with its own variables and command line, as ``python
sft.py`` does; only the imports of torch and transformers are there already, and the layer's start-up hook, which
autowrapt would have called before them, is called by hand. Whole processes with autowrapt are tested elsewhere.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

# What every trainer imports, with the modules that transformers would only load at the first use.
import accelerate
import torch
from transformers import AutoModel, PreTrainedTokenizerFast, get_scheduler
from transformers.models.gpt2 import configuration_gpt2
from transformers.models.qwen3 import modeling_qwen3

LOADED = (accelerate, torch, AutoModel, PreTrainedTokenizerFast, get_scheduler, configuration_gpt2, modeling_qwen3)


def fall_silent() -> None:
    """Last of all: a frozen heap is never freed, and triton's bindings would list it all as leaked."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def train(request: dict[str, Any]) -> None:
    """Becomes the trainer that was asked for; what it prints goes to a file."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).resolve().parent)
    if os.environ.get("AUTOWRAPT_BOOTSTRAP"):
        from moss_tts_patches.bootstrap import on_argparse_import

        on_argparse_import(argparse)
    runpy.run_path(request["script"], run_name="__main__")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    atexit.register(fall_silent)
    # A child's collector would touch, and so copy, every object of its parent: 1.8 s a training instead of 0.7.
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            train(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
