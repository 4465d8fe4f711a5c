"""Host memory: what is there, what the container allows, whether it can be page-locked, and what WSL2 hides."""

from __future__ import annotations

from collections.abc import Iterator

from ..messages import Messages, gib
from .facts import Facts
from .finding import Finding, finding

# Loading the smallest model (4 GiB of weights) passes through host memory, whatever the plan.
_LITTLE_BYTES = 4 * 2**30

# Swapping has begun in earnest where more than half of the swap is taken.
_SWAP_SHARE = 0.5


def check_host(facts: Facts, say: Messages) -> Iterator[Finding]:
    """Yields what was found about host memory."""
    yield _memory(facts, say)
    yield from _swap(facts, say)
    if facts.probe_pinned is not None:
        problem = facts.probe_pinned()
        if problem is None:
            yield finding(say, "pinned", "ok", "pinned")
        else:
            yield finding(say, "pinned", "warning", "not_pinned", reason=problem)
    if facts.wsl:
        yield finding(say, "wsl", "warning", "wsl", ram=gib(facts.host.total_bytes))


def _memory(facts: Facts, say: Messages) -> Finding:
    host = facts.host
    values = {"free": gib(host.free_bytes), "limit": gib(host.limit_bytes), "total": gib(host.total_bytes)}
    wanted = facts.host_bytes_wanted
    if not host.total_bytes:
        return finding(say, "ram", "note", "ram_unknown")
    contained = host.cgroup is not None and host.cgroup.limit_bytes < host.total_bytes
    if wanted is not None and wanted > host.free_bytes:
        name = "cgroup_short" if contained else "ram_short"
        return finding(say, "ram", "error", name, **values, wanted=gib(wanted), group=_group(facts))
    if host.free_bytes < _LITTLE_BYTES:
        return finding(say, "ram", "warning", "ram_little", **values)
    if contained:
        return finding(say, "ram", "note", "cgroup", **values, group=_group(facts))
    return finding(say, "ram", "ok", "ram", **values)


def _group(facts: Facts) -> str:
    return facts.host.cgroup.folder if facts.host.cgroup is not None else ""


def _swap(facts: Facts, say: Messages) -> Iterator[Finding]:
    host = facts.host
    used = host.swap_total_bytes - host.swap_free_bytes
    if host.swap_total_bytes and used > _SWAP_SHARE * host.swap_total_bytes:
        yield finding(say, "swap", "warning", "swapping", used=gib(used), total=gib(host.swap_total_bytes))
