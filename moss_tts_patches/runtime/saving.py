"""A checkpoint folder that is either whole or not there, whenever the process is killed.

Upstream writes a checkpoint file by file into the folder that bears its final name; a kill in between leaves half a
checkpoint that looks like one. Here it is written into a sibling folder, flushed to the disk, and only then renamed. In
the folder of the checkpoint NAME the process PID may leave behind:

* ``NAME.incomplete-PID``: not a checkpoint, to be deleted;
* ``NAME.replaced-PID``: the whole checkpoint that stood at NAME while a newer one takes its place. If nothing stands at
  NAME, the newer one is whole too, in ``NAME.incomplete-PID``: the old one is moved aside only then.

The next save, and the next start of a training with that output folder, finish what was interrupted.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # comes with accelerate

from ..errors import EnvironmentProblem, SeamError

_INCOMPLETE, _REPLACED = "incomplete", "replaced"
_LEFT_BEHIND = re.compile(r"(?P<name>.+)\.(?P<kind>incomplete|replaced)-(?P<pid>\d{1,19})", re.DOTALL)

# Weights of an older save, in one file or several: transformers would have overwritten or removed them. And the files
# of an adapter: where they stand beside a whole model's, transformers loads the adapter's base instead of that model.
_WEIGHTS = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|adapter_model\.(safetensors|bin)|adapter_config\.json|lowmem\.json"
)


def _ignore(line: str) -> None:
    pass


def check_texts(values: Mapping[str, Any]) -> None:
    """Checks that what every checkpoint notes about its training can be written.

    Upstream's ``save_checkpoint`` and resume points write arguments as UTF-8, and would end the run hours from now.

    Args:
        values: arguments and settings, by name.

    Raises:
        EnvironmentProblem: a path has bytes that are not UTF-8, as folders from a GBK archive have.
    """
    for name, value in values.items():
        text = str(value)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            shown = text.encode("utf-8", "backslashreplace").decode()
            raise EnvironmentProblem(
                f"{name}={shown}: found bytes that are not UTF-8, and no checkpoint could note that name. Rename the "
                "file or folder, for example with convmv -f gbk -t utf-8."
            ) from None


@contextmanager
def whole_folder(destination: Path, say: Callable[[str], None] = _ignore) -> Iterator[Path]:
    """Lends a folder to write into, and puts it at ``destination`` when the block ends without an error.

    A folder that stands there already is replaced as a whole, which needs disk space for both; files in it that the new
    one does not have and that are no weights are taken over, as they survive upstream's own saving.

    Args:
        destination: the checkpoint's folder; where it is a link, its target is replaced and the link stays.
        say: gets a line for each thing that an earlier run left behind.

    Yields:
        A sibling folder that does not exist yet.

    Raises:
        EnvironmentProblem: something else than a folder stands at ``destination``, or the new folder, which is whole
            then, could not be given its name.
    """
    destination = Path(os.path.realpath(destination))
    if destination.exists() and not destination.is_dir():
        raise EnvironmentProblem(
            f"checkpoint {destination}: found a file, expected a folder or nothing. Move it away, or choose another "
            "output folder."
        )
    finish_interrupted_saves(destination.parent, say)
    fresh = _sibling(destination, _INCOMPLETE, os.getpid())
    try:
        yield fresh
        if destination.exists():
            _take_over_other_files(destination, fresh)
        _flush(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    try:
        _publish(fresh, destination, os.getpid())
    except OSError as error:
        raise EnvironmentProblem(
            f"checkpoint {destination.name}: it is whole, but stands in {fresh}, because it could not be renamed "
            f"({error.strerror or error}). Rename it by hand before the next training with this output folder, which "
            "would delete it."
        ) from error
    try:
        _remove_replaced(destination, os.getpid())
    except OSError as error:
        say(f"could not remove the checkpoint that {destination.name} replaced: {error.strerror or error}")


def name_in_the_end(folder: Path) -> str:
    """Returns the name that a folder lent by :func:`whole_folder` will have."""
    match = _LEFT_BEHIND.fullmatch(folder.name)
    return match["name"] if match else folder.name


def saving_whole(
    save: Callable[..., Any],
    say: Callable[[str], None] = _ignore,
    saved: Callable[[Path], None] = lambda checkpoint: None,
) -> Callable[..., Any]:
    """Wraps a trainer's ``save_checkpoint`` so that its ``output_dir`` appears as a whole.

    Every process calls it with the same folder, which the main one makes and renames.

    Args:
        save: takes ``accelerator`` and ``output_dir`` among its arguments.
        say: see :func:`whole_folder`.
        saved: is given the checkpoint's folder once it is whole, by the main process.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        call = signature.bind(*args, **options)
        accelerator = call.arguments["accelerator"]
        accelerator.wait_for_everyone()
        destination = Path(call.arguments["output_dir"])
        with _folder_of_all(destination, accelerator, say) as folder:
            call.arguments["output_dir"] = folder
            result = save(*call.args, **call.kwargs)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process and not folder.is_dir():
                raise SeamError(
                    "seam sft.py.save_checkpoint: it did not write into the output_dir that it was given. Upgrade "
                    "moss_tts_patches, or train with MOSS_LOWMEM=0."
                )
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            saved(destination)
        return result

    return save_checkpoint


