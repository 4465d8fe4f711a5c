"""The part of a page of figures that ``benchmarks/resume.py`` measures."""

from __future__ import annotations

from typing import Any

from moss_tts_patches.units import GIB, MIB


def resume_section(results: dict[str, Any]) -> str:
    """Returns Markdown of ``results/resume.json``."""
    parts = [
        f"{results['usable_cores']} cores of {results['machine']['cpu']}.",
        _check(results["check"]),
        _points(results["sizes"], results["save"]),
        _replay(results["replay"], results["kills"]),
    ]
    return "\n\n".join(parts)


def _check(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Data check, records a second by the clock, and a CPU second of the process that asked (where there are "
        "several, the rest of the work is in the others). Several are used from 128 MiB of records on; these files are "
        "smaller, so that rows with 2 processes show what starting them costs, and what is left for the first:",
        "",
        "| Record | Positions | For | Processes | Records/s | Per CPU second |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['frames']} frames × {row['codebooks']} codes | "
            f"{'exact' if row['exact_positions'] else 'bounds'} | "
            f"{'training' if row['keeps_records'] else 'check-data'} | {row['workers']} | "
            f"{row['records_a_second']:,} | {row['records_a_cpu_second_of_this_process']:,} |"
        )
    return "\n".join(lines)


def _points(rows: list[dict[str, Any]], save: dict[str, Any]) -> str:
    lines = ["| Resume point | Trained weights | 8-bit states | Together |", "|---|---:|---:|---:|"]
    for row in rows:
        weights, states = row["weight_bytes"], row["state_bytes"]
        lines.append(
            f"| {row['family']} {row['size']}, {row['method']} | {_size(weights)} | {_size(states)} | "
            f"{_size(weights + states)} |"
        )
    rate, disk = (save["bytes"] / save[name] / MIB for name in ("seconds", "disk_seconds"))
    lines += [
        "",
        f"Bytes are counted on models without values. A point of {_size(save['bytes'])} was written in "
        f"{save['seconds']:.1f} s ({rate:.0f} MiB/s, {save['cpu_seconds']:.1f} s of CPU); the same disk took "
        f"as many bytes of a plain file at {disk:.0f} MiB/s.",
    ]
    return "\n".join(lines)


def _replay(replay: dict[str, Any], kills: dict[str, int]) -> str:
    return (
        f"Replay: {replay['micro_batches_a_cpu_second']:,} micro-batches a CPU second, through the miniature's "
        f"whole loop ({replay['micro_batches']:,} of them).\n\n"
        f"{kills['kills']} writers killed with SIGKILL, {kills['in_the_middle_of_a_save']} with a save under way: "
        f"{kills['resumable']} times there was a whole point to go on from, {kills['before_the_first_save_was_done']} "
        "times none had been finished yet, and no torn one was taken for whole."
    )


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 2 else f"{count / MIB:.0f} MiB"
