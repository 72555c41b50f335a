"""Rules that step plain CPU tensors with torch's fused kernels, and the choice of the rule for an optimizer.

torch's fused kernels are elementwise, so a tensor may be stepped in chunks. The result has the same bits if every chunk
begins at a multiple of the processor's vector length. Elements after the last whole vector are computed by scalar
instructions, which round differently. See `CUT`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from zeropp._compat import fused_adagrad, fused_adam, fused_adamw, fused_sgd

__all__ = ["CUT", "Rule", "SettingsSnapshot", "SliceStep", "rule_of"]

CUT = 256
"""Chunk alignment in elements: chunks begin at multiples of it, so they have whole vectors and whole cache lines."""
# Group settings that the fused CPU kernels do not support: differentiable steps, and steps captured in a CUDA graph.
_BEYOND = ("differentiable", "capturable")


@dataclass(frozen=True)
class SettingsSnapshot:
    """Copy of a parameter group's settings as plain numbers, which later edits of the group do not change.

    Attributes:
        numbers: settings by their names in the group, which are also the kernel's argument names. ``betas`` is stored
            as ``beta1`` and ``beta2``.
        decoupled: True if weight decay does not enter the moments, as in AdamW.
        step_dtype: dtype of the step count in a new state.
    """

    numbers: Mapping[str, float]
    decoupled: bool
    step_dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class SliceStep:
    """Arguments of one step of a parameter or of a slice of a parameter.

    Attributes:
        param: [numel] contiguous weights on the CPU: float32, float64, bfloat16 or float16.
        grad: [numel] gradient in the dtype of ``param``.
        states: [numel] states in the dtype of ``param``, by the names that :meth:`Rule.states` returns.
        settings: settings of the parameter's group.
        step: number of the step, as returned by :meth:`Rule.begin_step`.
        grad_scale: float32 scalar on the CPU that the kernel divides ``grad`` by, in place; None to use ``grad``
            unchanged. For float64 weights its 24-bit precision is too low for clipping.
        rounded: [numel] output for the new weights in another dtype; None if they have no copy. Rules do not use it.
    """

    param: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    settings: SettingsSnapshot
    step: float
    grad_scale: Tensor | None = None
    rounded: Tensor | None = None

    def split(self, numel: int, names: Sequence[str]) -> Iterator[SliceStep]:
        """Yield the steps of parts of ``numel`` elements; the last part may be smaller.

        Args:
            numel: a multiple of `CUT`, so that the bits are those of one step.
            names: names of the states that the step uses.
        """
        if self.param.numel() <= numel:
            yield self
            return
        params, grads = self.param.split(numel), self.grad.split(numel)
        states = {name: self.states[name].split(numel) for name in names}
        rounded = [None] * len(params) if self.rounded is None else self.rounded.split(numel)
        for number, each in enumerate(zip(params, grads, rounded, strict=True)):
            own = {name: parts[number] for name, parts in states.items()}
            yield SliceStep(each[0], each[1], own, self.settings, self.step, self.grad_scale, each[2])


class Rule(ABC):
    """The step of one torch optimizer, done by its fused CPU kernel. :func:`rule_of` creates rules."""

    _floats: tuple[str, ...]
    _flags: tuple[str, ...]

    def snapshot(self, group: Mapping[str, Any]) -> SettingsSnapshot:
        """Return a copy of a parameter group's current settings. The host waits for settings that are CUDA tensors.

        Args:
            group: one entry of ``optimizer.param_groups``.
        """
        # float() also reads a setting that is a tensor: an lr tensor has the same effect in the kernels as its value.
        numbers = {name: float(group[name]) for name in self._floats}
        numbers |= {name: bool(group[name]) for name in self._flags}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = map(float, group["betas"])
        # torch counts steps in its default dtype. Fused optimizers always count in float32.
        double = not group.get("fused") and torch.get_default_dtype() == torch.float64
        return SettingsSnapshot(
            MappingProxyType(numbers),
            bool(group.get("decoupled_weight_decay")),
            torch.float64 if double else torch.float32,
        )

    @abstractmethod
    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        """Return the names of the states that have one value per element.

        Args:
            settings: settings of the parameter's group.
        """

    def check_state(self, settings: SettingsSnapshot, state: Mapping[str, Any]) -> None:
        """Raise if a parameter cannot be stepped with its current state.

        Args:
            settings: settings of the parameter's group.
            state: state of the parameter; empty before the parameter's first step.

        Raises:
            RuntimeError: a setting, such as amsgrad, needs a state that was not created at the first step.
        """
        missing = [name for name in self.states(settings) if state and name not in state]
        if missing:
            raise RuntimeError(
                f"the state of a parameter has {sorted(state)} and no {', '.join(missing)}: amsgrad was set, or the "
                "state loaded, after its first step without it. Set amsgrad when the optimizer is made"
            )

    @abstractmethod
    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        """Prepare one step of a parameter: create missing states and increment the step count.

        Afterwards ``state`` has the keys and dtypes that torch's optimizer would leave.

        Args:
            settings: settings of the parameter's group.
            param: tensor whose shape, dtype and device new states get.
            state: state of the parameter, updated in place; an empty dict before the first step. SGD without momentum
                leaves it empty. The caller must not store an empty dict in ``optimizer.state``, because
                ``state_dict()`` would show it.

        Returns:
            Number of the step, for :class:`SliceStep`.

        Raises:
            RuntimeError: a setting needs a state that was not created at the first step.
        """

    @abstractmethod
    def step_slice(self, one: SliceStep) -> None:
        """Step a slice in place, in the calling thread and with its number of intra-op threads.

        The caller must have disabled gradients.

        Args:
            one: tensors and settings of the slice.
        """


class _Adam(Rule):
    """Rule of Adam and AdamW."""

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
        # Check before incrementing the count, so that a refused step leaves the state unchanged.
        self.check_state(settings, state)
        state["step"] += 1
        return float(state["step"])

    def step_slice(self, one: SliceStep) -> None:
        states = one.states
        numbers = one.settings.numbers
        # Pass an empty list without amsgrad, because that state does not exist then.
        largest = [states["max_exp_avg_sq"]] if numbers["amsgrad"] else []
        kernel = fused_adamw if one.settings.decoupled else fused_adam
        moments = [states["exp_avg"]], [states["exp_avg_sq"]], largest
        kernel([one.param], [one.grad], *moments, [_counted(one.step)], **numbers, grad_scale=one.grad_scale)


class _SGD(Rule):
    """Rule of SGD."""

    _floats = ("lr", "weight_decay", "momentum", "dampening")
    _flags = ("nesterov", "maximize")

    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        return ("momentum_buffer",) if settings.numbers["momentum"] else ()

    def check_state(self, settings: SettingsSnapshot, state: Mapping[str, Any]) -> None:
        """Accept every state: begin_step creates a missing momentum buffer at any step."""

    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        # torch's SGD has no step count. The first step with momentum is the one without a buffer. Momentum may be
        # turned on later, so this need not be the first step of training. Older SGD versions saved the missing buffer
        # as None.
        if not settings.numbers["momentum"] or state.get("momentum_buffer") is not None:
            return 2.0
        state["momentum_buffer"] = torch.empty_like(param)
        return 1.0

    def step_slice(self, one: SliceStep) -> None:
        numbers = one.settings.numbers
        buffers = [one.states["momentum_buffer"]] if numbers["momentum"] else []
        # In the first step the kernel overwrites the buffer with the undampened gradient, so the buffer may be
        # uninitialized.
        first = bool(buffers) and one.step == 1
        fused_sgd([one.param], [one.grad], buffers, **numbers, is_first_step=first, grad_scale=one.grad_scale)


class _Adagrad(Rule):
    """Rule of Adagrad."""

    _floats = ("lr", "lr_decay", "weight_decay", "eps")
    _flags = ("maximize",)

    def __init__(self, initial: float) -> None:
        self._initial = initial

    def states(self, settings: SettingsSnapshot) -> tuple[str, ...]:
        return ("sum",)

    def begin_step(self, settings: SettingsSnapshot, param: Tensor, state: MutableMapping[str, Any]) -> float:
        # torch's Adagrad creates states in its constructor. States of groups that were added later are created here.
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
    """Return the rule that steps like this optimizer, or None if no fused CPU kernel does the same.

    Rules exist for torch's AdamW, Adam, SGD and Adagrad, and for subclasses that inherit their step. The kernels'
    results differ in the last bits from those of torch's optimizers without ``fused=True``.

    Args:
        optimizer: the wrapped optimizer. Call this function again after its settings have changed.
    """
    # One group with an unsupported setting disables the rule for all groups. Otherwise states of two kinds would be
    # mixed in one optimizer.
    if any(group.get(name) for group in optimizer.param_groups for name in _BEYOND):
        return None
    kind = next((kind for kind in (Adam, SGD, Adagrad) if _steps_as(optimizer, kind)), None)
    # The fused SGD kernel of torch 2.13 steps 16-bit weights by wrong amounts, for example 0.6 instead of 0.1.
    if kind is SGD and any(p.dtype.itemsize < 4 for group in optimizer.param_groups for p in group["params"]):
        return None
    if kind is Adagrad:
        # Read the initial value from the defaults, as torch does for states that are created late: groups cannot set
        # it.
        return _Adagrad(float(optimizer.defaults["initial_accumulator_value"]))
    return {Adam: _Adam, SGD: _SGD}[kind]() if kind is not None else None


def _steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return True if the optimizer's class inherits ``step`` and the creation of states from ``kind``."""
    # Compare methods of the class, because schedulers replace ``step`` on the object. Unwrap them, because torch wraps
    # a class's ``step`` for profiling when the first object of the class is created.
    return isinstance(optimizer, kind) and all(
        inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(kind, name))
        for name in ("step", "_init_group")
    )


@lru_cache(maxsize=4)
def _counted(step: float) -> Tensor:
    """Return the step number as a float32 tensor, which the kernels expect and do not change."""
    return torch.tensor(step, dtype=torch.float32, device="cpu")
