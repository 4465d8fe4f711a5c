"""What the start-up hook costs and where it acts, in fresh interpreters."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mini import clean_environment

from moss_tts_patches.bootstrap import RECOGNISED_FROM, TRAINER_FUNCTIONS, is_trainer

PACKAGE = Path(__file__).resolve().parents[1] / "moss_tts_patches"
OURS = "sorted(name for name in sys.modules if name.startswith('moss_tts_patches'))"


def python(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(**variables), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_hook_imports_nothing_heavy():
    heavy = "{'torch', 'pydantic', 'transformers', 'accelerate', 'wrapt', 'typing_extensions'}"
    code = f"import sys, moss_tts_patches.bootstrap; print(sorted({heavy} & set(sys.modules)))"
    assert python(code) == "[]"


def test_switched_off_nothing_beyond_the_hook_is_imported():
    code = f"import sys, argparse; print({OURS}, hasattr(argparse.ArgumentParser.parse_args, '__moss_lowmem__'))"
    expected = "['moss_tts_patches', 'moss_tts_patches.bootstrap'] False"
    for variables in ({}, {"MOSS_LOWMEM": "0"}):
        assert python(code, AUTOWRAPT_BOOTSTRAP="moss_tts_patches", **variables) == expected


def test_switched_on_other_programs_parse_as_before():
    code = (
        "import sys, argparse\n"
        "def main(): return argparse.ArgumentParser().parse_args(['--x'] if 0 else [])\n"
        f"main(); print({OURS}, argparse.ArgumentParser.parse_args.__moss_lowmem__)"
    )
    expected = "['moss_tts_patches', 'moss_tts_patches.bootstrap'] True"
    assert python(code, AUTOWRAPT_BOOTSTRAP="moss_tts_patches", MOSS_LOWMEM="1") == expected


def test_explicit_import_and_start_up_hook_are_one_activation():
    code = (
        "import moss_tts_patches.explicit, argparse\n"
        "function = argparse.ArgumentParser.parse_args\n"
        "print(hasattr(function.__wrapped__, '__wrapped__'))"
    )
    assert python(code, AUTOWRAPT_BOOTSTRAP="moss_tts_patches", MOSS_LOWMEM="1") == "False"


def test_a_trainer_is_recognised_with_half_of_its_functions():
    names = sorted(TRAINER_FUNCTIONS)
    namespace = dict.fromkeys([*names[:RECOGNISED_FROM], "main"], print)
    assert is_trainer(namespace)
    assert not is_trainer({name: namespace[name] for name in [*names[: RECOGNISED_FROM - 1], "main"]})
    assert not is_trainer(dict.fromkeys(("main", "parse_args", "Accelerator", "AdamW", "DataLoader"), print))


# Which of our packages and modules each may import; design, section 6: families know upstream, features know tensors.
LAYERS = {
    "errors": {"last_words"},
    "last_words": set(),
    "units": set(),
    "cores": set(),
    "bootstrap": {"activation", "errors"},
    "settings": {"errors"},
    "ledger": {"errors"},
    "memory/placement": {"errors", "units"},
    "memory/tracker": {"memory"},
    "memory/flops": set(),
    "optim": {"cores", "errors", "memory", "optim"},
    "loss": {"errors", "optim", "loss"},
    "data": {"cores", "errors", "data"},
    "messages": {"message_texts", "units"},
    "doctor": {"errors", "doctor", "launch", "memory", "messages", "units"},
    "families": {"data", "errors", "loss", "optim", "families", "ledger"},
}


def imported_parts(path):
    """First part below moss_tts_patches of every import in a file."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = (*base, *(node.module or "").split(".")) if node.module else base
            names = [target] if node.module else [(*base, alias.name) for alias in node.names]
            yield from (name[0] for name in names if name and name[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moss_tts_patches"):
            yield (node.module + ".").split(".")[1]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_downwards_only(layer):
    path = PACKAGE / layer
    files = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    wrong = {str(file): sorted(set(imported_parts(file)) - LAYERS[layer]) for file in files}
    assert not {file: names for file, names in wrong.items() if names}


def test_our_variables_are_read_in_few_places():
    """The hook, the settings, the activation and the launcher; features receive plain values."""
    allowed = {"bootstrap.py", "settings.py", "activation.py", "cli.py"}
    readers = {
        file
        for file in PACKAGE.rglob("*.py")
        if re.search(r"(environ|getenv)[^\n]*MOSS_", file.read_text(encoding="utf-8"))
    }
    assert readers
    assert {file for file in readers if file.name not in allowed and "launch" not in file.parts} == set()
