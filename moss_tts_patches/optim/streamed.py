"""Base of our optimizers: steps one parameter after the other, whatever memory its gradient and states come from.

torch's optimizers want every gradient and every state on the device at once. Here a step asks a *gradient source* for
one parameter's gradient and a *state store* for its states, updates it, and lets both go before the next. To everything
else (learning-rate schedulers, step hooks, accelerate's wrapper) it is an ordinary ``torch.optim.Optimizer`` with one
parameter group. States are kept by the store and not in ``Optimizer.state``, and saved by parameter *name*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import NumericsError, SettingsError
from .saved_state import Entry, check_saved_state
from .state_store import DeviceStates, HostStates, Layout, StateStore, Tensors

GradientRange = Callable[[int, int], torch.Tensor]


class GradientSource(Protocol):
    """What a step gets gradients from.

    A source that also has ``has(parameter)`` and ``fetch_range(parameter, start, end)`` is asked for flat pieces
    instead of whole gradients, so that the largest gradient need not stand on the device either.
    """

    def fetch(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the gradient on the parameter's device, clipped; None: the parameter is passed over."""

    def release(self, parameter: nn.Parameter) -> None:
        """The step is done with the parameter's gradient."""

    def zero(self) -> None:
        """Forgets all gradients."""


class ParameterGradients:
    """The default source: reads ``parameter.grad`` and frees it as soon as it is used."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._parameters = parameters

    def fetch(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def release(self, parameter: nn.Parameter) -> None:
        parameter.grad = None

    def zero(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None


class StreamedOptimizer(torch.optim.Optimizer):
    """Steps parameter by parameter.

    Args:
        named_parameters: pairs of name and parameter; a tensor that comes twice is one parameter under its first name.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        seed: of the rounding noise, 0 to 2**64 - 1.
        gradients: where gradients come from; by default ``parameter.grad``.
        states: "device" or "host", where states live between steps.

    Raises:
        SettingsError: a value out of range, no parameter, or one name for two parameters.
        NumericsError: a parameter that this optimizer cannot step.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
        gradients: GradientSource | None = None,
        states: str = "device",
    ) -> None:
        _check_values(lr, betas, eps, weight_decay, seed, states)
        self.seed = seed
        self.names: dict[nn.Parameter, str] = {}
        self.steps: dict[nn.Parameter, int] = {}
        store = HostStates if states == "host" else DeviceStates
        self.states: StateStore = store(self.layout_of)
        self.gradients: GradientSource = ParameterGradients(lambda: self.names) if gradients is None else gradients
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": list(named_parameters)}], defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, given as ``{"params": [(name, parameter), ...], ...}``.

        Raises:
            SettingsError: a parameter without a name, a name that another parameter has, or no parameter at all.
        """
        fresh: dict[nn.Parameter, str] = {}
        taken = {name: parameter for parameter, name in self.names.items()}
        for pair in param_group["params"]:
            if not isinstance(pair, tuple):
                raise SettingsError(
                    f"optimizer: found a bare {type(pair).__name__}, expected (name, parameter) pairs, because states "
                    "are saved by name. Pass model.named_parameters()."
                )
            name, parameter = pair
            if taken.setdefault(name, parameter) is not parameter:
                raise SettingsError(f"optimizer: two different parameters are named {name}; names must be unique.")
            if parameter not in self.names and parameter not in fresh:
                self.check_parameter(name, parameter)
                fresh[parameter] = name
        if not fresh:
            raise SettingsError("optimizer: there is no parameter to optimize. Pass model.named_parameters().")
        super().add_param_group({**param_group, "params": list(fresh)})
        self.names.update(fresh)

    # -- what a subclass decides ---------------------------------------------------------------------------------

    def layout_of(self, parameter: torch.Tensor) -> Layout:
        """Tells which states a parameter has."""
        raise NotImplementedError

    def update(
        self,
        parameter: nn.Parameter,
        values: torch.Tensor,
        gradient: torch.Tensor,
        states: Tensors,
        group: dict[str, Any],
        first_element: int,
    ) -> None:
        """Steps the elements ``values [n]`` (a view) of ``parameter``, which begin at ``first_element``."""
        raise NotImplementedError

    def check_parameter(self, name: str, parameter: torch.Tensor) -> None:
        """Refuses what cannot be stepped.

        Raises:
            NumericsError: the parameter is not contiguous, so that its elements have no order in memory.
        """
        if not parameter.is_contiguous():
            raise NumericsError(
                f"optimizer: parameter {name} with shape {tuple(parameter.shape)} has strides {parameter.stride()}, "
                "expected a contiguous tensor. Replace its data by .contiguous() before the optimizer is made."
            )

    # -- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every trainable parameter that has a gradient; returns what ``closure`` returned, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reserve_states()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.numel():
                    self._step_parameter(parameter, group)
        self.states.end_step()
        return loss

    def _step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient_range = self._open_gradient(parameter)
        if gradient_range is None:
            return
        # Counted by parameter: one that has had no gradient so far starts with full bias correction, as in torch.
        self.steps[parameter] = self.steps.get(parameter, 0) + 1
        values = parameter.detach().view(-1)
        for piece in self.states.pieces(parameter):
            gradient = gradient_range(piece.start, piece.end)
            self.update(parameter, values[piece.start : piece.end], gradient, piece.states, group, piece.start)
        del gradient, gradient_range
        self.gradients.release(parameter)

    def _open_gradient(self, parameter: nn.Parameter) -> GradientRange | None:
        """Returns a function that gives runs of the flattened gradient, or None where there is no gradient."""
        fetch_range = getattr(self.gradients, "fetch_range", None)
        if fetch_range is not None:
            if not self.gradients.has(parameter):  # type: ignore[attr-defined]
                return None
            return lambda start, end: fetch_range(parameter, start, end)
        gradient = self.gradients.fetch(parameter)
        if gradient is None:
            return None
        if gradient.layout != torch.strided or gradient.shape != parameter.shape:
            raise NumericsError(
                f"optimizer: the gradient of {self.names[parameter]} has layout {gradient.layout} and shape "
                f"{tuple(gradient.shape)}, expected a dense gradient of shape {tuple(parameter.shape)}. Embeddings "
                "must be made with sparse=False."
            )
        flat = gradient.reshape(-1)
        return lambda start, end: flat[start:end]

    def reserve_states(self) -> None:
        """Takes the host memory for the states of all trainable parameters now, instead of in the first step.

        Raises:
            EnvironmentProblem: there is not enough of it.
        """
        self.states.reserve(self._trainable())

    def _trainable(self) -> list[nn.Parameter]:
        groups = (group["params"] for group in self.param_groups)
        return [parameter for group in groups for parameter in group if parameter.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. They are always freed: zeros would take the memory that this class saves."""
        self.gradients.zero()

    # -- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs, keyed by parameter name.

        Tensors are the live ones, not copies, flat, where they live (views of one arena with ``states="host"``). A
        parameter that has had no gradient yet appears with step 0 and no tensors. Before the first step "state" is
        empty.
        """
        state = {self.names[parameter]: self._entry(parameter) for parameter in self._trainable()} if self.steps else {}
        groups = [
            {**group, "params": [self.names[parameter] for parameter in group["params"]]} for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups, "seed": self.seed}

    def _entry(self, parameter: nn.Parameter) -> Entry:
        step = self.steps.get(parameter, 0)
        return {"step": step, **(self.states.read(parameter) if step else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a saved state; nothing is changed unless all of it belongs to these parameters.

        An empty state is legal: accelerate loads back what it has just saved when it wraps an optimizer.

        Raises:
            StateError: names, shapes or dtypes differ, in either direction; lists ten of each kind.
        """
        trainable = {self.names[parameter]: parameter for parameter in self._trainable()}
        expected = {name: self._expected_entry(parameter) for name, parameter in trainable.items()}
        groups = [[self.names[parameter] for parameter in group["params"]] for group in self.param_groups]
        check_saved_state(state_dict, groups, expected)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.seed = state_dict["seed"]
        self.steps.clear()
        self.states.clear()
        if state_dict["state"]:
            self.reserve_states()
        for name, entry in state_dict["state"].items():
            if entry["step"]:
                parameter = trainable[name]
                self.steps[parameter] = entry["step"]
                self.states.write(parameter, {key: value for key, value in entry.items() if key != "step"})

    def _expected_entry(self, parameter: nn.Parameter) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        layout = self.layout_of(parameter)
        return {name: ((spec.entries(parameter.numel()),), spec.dtype) for name, spec in layout.items()}


def _check_values(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, seed: int, states: str
) -> None:
    """Raises SettingsError for the first value that is out of range."""
    checks = (
        ("lr", lr, lr >= 0 and math.isfinite(lr), "a finite number of at least 0"),
        ("betas", betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)"),
        ("eps", eps, eps > 0, "a number above 0"),
        ("weight_decay", weight_decay, weight_decay >= 0, "a number of at least 0"),
        ("seed", seed, 0 <= seed < 2**64, "an integer in [0, 2**64)"),
        ("states", states, states in ("device", "host"), "device or host"),
    )
    for name, value, valid, expected in checks:
        if not valid:
            raise SettingsError(f"optimizer: {name}={value!r}, expected {expected}.")
