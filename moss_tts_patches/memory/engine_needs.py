"""What a training over several processes needs on each GPU, engine by engine.

Activations and the loss come from the simulation of one process with the schedule that the engine uses; what the engine
keeps is arithmetic on the numbers of weights. ``tests/test_engine_bytes.py`` holds each of these formulas against the
bytes that the engine really has on two and four processes.

In what follows, with 16-bit weights: N trained weights, T all weights, P processes. DeepSpeed and FSDP (under mixed
precision) keep weights and both moments in float32, 12 bytes a trained weight, split between the processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .figures import RungFigures
from .footprint import Footprint
from .rungs import EngineRung, Rung, UpstreamRung

if TYPE_CHECKING:
    from .traces import Tracer

#: Elements of the buffer through which ZeRO reduces gradients. Source: deepspeed ``runtime/zero/config.py``,
#: ``reduce_bucket_size``; accelerate leaves it alone.
REDUCE_BUCKET = 500_000_000

#: Elements of weights that ZeRO-3 keeps whole because they will be used again soon, and that it fetches ahead. Source:
#: the same file, ``max_live_parameters`` and ``prefetch_bucket_size``.
MOST_LIVE, PREFETCH_BUCKET = 1_000_000_000, 50_000_000

#: Elements that ZeRO-3 steps at once. Source: the same file, ``sub_group_size``.
SUB_GROUP = 1_000_000_000

#: A checkpoint's file is read whole by every process while ZeRO-3 takes it apart: huggingface's default limit.
LARGEST_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ModelParts:
    """Numbers of weights.

    Attributes:
        total: all that the engine has.
        trained: those with gradients.
        unit: the largest layer that FSDP wraps.
        root: all outside such layers.
        largest: the largest single tensor.
    """

    total: float
    trained: float
    unit: float
    root: float
    largest: float


@dataclass(frozen=True)
class EngineBytes:
    """What an engine keeps and takes in one process, the batch's own memory left out.

    Attributes:
        weights: between steps.
        gradients: accumulated ones.
        states: optimizer states, with float32 weights where the engine keeps such.
        buffers: what is there while gradients are exchanged.
        gathered: at most, of weights and their gradients that are whole for a moment of forward and backward.
        step: gradients and temporaries of the optimizer step, where nothing else is but weights and states.
        host: bytes in host memory.
    """

    weights: float
    gradients: float
    states: float
    buffers: float = 0
    gathered: float = 0
    step: float = 0
    host: float = 0


def zero2(parts: ModelParts, processes: int, accumulates: bool, *, offload: bool, bucket: int) -> EngineBytes:
    """ZeRO-2: whole weights everywhere; gradients and states split.

    Sources: deepspeed ``stage_1_and_2.py``, ``estimate_zero2_model_states_mem_needs`` (2 bytes of weights, and split
    2 + 4 of gradients, 4 of weights, 8 of moments) and ``average_gradients``; and what the estimate leaves out: a
    second partition of gradients while one is added to another, the bucket (one: ``overlap_comm`` is off), the square
    root that torch's AdamW makes of all second moments, and under offload copies of gradients and weights in host
    memory (4 + 2 + 2 bytes) and the largest gradient's buffer.
    """
    share = parts.trained / processes
    whole, buffer = 2 * parts.total, 2 * bucket
    if offload:
        host = share * (12 + 4 + 2 + (2 if accumulates else 0))
        return EngineBytes(whole, 2 * share, 0, buffers=buffer + 2 * parts.largest, host=host)
    again = 2 * share if accumulates else 0
    return EngineBytes(whole, 2 * share, 12 * share, buffers=buffer + again, step=8 * share)


def zero3(parts: ModelParts, processes: int, accumulates: bool, *, offload: bool, bucket: int) -> EngineBytes:
    """ZeRO-3: weights, gradients and states split; whole are only weights that are used now or again soon.

    Sources: deepspeed ``stage3.py``, ``estimate_zero3_model_states_mem_needs`` (split 2 of weights, 2 + 4 of gradients,
    12 of states); ``partition_parameters.py``: weights that are fetched together arrive in one buffer and are copied
    out of it. The estimate has no buffers and one layer for all that is whole at a time.
    """
    share = parts.trained / processes
    gathered = 2 * min(parts.total, MOST_LIVE) + 2 * min(parts.total, PREFETCH_BUCKET + parts.largest)
    own, buffer = 2 * parts.total / processes, 2 * bucket
    if offload:
        return EngineBytes(0, 0, 0, buffers=buffer, gathered=gathered, host=own + share * (2 + 12 + 4))
    step = 2 * share + 8 * min(share, SUB_GROUP)
    return EngineBytes(own, 2 * share, 12 * share, buffers=buffer, gathered=gathered, step=step)


def fully_sharded(parts: ModelParts, processes: int, accumulates: bool, *, syncs_always: bool) -> EngineBytes:
    """FSDP under mixed precision: everything split and in float32, one layer and its successor whole in 16 bit.

    What no wrapped layer holds stays whole from the forward to the end of the backward. Without exchanging gradients at
    every micro-batch, they accumulate whole and in 16 bit on every process.

    Sources: torch ``distributed/fsdp/_runtime_utils.py``, ``_post_forward_reshard`` and ``_post_backward_hook``;
    accelerate ``accelerator.py``, ``prepare_model`` (float32) and ``accumulate``.
    """
    share = parts.total / processes
    # Two layers' weights and one layer's gradient beside all of the root's, and the slices in 16 bit that they are of.
    gathered = 2 * (parts.root + 2 * parts.unit) + 2 * (parts.root + parts.unit) + parts.root / processes
    gradients = 4 * share
    if accumulates and not syncs_always:
        gradients = max(gradients, 2 * parts.total)
    return EngineBytes(4 * share, gradients, 8 * share, gathered=gathered, step=8 * share)


def buckets(parts_bytes: float, accumulates: bool, *, views: bool) -> float:
    """DDP's buckets beside the gradients: as large as all of them, and never freed.

    Gradients are views of them where asked for, but those that accumulate without an exchange are tensors of their own.

    Source: torch ``nn/parallel/distributed.py``, ``gradient_as_bucket_view`` and ``no_sync``.
    """
    return 0 if views and not accumulates else parts_bytes


# -- figures -----------------------------------------------------------------------------------------------------------


def engine_figures(tracer: Tracer, rung: EngineRung, accumulation: int = 8) -> RungFigures:
    """Returns what an engine needs on each GPU, and in the memory of a machine that has them all.

    Args:
        tracer: of the model and micro-batch.
        rung: engine, processes and method.
        accumulation: micro-batches an optimizer step.
    """
    inner = _inner(rung)
    accumulates = accumulation > 1
    if rung.engine == "ddp":
        return _data_parallel(tracer, rung, inner, accumulates)
    figures = tracer.figures(inner)
    parts = tracer.parts(inner, parks=rung.engine.startswith("zero2") and not rung.upstream)
    parked = 2 * (tracer.parts(inner, parks=False).total - parts.total)
    needs = _engine_bytes(rung, parts, accumulates)
    working = tracer.working(inner)
    backward = Footprint(
        weights=needs.weights,
        gradients=needs.gradients + needs.buffers,
        states=needs.states,
        activations=working,
        largest_temporary=needs.gathered,
    )
    step = replace(backward, gradients=0, activations=0, largest_temporary=needs.step)
    phase = "backward" if backward.device_bytes >= step.device_bytes else "step"
    return RungFigures(
        rung=rung,
        phase=phase,
        categories=backward if phase == "backward" else step,
        host_bytes=(needs.host + parked) * rung.processes,
        matmul_flops=figures.matmul_flops,
        attention_flops=figures.attention_flops,
        model_bytes=_loading(rung, parts, tracer.subject.family.loads_in_parts),
    )


def _inner(rung: EngineRung) -> Rung | UpstreamRung:
    """One process with the schedule that the engine uses."""
    if rung.upstream:
        return UpstreamRung(rung.upstream == "upstream-checkpointing")
    if rung.engine in ("ddp", "zero2", "zero2-offload"):
        return Rung("autograd", states=rung.states, method=rung.method)
    return Rung("by_module" if rung.method == "full" else "by_module_kept", method=rung.method)


def _data_parallel(tracer: Tracer, rung: EngineRung, inner: Rung | UpstreamRung, accumulates: bool) -> RungFigures:
    figures = tracer.figures(inner)
    extra = 0.0
    if rung.processes > 1:
        extra = buckets(tracer.gradient_bytes(inner), accumulates, views=not rung.upstream)
    return replace(
        figures,
        rung=rung,
        categories=figures.categories + Footprint(gradients=extra),
        host_bytes=figures.host_bytes * rung.processes,
        model_bytes=figures.model_bytes * rung.processes,
    )


def _engine_bytes(rung: EngineRung, parts: ModelParts, accumulates: bool) -> EngineBytes:
    if rung.engine == "fsdp":
        return fully_sharded(parts, rung.processes, accumulates, syncs_always=not rung.upstream)
    stage = zero2 if rung.engine.startswith("zero2") else zero3
    offload = rung.engine.endswith("-offload")
    return stage(parts, rung.processes, accumulates, offload=offload, bucket=REDUCE_BUCKET)


def _loading(rung: EngineRung, parts: ModelParts, in_parts: bool) -> float:
    """Bytes of weights that are in the machine's memory at once while the processes load them."""
    whole = 2 * parts.total
    if rung.engine == "fsdp":
        return whole  # fsdp_cpu_ram_efficient_loading: the first process alone
    if rung.engine.startswith("zero3") and in_parts:
        return rung.processes * min(whole, LARGEST_FILE_BYTES)
    return rung.processes * whole
