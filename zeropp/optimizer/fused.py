"""Rules: which of torch's optimizers have a fused step on the CPU, and one call of it on plain tensors.

torch's kernels work on every element by itself, so a tensor may be stepped in chunks: with the same bits, as long as
chunks begin at multiples of a processor's vector. The elements behind the last whole vector are computed by other
instructions, which round otherwise. See `CUT`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from zeropp._compat import fused_adagrad, fused_adam, fused_adamw, fused_sgd

__all__ = ["CUT", "Rule", "SettingsSnapshot", "SliceStep", "rule_of"]

CUT = 256
"""Chunks of a tensor begin at multiples of this many elements: whole vectors, and whole cache lines, of any dtype."""
# What a group may ask for that the kernels do not do: gradients through the step, and steps that a graph replays.
_BEYOND = ("differentiable", "capturable")


@dataclass(frozen=True)
class SettingsSnapshot:
    """A parameter group's settings at one moment, as plain numbers; later edits of the group change nothing here.

    Attributes:
        numbers: by their names in the group, which are those of the kernel's arguments.
        decoupled: whether weight decay stays out of the moments, as in AdamW.
        step_dtype: of the count of steps in a fresh state.
    """

    numbers: Mapping[str, float]
    decoupled: bool
    step_dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class SliceStep:
    """One step of a parameter, or of a slice of it.

    Attributes:
        param: 1-D, contiguous, on the CPU; float32, or float64, bfloat16 and float16 where all tensors are.
        grad: of its shape and dtype.
        states: tensors of its shape and dtype, by the names in :meth:`Rule.states`.
        settings: of the parameter's group.
        step: the number that :meth:`Rule.begin_step` returned.
        grad_scale: float32 scalar; the gradient is divided by it, and left divided. None leaves it as it is. Also for
            float64 it has 24 bits, which are too few for clipping there.
    """

    param: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    settings: SettingsSnapshot
    step: float
    grad_scale: Tensor | None = None


class Rule(ABC):
    """The step of one of torch's optimizers; from :func:`rule_of`."""

    _floats: tuple[str, ...]
    _flags: tuple[str, ...]

    def snapshot(self, group: Mapping[str, Any]) -> SettingsSnapshot:
        """Settings of a parameter group now. The host waits for those that are tensors on a card.

        Args:
            group: of the optimizer.
        """
        # Also of tensors: the kernels read an lr that is one as the same number.
        numbers = {name: float(group[name]) for name in self._floats}
        numbers |= {name: bool(group[name]) for name in self._flags}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = map(float, group["betas"])
        # torch counts in its default dtype, and in float32 for a step that is fused.
        double = not group.get("fused") and torch.get_default_dtype() == torch.float64
        return SettingsSnapshot(
            MappingProxyType(numbers),
            bool(group.get("decoupled_weight_decay")),
            torch.float64 if double else torch.float32,
        )

    @abstractmethod
    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        """Names of the states that have one value an element."""

    def check_state(self, settings: SettingsSnapshot, state: Mapping[str, Any]) -> None:
        """Make sure that a parameter can be stepped.

        Args:
            settings: of its group.
            state: of it; empty for a fresh one.

        Raises:
            RuntimeError: a setting needs a state that is not there, since it was off when the states were made.
        """
        missing = [name for name in self.states(settings) if state and name not in state]
        if missing:
            raise RuntimeError(
                f"the state of a parameter has {sorted(state)} and no {', '.join(missing)}: amsgrad was set, or the "
                "state loaded, after its first step without it. Set amsgrad when the optimizer is made"
            )

    @abstractmethod
    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        """Begin a step of one parameter: make its states where they are missing, and count the step in them.

        Afterwards ``state`` has the keys and dtypes that torch's optimizer leaves after a step.

        Args:
            settings: of its group.
            param: whose shape, dtype and device states get.
            state: of it, with new tensors afterwards; an empty dict for a fresh parameter. One that stays empty, of
                SGD without momentum, is no entry of ``optimizer.state``: ``state_dict()`` would show it.

        Returns:
            Number of the step, for :class:`SliceStep`.

        Raises:
            RuntimeError: a setting needs a state that is not there, since it was off when the states were made.
        """

    @abstractmethod
    def step_slice(self, one: SliceStep) -> None:
        """Step a slice in place, in the calling thread with as many intra-op threads as it has; in no_grad."""


