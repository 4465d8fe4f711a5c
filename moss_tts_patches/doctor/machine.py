"""Python, torch, driver and GPU: can they train at all, in which precision, and who else is on the card."""

from __future__ import annotations

from collections.abc import Iterator

from ..memory.readings import GpuReading
from ..messages import Messages, gib
from ..units import GIB
from .facts import Facts, TorchFacts
from .finding import Finding, finding

_FIRST_WITH_BF16 = (8, 0)

# A desktop and a browser hold 0.5 to 1 GiB; more than that decides which plan fits.
_OTHERS_BYTES = GIB


def check_machine(facts: Facts, say: Messages) -> Iterator[Finding]:
    """Yields what was found about Python, torch and the GPU."""
    python = ".".join(map(str, facts.python))
    supported = facts.python >= (3, 10)
    yield finding(say, "python", "ok" if supported else "error", "python" if supported else "python_old", found=python)
    if not facts.torch.sees_gpu:
        yield _no_gpu(facts, say)
        return
    yield finding(
        say,
        "torch",
        "ok",
        "torch",
        version=facts.torch.version,
        cuda=facts.torch.cuda,
        driver=facts.gpus[0].driver if facts.gpus else "?",
        gpu=facts.torch.gpu_name,
    )
    yield from _capability(facts.torch, say)
    yield from _video_memory(facts, say)


def _no_gpu(facts: Facts, say: Messages) -> Finding:
    version = facts.torch.version
    if not facts.gpus:
        text = "no_gpu" if facts.gpus is None else "no_gpu_at_all"
        return finding(say, "torch", "warning", text, version=version)
    gpu = facts.gpus[0]
    if facts.torch.cuda is None:
        return finding(say, "torch", "error", "torch_for_cpu", version=version, gpu=gpu.name, driver=gpu.driver)
    return finding(
        say,
        "torch",
        "error",
        "gpu_out_of_reach",
        version=version,
        cuda=facts.torch.cuda,
        gpu=gpu.name,
        driver=gpu.driver,
    )


def _capability(torch: TorchFacts, say: Messages) -> Iterator[Finding]:
    if torch.capability is None:
        return
    found = ".".join(map(str, torch.capability))
    if not has_kernels(torch.capability, torch.architectures):
        built_for = ", ".join(torch.architectures)
        yield finding(
            say,
            "capability",
            "error",
            "no_kernels",
            gpu=torch.gpu_name,
            found=found,
            version=torch.version,
            built_for=built_for,
        )
    has_bf16 = torch.capability >= _FIRST_WITH_BF16
    yield finding(
        say,
        "bf16",
        "ok" if has_bf16 else "warning",
        "bf16" if has_bf16 else "no_bf16",
        gpu=torch.gpu_name,
        found=found,
    )


def has_kernels(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether a torch built for ``architectures`` runs on the GPU; True where torch does not say what it has.

    Source: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility": a binary runs on the same major
    version from its minor version on, PTX on everything from its own version on.
    """
    if not architectures:
        return True
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit() or kind not in ("sm", "compute"):  # AMD's gfx names
            return True
        has = (int(digits[:-1]), int(digits[-1]))
        if has <= capability and (kind == "compute" or has[0] == capability[0]):
            return True
    return False


def _video_memory(facts: Facts, say: Messages) -> Iterator[Finding]:
    torch, wanted = facts.torch, facts.device_bytes_wanted
    free, total = gib(torch.free_bytes), gib(torch.total_bytes)
    others = describe_holders(_same_gpu(facts))
    if wanted is not None and wanted > torch.free_bytes:
        yield finding(say, "vram", "error", "vram_short", free=free, total=total, wanted=gib(wanted), holders=others)
    elif torch.total_bytes - torch.free_bytes > _OTHERS_BYTES:
        yield finding(say, "vram", "warning", "vram_held", free=free, total=total, holders=others)
    else:
        yield finding(say, "vram", "ok", "vram", free=free, total=total)


def _same_gpu(facts: Facts) -> GpuReading | None:
    """The GPU that torch uses, among those that the driver lists: by name, since torch counts in its own order."""
    return next((gpu for gpu in facts.gpus or () if gpu.name == facts.torch.gpu_name), None)


def describe_holders(gpu: GpuReading | None) -> str:
    """Names the processes that hold GPU memory, the largest first; ``?`` where the driver does not tell."""
    if gpu is None or not gpu.processes:
        return "?"
    largest = sorted(gpu.processes, key=lambda process: process.used_bytes or 0, reverse=True)[:5]
    return ", ".join(f"{process.name} (pid {process.pid}, {gib(process.used_bytes)})" for process in largest)