def written_once(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's ``save_pretrained`` so that the main process alone writes the weights.

    Source: transformers 5.0 ``modeling_utils.py``, ``PreTrainedModel.save_pretrained``: ``is_main_process`` decides who
    writes the config, while every process writes the weights that it was given, into one file. Under ZeRO-3, where
    accelerate gathers them on the main process alone, the others have empty ones, and the last to write wins.

    Args:
        save_pretrained: of a model; gets ``is_main_process`` by name or as its second argument, as in transformers.
    """

    @functools.wraps(save_pretrained)
    def save(save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> Any:
        return save_pretrained(save_directory, True, *args, **options) if is_main_process else None

    return save


@contextmanager
def _folder_of_all(destination: Path, accelerator: Any, say: Callable[[str], None]) -> Iterator[Path]:
    """:func:`whole_folder` of the main process; the others are told its name once what was left behind is cleared."""
    if accelerator.is_main_process:
        with whole_folder(destination, say) as folder:
            _name_of_main_process(accelerator, folder.name)
            yield folder
        return
    folder = Path(os.path.realpath(destination)).with_name(_name_of_main_process(accelerator, ""))
    yield folder
    if accelerator.is_local_main_process:
        # A trainer may make the folder in every process; on a machine that does not share the disk it stays empty.
        with suppress(OSError):
            folder.rmdir()


def _name_of_main_process(accelerator: Any, name: str) -> str:
    """Gives the main process's ``name`` to all of them."""
    if accelerator.num_processes == 1:
        return name
    from accelerate.utils import broadcast_object_list

    return str(broadcast_object_list([name])[0])


def finish_interrupted_saves(folder: Path, say: Callable[[str], None] = _ignore) -> None:
    """Completes or removes what saves into ``folder`` left behind when their process was killed.

    Only directories that carry our own names are touched, and only if no process with their number is alive. This
    process's own number counts as dead: it is called when nothing is being saved, and in containers numbers recur.
    """
    for name, kind, process in _left_behind(folder):
        try:
            line = _finish(folder / name, kind, process)
        except OSError as error:  # no reason to stop a training, least of all at its end
            line = f"could not finish or remove {name}.{kind}-{process}: {error.strerror or error}"
        if line:
            say(line)


def _finish(destination: Path, kind: str, process: int) -> str | None:
    """Deals with one leftover; returns what to say about it."""
    fresh, old = _sibling(destination, _INCOMPLETE, process), _sibling(destination, _REPLACED, process)
    if kind == _INCOMPLETE:
        if not fresh.is_dir():  # finished with the older checkpoint that it replaces
            return None
        shutil.rmtree(fresh)
        return f"removed={fresh.name}: half a checkpoint, or the rest of a deleted one, of a run that was killed"
    interrupted = not os.path.lexists(destination)
    if interrupted:
        os.replace(fresh if fresh.is_dir() else old, destination)
    _remove_replaced(destination, process)
    return f"finished={destination.name}: a run was killed while it replaced this checkpoint; it is whole"


def _left_behind(folder: Path) -> list[tuple[str, str, int]]:
    """Returns name, kind and process number of each directory that a dead process left, replaced ones first."""
    found = []
    for entry in os.scandir(folder) if folder.is_dir() else ():
        match = _LEFT_BEHIND.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            process = int(match["pid"])
            if process == os.getpid() or not _is_alive(process):
                found.append((match["name"], match["kind"], process))
    return sorted(found, key=lambda leftover: leftover[1] != _REPLACED)


def _sibling(destination: Path, kind: str, process: int) -> Path:
    return destination.with_name(f"{destination.name}.{kind}-{process}")


def _is_alive(process: int) -> bool:
    try:
        # A zombie holds its number until its parent asks for its status; it writes nothing any more.
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, OverflowError):
        return False
    except psutil.Error:  # another user's: alive
        return True


def _take_over_other_files(old: Path, fresh: Path) -> None:
    """Links, or copies, what only ``old`` has; ``old`` stays as it is, since this may be interrupted."""
    for entry in os.scandir(old):
        target = fresh / entry.name
        if os.path.lexists(target) or _WEIGHTS.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, target, symlinks=True, copy_function=_link_or_copy)
        elif entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))
        else:
            _link_or_copy(entry.path, target)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _publish(fresh: Path, destination: Path, process: int) -> None:
    """Renames ``fresh`` to ``destination``; at no moment is there less than one whole checkpoint."""
    if os.path.lexists(destination):
        os.replace(destination, _sibling(destination, _REPLACED, process))
    os.replace(fresh, destination)
    _flush_directory(destination.parent)


def _remove_replaced(destination: Path, process: int) -> None:
    """Deletes the older checkpoint under a name that says so: half deleted it is no checkpoint any more."""
    old, rubbish = (_sibling(destination, kind, process) for kind in (_REPLACED, _INCOMPLETE))
    if rubbish.is_dir():
        shutil.rmtree(rubbish)
    if old.is_dir():
        os.replace(old, rubbish)
        shutil.rmtree(rubbish)


def _flush(folder: Path) -> None:
    """Returns when everything in ``folder`` is on the disk; a rename may otherwise get there before the data."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                _flush_file(path)
        _flush_directory(Path(parent))


def _flush_file(path: str) -> None:
    # Windows flushes only what is open for writing; elsewhere a file copied from a cache may be read-only.
    descriptor = os.open(path, os.O_RDWR | os.O_BINARY if os.name == "nt" else os.O_RDONLY)  # type: ignore[attr-defined]
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_directory(path: Path) -> None:
    if os.name == "nt":  # a directory cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems flush no directories
            raise
    finally:
        os.close(descriptor)