class _Adam(Rule):
    """Adam and AdamW."""

    _floats = ("lr", "weight_decay", "eps")
    _flags = ("amsgrad", "maximize")

    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        moments = ("exp_avg", "exp_avg_sq")
        return (*moments, "max_exp_avg_sq") if settings.numbers["amsgrad"] else moments

    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        names = self.states(settings)
        if not state:
            state["step"] = torch.zeros((), dtype=settings.step_dtype, device="cpu")
            state.update({name: torch.zeros_like(param) for name in names})
        # Before the count, so that a step which is refused leaves the state as it was.
        self.check_state(settings, state)
        state["step"] += 1
        return float(state["step"])

    def step_slice(self, one: SliceStep) -> None:
        states = one.states
        numbers = one.settings.numbers
        # An empty list without amsgrad: the kernel would look for a missing one.
        largest = [states["max_exp_avg_sq"]] if numbers["amsgrad"] else []
        kernel = fused_adamw if one.settings.decoupled else fused_adam
        moments = [states["exp_avg"]], [states["exp_avg_sq"]], largest
        kernel([one.param], [one.grad], *moments, [_counted(one.step)], **numbers, grad_scale=one.grad_scale)


class _SGD(Rule):
    _floats = ("lr", "weight_decay", "momentum", "dampening")
    _flags = ("nesterov", "maximize")

    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        return ("momentum_buffer",) if settings.numbers["momentum"] else ()

    def check_state(self, settings: SettingsSnapshot, state: Mapping[str, Any]) -> None:
        """A buffer is made whenever momentum is set."""

    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        # torch's SGD counts no steps: the first one is that without a buffer. None is what older ones have saved.
        # Momentum may be set later, so this need not be the first step of training.
        if not settings.numbers["momentum"] or state.get("momentum_buffer") is not None:
            return 2.0
        state["momentum_buffer"] = torch.empty_like(param)
        return 1.0

    def step_slice(self, one: SliceStep) -> None:
        numbers = one.settings.numbers
        buffers = [one.states["momentum_buffer"]] if numbers["momentum"] else []
        # The first gradient becomes the momentum, undampened; the values in the buffer are not read.
        first = bool(buffers) and one.step == 1
        fused_sgd([one.param], [one.grad], buffers, **numbers, is_first_step=first, grad_scale=one.grad_scale)


class _Adagrad(Rule):
    _floats = ("lr", "lr_decay", "weight_decay", "eps")
    _flags = ("maximize",)

    def __init__(self, initial: float) -> None:
        self._initial = initial

    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        return ("sum",)

    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        # torch makes them with the optimizer, but those of groups added later when it steps.
        if not state:
            state["step"] = torch.zeros((), dtype=settings.step_dtype, device="cpu")
            state["sum"] = torch.full_like(param, self._initial)
        state["step"] += 1
        return float(state["step"])

    def step_slice(self, one: SliceStep) -> None:
        sums = [one.states["sum"]]
        numbers = one.settings.numbers
        fused_adagrad([one.param], [one.grad], sums, [_counted(one.step)], **numbers, grad_scale=one.grad_scale)


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule by which an optimizer steps; None if there is no fused kernel on the CPU that does the same.

    There is one for torch's AdamW, Adam, SGD and Adagrad, and for classes derived from them that step as they do. The
    kernels' results differ in the last bits from those of torch's optimizers without ``fused=True``.

    Args:
        optimizer: whose groups may hold other settings later; ask again then.
    """
    # In one group is enough: the others would be stepped by the rule, and the states of one optimizer be of two kinds.
    if any(group.get(name) for group in optimizer.param_groups for name in _BEYOND):
        return None
    kind = next((kind for kind in (Adam, SGD, Adagrad) if _steps_as(optimizer, kind)), None)
    # torch 2.13's kernel steps 16-bit weights by wrong amounts: 0.6 where it should be 0.1.
    if kind is SGD and any(p.dtype.itemsize < 4 for group in optimizer.param_groups for p in group["params"]):
        return None
    if kind is Adagrad:
        # From the defaults, as torch takes it for states that are made late: groups cannot have their own.
        return _Adagrad(float(optimizer.defaults["initial_accumulator_value"]))
    return {Adam: _Adam, SGD: _SGD}[kind]() if kind is not None else None


def _steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Tell whether the class steps, and makes states, by the methods of ``kind``."""
    # The class's and not the object's, in which schedulers put a step that counts. Unwrapped: torch wraps the step of a
    # class for profiles when the first object of it is made.
    return isinstance(optimizer, kind) and all(
        inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(kind, name))
        for name in ("step", "_init_group")
    )


def _counted(step: float) -> Tensor:
    """The number of the step as kernels read it."""
    return torch.tensor(step, dtype=torch.float32, device="cpu")
