"""Puts the check in the place of the trainer's own reading of its records, which it does in the same pass."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import DataError, SeamError
from .check import Counter, RecordCheck, make_counter, reading_bar
from .files import files_of_rank, find_files, parse, read_lines
from .pool import examiners, workers_for
from .processors import model_config, training_processor
from .report import DataReport, listed, skipped_values
from .rules import RecordRules

SKIPPED = "skipped_records.jsonl"

INEXACT = (
    "data: MOSS_LOWMEM_MAX_POSITIONS={} needs exact positions, and this trainer's prompts cannot be counted. Unset it, "
    "or use the upstream commit named in the README."
)

#: What a trainer's ``load_jsonl_for_rank`` returns: all files, records of the process, its files, whether pre-sharded.
Loaded = tuple[list[Path], list[dict[str, Any]], list[Path], bool]


@dataclass(frozen=True)
class DataOptions:
    """What a user chose.

    Attributes:
        bad_records: ``stop`` the run with a list, or ``skip`` them.
        max_positions: records with more are left out; None allows all.
        corrects_prompt_length: see :meth:`.rules.RecordRules.with_prompt_length`.
    """

    bad_records: Literal["stop", "skip"] = "stop"
    max_positions: int | None = None
    corrects_prompt_length: bool = True


@dataclass(frozen=True)
class CheckedData:
    """The records of a process and what is known of them; ``report.positions`` is in the order of ``loaded[1]``."""

    loaded: Loaded
    report: DataReport


def counting(
    trainer: dict[str, Any], arguments: Any, record_rules: Callable[[Any], RecordRules]
) -> tuple[RecordRules, Counter, str | None]:
    """Returns a trainer's rules and what counts its positions; the last is why they are only upper bounds, or None.

    Args:
        trainer: the trainer's namespace.
        arguments: its parsed command line.
        record_rules: the family's, from a model's config.

    Raises:
        DataError: ``--n-vq`` is not the model's number of codebooks.
        SeamError: the trainer builds its processor in another way than this version knows.
    """
    processor = training_processor(trainer, arguments)
    rules = record_rules(model_config(processor, arguments.model_path))
    wanted = getattr(arguments, "n_vq", None)
    # The speech trainers compare it with every record, but only once a batch is made; records are the model's width.
    if rules.layout == "speech" and wanted not in (None, rules.codebooks):
        raise DataError(
            f"data: --n-vq {wanted}, but the model {arguments.model_path} has {rules.codebooks} codebooks (n_vq in its "
            "config.json), and so must the records have. Leave --n-vq out of TRAIN_EXTRA_ARGS_STR, or prepare "
            f"the data and train with --n-vq {rules.codebooks}."
        )
    try:
        return rules, make_counter(rules, processor), None
    except Exception as error:  # a processor that is built otherwise inside; training itself is not at risk
        return rules, make_counter(rules, None), f"{type(error).__name__}: {error}"


def load_checked(
    upstream: Callable[..., Loaded],
    spec: str,
    processes: int,
    rank: int,
    *,
    rules: RecordRules,
    counter: Counter,
    options: DataOptions,
    output_folder: Path,
    say: Callable[[str], None],
) -> CheckedData:
    """Reads a process's records as the trainer's ``load_jsonl_for_rank`` does, and leaves out what cannot be trained.

    No random number is drawn, and the records that stay keep their order. It replaces the trainer's own reading and
    takes about as long (with orjson 0.8 times for 300 frames of 32 codes, 1.5 times for 100 frames of 12).

    Args:
        upstream: the trainer's function; it is compared with ours on a few lines first.
        spec: ``--train-jsonl``.
        processes: how many there are.
        rank: which one this is.
        rules: the family's.
        counter: see :func:`.check.make_counter`.
        options: what the user chose.
        output_folder: gets ``skipped_records.jsonl`` if a record is left out.
        say: logs a line.

    Raises:
        DataError: no file, a faulty record (unless they are skipped), or no record left.
        SeamError: the trainer's function reads records in another way.
    """
    if options.max_positions is not None and not counter.exact:
        raise DataError(INEXACT.format(options.max_positions))
    compare_loaders(upstream)
    files = find_files(spec)
    own, sharded = files_of_rank(files, processes, rank)
    workers = workers_for(own, processes)
    with (
        no_garbage_collection(),
        examiners(rules, keeps_records=True, workers=workers) as examine,
        reading_bar(own, shown=rank == 0) as advance,
    ):
        check = RecordCheck(counter, examine, options.max_positions)
        records = [record for path in own for record in check.read(path, advance)]
    report = check.finish()
    suffix = f".rank{rank:05d}-of-{processes:05d}" if sharded else ""
    if sharded or rank == 0:
        _report(report, options, output_folder, suffix, say)
    _refuse(report, options, spec)
    return CheckedData((files, records, own, sharded), report)


def _report(
    report: DataReport, options: DataOptions, output_folder: Path, suffix: str, say: Callable[[str], None]
) -> None:
    for line in report.summary():
        say(line)
    if report.faults and options.bad_records == "stop":
        return
    if report.faults:
        say("data skipped: " + report.fault_list())
    if report.too_long:
        say("\n".join([f"data left out, too long: {len(report.too_long)} records", *listed(report.too_long)]))
    path = output_folder / SKIPPED.replace(".jsonl", f"{suffix}.jsonl")
    write_skipped(report, path)
    if report.faults or report.too_long:
        say(f"data skipped_records={path}")


def _refuse(report: DataReport, options: DataOptions, spec: str) -> None:
    if report.faults and options.bad_records == "stop":
        raise DataError(
            f"data: {report.fault_list()}\nRepair or remove them, or set MOSS_LOWMEM_BAD_RECORDS=skip to train without "
            "them."
        )
    if not report.kept:
        raise DataError(
            f"data: none of the {report.records} records of {spec} can be trained on: {len(report.faults)} faulty, "
            f"{len(report.too_long)} too long. Check the file, and MOSS_LOWMEM_MAX_POSITIONS."
        )


def write_skipped(report: DataReport, path: Path) -> None:
    """Writes one line a record that was left out; removes the list of an earlier run where there is none."""
    entries = skipped_values(report)
    if not entries:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.incomplete")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    os.replace(unfinished, path)


def compare_loaders(upstream: Callable[..., Loaded]) -> None:
    """Checks, in milliseconds, that the trainer's own reading is the one that is replaced.

    Raises:
        SeamError: it takes other arguments, or gets other files or records from the same folder.
    """
    expected = ["spec", "world_size", "rank"]
    found = list(inspect.signature(upstream).parameters)
    if found != expected:
        raise SeamError(
            f"seam sft.py.load_jsonl_for_rank: its parameters are {', '.join(found)}; expected {', '.join(expected)}. "
            "Upgrade moss_tts_patches, or train with MOSS_LOWMEM=0."
        )
    with tempfile.TemporaryDirectory(prefix="moss_lowmem_") as name:
        folder = Path(name)
        for shard in range(2):
            text = f'{{"id": "{shard}", "text": "a\u2028b"}}\n\n{{"audio_codes": [[1, 2], [3, 4]], "x": 1.5}}\n'
            (folder / f"a.rank{shard:05d}-of-00002.jsonl").write_text(text, encoding="utf-8")
        for spec, processes, rank in ((name, 1, 0), (f"{name}/*.jsonl", 2, 1)):
            if _plain(upstream(spec, processes, rank)) != _plain(_read_unchecked(spec, processes, rank)):
                raise SeamError(
                    "seam sft.py.load_jsonl_for_rank: it reads other records than expected from the same files. "
                    "Upgrade moss_tts_patches, or train with MOSS_LOWMEM=0."
                )


def _read_unchecked(spec: str, processes: int, rank: int) -> Loaded:
    files = find_files(spec)
    own, sharded = files_of_rank(files, processes, rank)
    return files, [parse(line) for path in own for _, line in read_lines(path)], own, sharded


def _plain(loaded: Loaded) -> tuple[Any, ...]:
    files, records, own, sharded = loaded
    return [str(path) for path in files], records, [str(path) for path in own], sharded


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Records are millions of lists without cycles; the collector would walk over them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
