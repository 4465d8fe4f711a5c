"""What the positions of records are counted by where no trainer runs: a checkpoint, a family, upstream's checkout."""

from __future__ import annotations

from pathlib import Path

from ..data.check import Counter, make_counter
from ..data.processors import load_processor, stored_config
from ..data.rules import RecordRules
from ..errors import DataError
from ..families import FAMILIES
from ..launch.families import SUPPORTED, family_of_config, family_problem
from ..settings import load_settings


def rules_and_counter(
    model_path: Path | None, family: str | None, repo: Path | None
) -> tuple[RecordRules, Counter, str | None]:
    """Returns rules and what counts positions, and why the numbers are upper bounds only (None if they are not).

    Args:
        model_path: the checkpoint's folder, if there is one.
        family: its name; None where the checkpoint tells.
        repo: a MOSS-TTS checkout, for checkpoints without prompt code of their own. Its code is run.

    Raises:
        DataError: the family is not known, or the checkpoint has no config that can be read.
        SettingsError: a variable of the layer has a wrong name or value.
    """
    config = None if model_path is None else stored_config(model_path)
    name = family if family is not None else family_of_config(() if config is None else vars(config))
    if name is None:
        raise DataError(
            "data: of which family are the records? Name a checkpoint (--model-path), or the family (--family), one of "
            f"{', '.join(SUPPORTED)}."
        )
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
