"""Figures of every rung from a few short simulations instead of one full simulation each.

A full simulation takes 15 to 70 s, and a ladder has thirty rungs. Three facts make most of that unnecessary, and
tests compare every one of them with the full simulation:

* backbone layers are alike: bytes and FLOPs are linear in their number, phase by phase (2 and 4 layers are simulated);
* chunks of frames are alike (:mod:`.few_chunks`);
* where optimizer states stand, and whether idle weights are parked, only moves bytes that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from ..families.family import Family
from .engine_needs import ModelParts, engine_figures
from .figures import RungFigures
from .footprint import Footprint
from .methods import Shape, find_shape
from .model_sizes import build_on_meta, measure_model, measure_parts
from .plan_cache import PlanCache
from .rungs import AnyRung, EngineRung, MicroBatch, Rung, UpstreamRung, describe
from .simulate import simulate_rung, simulate_update, simulate_upstream
from .trace import PHASES, Trace, added, difference, flatten, footprint_of, trained_dtype_name

# The least that has a first, a last and a middle, and a step of two to measure the difference with.
FEW_LAYERS, MORE_LAYERS = 2, 4

# Two pieces of optimizer states (2**24 elements each): a larger parameter is gone through piece by piece.
MOST_ELEMENTS = 2**25


@dataclass(frozen=True)
class Subject:
    """What is planned for.

    Attributes:
        family: of the model.
        model_class: upstream's class.
        config: of the model.
        batch: shape of the micro-batch.
        upstream: options of :func:`.simulate.simulate_upstream` where the trainer does the model's work.
        shapes: what a method does to the model, by name.
        identity: changes when the class's source changes, for the cache.
    """

    family: Family
    model_class: Any
    config: Any
    batch: MicroBatch
    upstream: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    identity: str = ""


@dataclass(frozen=True)
class FullTraining:
    """What full training needs between steps: bytes, and elements of the trained parameters."""

    weights: float
    gradients: float
    elements: float
    layer_weights: float


class Tracer:
    """Simulates what is asked for, once.

    Args:
        subject: what is planned for.
        cache: keeps traces beyond this process; None keeps them in memory only.
        simulated: called after every simulation that had to be run.
    """

    def __init__(
        self, subject: Subject, cache: PlanCache | None = None, simulated: Callable[[], None] = lambda: None
    ) -> None:
        self.subject = subject
        self._cache = cache
        self._simulated = simulated
        self._traces: dict[str, Trace] = {}
        self._content = _content(subject)
        self._sizes = self._measured("model", measure_model)
        self._layers = int(self._sizes["layers"])

    def has_depth(self) -> bool:
        """Whether there is a depth model, without which ``fused`` is ``staged``."""
        return bool(self._sizes["depth"])

    def full_training(self) -> FullTraining:
        """What full training needs between steps, without a simulation."""
        names = (field.name for field in fields(FullTraining))
        return FullTraining(**{name: self._sizes[name] for name in names})

    def parts(self, rung: Rung | UpstreamRung, *, parks: bool) -> ModelParts:
        """Numbers of weights, for engines that split them.

        Args:
            rung: whose method says what is trained.
            parks: an embedding that training never reads stays in host memory.
        """
        shape = self._measured("parts", measure_parts)
        if isinstance(rung, UpstreamRung) or rung.method == "full":
            added, trained = 0.0, shape["total"] - shape["unread"]
        else:
            added = trained = self._whole(_base(rung))["standing.trained_elements"]
        total = shape["total"] + added - (shape["unread"] if parks else 0)
        return ModelParts(total, trained, shape["unit"], shape["root"] + added, shape["largest"])

    def working(self, rung: Rung | UpstreamRung) -> float:
        """Bytes that forward and backward take beside weights, gradients and states."""
        trace = self._whole(rung if isinstance(rung, UpstreamRung) else _base(rung))
        peaks = [footprint_of(trace, phase, "peak").device_bytes for phase in ("forward", "backward")]
        return max(peaks) - footprint_of(trace, "forward", "start").device_bytes

    def gradient_bytes(self, rung: Rung | UpstreamRung) -> float:
        """Of all trained weights, in their own dtype."""
        trace = self._whole(rung if isinstance(rung, UpstreamRung) else _base(rung))
        return footprint_of(trace, "forward", "start").gradients

    def at(self, batch: MicroBatch) -> Tracer:
        """A tracer for the same model and another micro-batch."""
        return Tracer(replace(self.subject, batch=batch), self._cache, self._simulated)

    def figures(self, rung: AnyRung) -> RungFigures:
        """Returns what a rung needs.

        Raises:
            SettingsError: the rung's method is not registered.
        """
        if isinstance(rung, EngineRung):
            return engine_figures(self, rung)
        return self._upstream_figures(rung) if isinstance(rung, UpstreamRung) else self._our_figures(rung)

    # -- our rungs -----------------------------------------------------------------------------------------------

    def _our_figures(self, rung: Rung) -> RungFigures:
        base = _base(rung)
        if rung.schedule not in ("fused", "staged"):
            trace = self._whole(base)
        else:
            # What the loss takes does not depend on the backbone's depth or on what it stores, and the backbone's
            # share does not depend on the loss's schedule.
            stored, plain = replace(base, schedule="staged"), replace(base, checkpointing=True)
            trace = self._trace(plain, FEW_LAYERS)
            common = self._trace(replace(stored, checkpointing=True), FEW_LAYERS)
            trace = added(trace, difference(self._whole(stored), common))
        return self._placed(rung, trace)

    def _whole(self, rung: Rung | UpstreamRung) -> Trace:
        """The trace with all layers."""
        few, more = min(FEW_LAYERS, self._layers), min(MORE_LAYERS, self._layers)
        low = self._trace(rung, few)
        if more == few:
            return low
        high = self._trace(rung, more)
        share = (self._layers - few) / (more - few)
        return {name: low[name] + share * (high[name] - low[name]) for name in low}

    def _placed(self, rung: Rung, trace: Trace) -> RungFigures:
        """Moves states, gradients and idle weights to where the rung keeps them."""
        peaks = {phase: footprint_of(trace, phase, "peak") for phase in PHASES if f"{phase}.peak.weights" in trace}
        update = self._update(rung, trace)
        start = footprint_of(trace, "step", "start")
        peaks["step"] = replace(start, largest_temporary=start.largest_temporary + update)
        host = trace["host_bytes"] - trace["standing.host_states"]
        if rung.gradients == "host":
            host -= 4 * trace["standing.trained_elements"]
        if rung.states == "device":
            states = Footprint(states=trace["standing.device_states"])
            peaks = {phase: peak + states for phase, peak in peaks.items()}
        else:
            host += trace["standing.host_states"]
        if rung.weights == "host":
            parked = Footprint(weights=trace["standing.layer_weights"])
            peaks["loss"] = peaks["loss"] - parked
            host += trace["standing.layer_weights"]
        phase = max(peaks, key=lambda name: peaks[name].device_bytes)
        return RungFigures(
            rung=rung,
            phase=phase,
            categories=peaks[phase],
            host_bytes=host,
            host_gradient_elements=trace["standing.trained_elements"] if rung.gradients == "host" else 0,
            matmul_flops=trace["matmul_flops"],
            attention_flops=trace["attention_flops"],
            gradient_bytes=trace["standing.gradient_bytes"],
            state_bytes=trace["standing.host_states"],
            layer_weight_bytes=trace["standing.layer_weights"],
            model_bytes=start.weights,
        )

    def _update(self, rung: Rung, trace: Trace) -> int:
        """Temporaries of the optimizer step: those of the largest parameter, with all gradients still there."""
        sizes = (trace["standing.largest_trained"], trace["standing.after_largest"])
        most = (min(int(sizes[0]), MOST_ELEMENTS), min(int(sizes[1]), MOST_ELEMENTS))
        dtype = trained_dtype_name(trace)
        request = {
            "update": [rung.optimizer, rung.gradients, rung.states, rung.host_gradient_dtype],
            "elements": most,
            "dtype": dtype,
        }

        def simulate() -> Trace:
            arguments = (rung.optimizer, rung.gradients, rung.states, rung.host_gradient_dtype)
            return {"bytes": simulate_update(*arguments, most, getattr(torch, dtype))}

        return int(self._remembered(request, simulate)["bytes"])

    # -- upstream ------------------------------------------------------------------------------------------------

    def _upstream_figures(self, rung: UpstreamRung) -> RungFigures:
        trace = self._whole(rung)
        peaks = {phase: footprint_of(trace, phase, "peak") for phase in PHASES if f"{phase}.peak.weights" in trace}
        phase = max(peaks, key=lambda name: peaks[name].device_bytes)
        return RungFigures(
            rung=rung,
            phase=phase,
            categories=peaks[phase],
            host_bytes=0,
            matmul_flops=trace["matmul_flops"],
            attention_flops=trace["attention_flops"],
            model_bytes=peaks[phase].weights,
        )

    # -- simulations ---------------------------------------------------------------------------------------------

    def _trace(self, rung: Rung | UpstreamRung, layers: int) -> Trace:
        layers = min(layers, self._layers)
        shape = find_shape(self.subject.shapes, rung.method) if isinstance(rung, Rung) else None
        request = {"rung": describe(rung), "layers": layers, "shape": shape.identity if shape else ""}
        return self._remembered(request, lambda: self._simulate(rung, layers, shape))

    def _simulate(self, rung: Rung | UpstreamRung, layers: int, shape: Shape | None) -> Trace:
        subject = self.subject
        arguments = (subject.family, subject.model_class, subject.config, subject.batch)
        if isinstance(rung, Rung):
            shape_model = None if shape is None else shape.shape_model
            return flatten(simulate_rung(*arguments, rung, shape_model, layers=layers, step=False, every_chunk=False))
        return flatten(
            simulate_upstream(*arguments, checkpointing=rung.checkpointing, layers=layers, **subject.upstream)
        )

    def _measured(self, name: str, measure: Callable[[Family, Any], Trace]) -> Trace:
        """Looks at the whole model."""
        subject = self.subject

        def look() -> Trace:
            return measure(subject.family, build_on_meta(subject.model_class, subject.config))

        return self._remembered({"probe": name}, look, counts=False)

    def _remembered(self, request: Mapping[str, Any], simulate: Callable[[], Trace], *, counts: bool = True) -> Trace:
        key = PlanCache.key({**self._content, **request})
        if key not in self._traces:
            found = None if self._cache is None else self._cache.read(key)
            if found is None:
                found = simulate()
                if self._cache is not None:
                    self._cache.write(key, found)
                if counts:
                    self._simulated()
            self._traces[key] = found
        return self._traces[key]


def _base(rung: Rung) -> Rung:
    """What is simulated for a rung: where states and idle weights stand only moves bytes that are known."""
    return replace(rung, states="host", weights="device", host_gradient_dtype="float32")


def _content(subject: Subject) -> dict[str, Any]:
    config = subject.config
    return {
        "family": subject.family.name,
        "class": subject.identity or subject.model_class.__qualname__,
        "config": config.to_dict() if hasattr(config, "to_dict") else repr(config),
        "batch": asdict(subject.batch),
    }
