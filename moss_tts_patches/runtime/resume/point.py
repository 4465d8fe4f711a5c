"""A resume point on the disk: ``resume/step-N/``, a folder that is either whole or not there.

``point.json`` holds every scalar and the sizes of the other files; weights and optimizer states are safetensors files;
what differs between processes is in ``rank-RRRRR.json``. Nothing in a point is code: no pickle is ever loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import StateError
from ..saving import finish_interrupted_saves, whole_folder

FOLDER, MANIFEST = "resume", "point.json"
WEIGHTS, STATES = "weights.safetensors", "optimizer.safetensors"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Point:
    """A whole resume point.

    Attributes:
        folder: where it stands.
        values: content of ``point.json``.
    """

    folder: Path
    values: dict[str, Any]

    @property
    def step(self) -> int:
        return self.values["position"]["steps"]

    @property
    def serial(self) -> int:
        """Grows with every point saved into the same folder, whatever its step: a run may go back and go on anew."""
        return self.values["serial"]

    def rank_values(self, rank: int) -> dict[str, Any]:
        """Returns what only this process needs."""
        return json.loads((self.folder / rank_file(rank)).read_text(encoding="utf-8"))


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def read_point(folder: Path) -> Point:
    """Opens a point and checks that it is whole.

    Raises:
        StateError: it is not, or another version of the layer wrote it in another form.
    """
    try:
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = dict(values["files"])
        found = {name: (folder / name).stat().st_size for name in sizes}
        version = values["format"]
    except OSError as error:
        name = Path(error.filename or MANIFEST).name
        raise StateError(
            f"resume point {folder}: {name}: {error.strerror}. It is not whole; use another one."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise StateError(
            f"resume point {folder}: {MANIFEST} cannot be read. It is not whole; use another one."
        ) from None
    if version != FORMAT:
        raise StateError(
            f"resume point {folder}: format {version}, expected {FORMAT}. Resume with the version of moss_tts_patches "
            "that wrote it, or set MOSS_LOWMEM_RESUME=off to start anew."
        )
    short = [f"{name} has {found[name]} bytes, expected {size}" for name, size in sizes.items() if found[name] != size]
    if short:
        raise StateError(f"resume point {folder}: {'; '.join(short)}. It is not whole; use another one.")
    return Point(folder, values)


def points_in(folder: Path, say: Callable[[str], None] = lambda line: None) -> list[Point]:
    """Returns the whole points below ``folder``, the one saved last first; says which are not whole."""
    found = []
    for path in _step_folders(folder):
        try:
            found.append(read_point(path))
        except StateError as error:
            say(f"passed_over: {error}")
    return sorted(found, key=lambda point: -point.serial)


def _step_folders(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if _NAME.fullmatch(entry.name) and entry.is_dir():  # a link too: a user may keep points on another disk
            yield Path(entry.path)


def find_point(wanted: str, output_folder: Path, say: Callable[[str], None]) -> Point | None:
    """Finds the point that ``MOSS_LOWMEM_RESUME`` asks for.

    Args:
        wanted: ``auto``, ``off``, or the path of a point or of a folder with points.
        output_folder: of the trainer.
        say: gets a line for each folder that is passed over.

    Raises:
        StateError: a path was given, and there is no whole point.
    """
    if wanted == "off":
        return None
    if wanted == "auto":
        finish_interrupted_saves(output_folder / FOLDER, say)
        return next(iter(points_in(output_folder / FOLDER, say)), None)
    folder = Path(wanted)
    if _NAME.fullmatch(folder.name) or (folder / MANIFEST).exists():
        return read_point(folder)
    points = points_in(folder, say) or points_in(folder / FOLDER, say)
    if not points:
        raise StateError(
            f"MOSS_LOWMEM_RESUME={wanted}: no resume point found there. Expected a folder step-N that the layer saved, "
            "an output folder with one, auto, or off."
        )
    return points[0]


def write_point(
    root: Path,
    values: dict[str, Any],
    ranks: dict[int, dict[str, Any]],
    write_tensors: Callable[[Path], None],
    say: Callable[[str], None],
) -> Path:
    """Writes a point; it gets its name when everything is on the disk.

    Args:
        root: folder of the points.
        values: what ``point.json`` will hold, beside serial, format and sizes.
        ranks: what each process needs for itself.
        write_tensors: puts the tensor files into the folder it is given.
        say: logs a line.

    Raises:
        OSError: the disk is full, or does not take it; earlier points are untouched.
    """
    destination = root / f"step-{values['position']['steps']}"
    serial = 1 + max((point.serial for point in points_in(root)), default=0)
    root.mkdir(parents=True, exist_ok=True)
    with whole_folder(destination, say) as folder:
        folder.mkdir()
        write_tensors(folder)
        for rank, own in ranks.items():
            _write_json(folder / rank_file(rank), own)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        _write_json(folder / MANIFEST, {"format": FORMAT, "serial": serial, **values, "files": sizes})
    return destination


def _write_json(path: Path, values: dict[str, Any]) -> None:
    try:
        text = json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise StateError(f"resume point: {path.name} would hold what JSON cannot ({error}).") from error
    path.write_text(text, encoding="utf-8")


def remove_older(root: Path, keep: int, say: Callable[[str], None]) -> None:
    """Deletes whole points beyond the ``keep`` saved last; nothing else is touched."""
    for point in points_in(root)[keep:]:
        # Under a name that says so: half deleted, it is no point any more.
        rubbish = point.folder.with_name(f"{point.folder.name}.incomplete-{os.getpid()}")
        try:
            if point.folder.is_symlink():  # where it leads to is not ours
                point.folder.unlink()
                continue
            os.replace(point.folder, rubbish)
            shutil.rmtree(rubbish)
        except OSError as error:
            say(f"could not remove the older resume point {point.folder.name}: {error.strerror or error}")
