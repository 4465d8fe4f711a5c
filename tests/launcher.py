"""A stand-in for a MOSS-TTS checkout and ways to run ``run_train_lowmem.sh`` on it in milliseconds, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LAUNCHER = PROJECT / "run_train_lowmem.sh"
BIN = Path(sys.executable).parent
LAYER_VARIABLES = ("MOSS_LOWMEM", "AUTOWRAPT_BOOTSTRAP", "ACCELERATE_CONFIG_FILE")
PATH_VARIABLES = (
    "MODEL_PATH",
    "CODEC_PATH",
    "RAW_JSONL",
    "PREPARED_JSONL",
    "TRAIN_JSONL",
    "OUTPUT_DIR",
    "MOSS_LOWMEM_VALID_JSONL",
)
ENGINE_YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
deepspeed_config: {{zero_stage: 3}}
num_machines: {machines}
num_processes: {processes}
"""

# Prints what it was given, in place of training: `NAME=value`, or `NAME` alone where it is not set.
_OFFICIAL_SCRIPT = """
echo "PWD=$PWD"
for name in {names}; do
  if [[ -n "${{!name+set}}" ]]; then echo "$name=${{!name}}"; else echo "$name"; fi
done
exit ${{EXIT_STATUS:-0}}
RAW_JSONL="${{RAW_JSONL:-train_raw.jsonl}}"
PREPARED_JSONL="${{PREPARED_JSONL:-train_with_codes.jsonl}}"
OUTPUT_DIR="${{OUTPUT_DIR:-output/{family}_sft}}"
"""


def make_checkout(folder: Path, family: str = "moss_tts_local") -> Path:
    """Writes what the launcher recognises a checkout by."""
    scripts = folder / family / "finetuning"
    scripts.mkdir(parents=True)
    names = " ".join((*LAYER_VARIABLES, *PATH_VARIABLES, "TRAIN_EXTRA_ARGS_STR"))
    (scripts / "run_train.sh").write_text(_OFFICIAL_SCRIPT.format(names=names, family=family), encoding="utf-8")
    (scripts / "sft.py").write_text("", encoding="utf-8")
    return folder


def make_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def make_bare_python(folder: Path) -> Path:
    """Makes a Python without any package, and returns the folder of its programs; one of them is ``accelerate``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    # As pip writes it where the path has a space, which a shebang cannot have.
    text = f"#!/bin/sh\n'''exec' \"{folder}/bin/python3\" \"$0\" \"$@\"\n' '''\nprint('launched')\n"
    make_program(folder / "bin" / "accelerate", text)
    return folder / "bin"


def make_gpus(folder: Path, count: int) -> Path:
    """Writes an ``nvidia-smi`` that lists so many GPUs."""
    lines = "".join(f"echo 'GPU {number}: NVIDIA Test (UUID: GPU-{number})'\n" for number in range(count))
    return make_program(folder / "nvidia-smi", f"#!/bin/sh\n{lines}")


def make_package(folder: Path, name: str, code: str) -> Path:
    """Writes an installed package of that name; ``folder`` is for PYTHONPATH."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code, encoding="utf-8")
    metadata = folder / f"{name}-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n", encoding="utf-8")
    return folder


def environment_of(*folders: Path, **variables: str) -> dict[str, str]:
    """A small environment: programs of ``folders``, then of this Python, then of the system; no GPU."""
    programs = [*map(str, folders), str(BIN), os.defpath, "/usr/bin", "/bin"]
    return {"PATH": os.pathsep.join(programs), "CUDA_VISIBLE_DEVICES": "", **variables}


@dataclass(frozen=True)
class Launch:
    """What came of a launch."""

    status: int
    stdout: str
    stderr: str

    @property
    def given(self) -> dict[str, str | None]:
        """What the official script was given; empty where it was not reached."""
        lines = [line.partition("=") for line in self.stdout.splitlines() if not line.startswith("[")]
        return {name: value if equals else None for name, equals, value in lines}

    @property
    def error(self) -> str:
        """The one line of a refusal."""
        assert self.status == 2, (self.status, self.stdout, self.stderr)
        assert self.stdout == ""
        assert self.stderr.count("\n") == 1, self.stderr
        assert self.stderr.startswith("[lowmem] error: ")
        return self.stderr


def launch(folder: Path, environment: Mapping[str, str], *arguments: str) -> Launch:
    """Runs the launcher as a user does who stands in ``folder``."""
    done = subprocess.run(
        ["bash", str(LAUNCHER), *arguments],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Launch(done.returncode, done.stdout, done.stderr)


def listing(*folders: Path) -> list[tuple[str, int]]:
    """Every file and folder below, with when it was last changed."""
    return sorted((str(path), path.stat().st_mtime_ns) for folder in folders for path in folder.rglob("*"))
