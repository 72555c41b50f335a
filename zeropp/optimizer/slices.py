"""Slice parameters: what the wrapped optimizer sees of the model on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.flat_buffer import FlatBuffer
from zeropp.layout import Fragment
from zeropp.unit import Unit

__all__ = ["Slice", "put_slices"]


@dataclass(eq=False)
class Slice:
    """One parameter's part in this rank's piece of a flat buffer.

    Attributes:
        name: of the model's parameter.
        unit: index of its unit; -1 for a stand-in.
        position: of the parameter among the unit's trainable ones.
        start: first element of the parameter, in storage order.
        strides: of the parameter.
        parameter: 1-D leaf in the main dtype, a view of the main shard.
        gradient: view of the gradient shard.
        arrived: whether that holds a gradient of this step.
        shown: whether the optimizer was given the gradient, so that its absence is the user's doing.
        removed: whether the user has taken it away since.
    """

    name: str
    unit: int
    position: int
    start: int
    strides: tuple[int, ...]
    parameter: nn.Parameter
    gradient: Tensor
    arrived: Callable[[], bool]
    shown: bool = False
    removed: bool = False

    def take_edit(self) -> None:
        """Take over a gradient that the user has put in place of ours, or taken away."""
        found = self.parameter.grad
        if found is None:
            self.gradient.zero_()
            self.shown, self.removed = False, True
        elif found is not self.gradient:
            self.gradient.copy_(found)

    def show_gradient(self, present: bool) -> None:
        """Give the optimizer the gradient, or none, as torch has it for unused parameters."""
        self.parameter.grad = self.gradient if present else None
        self.shown, self.removed = present, False


def put_slices(optimizer: Optimizer, units: tuple[Unit, ...], device: torch.device) -> list[Slice]:
    """Put this rank's slices in the place of the optimizer's parameters, state included.

    Returns:
        The slices that the optimizer steps; the model may have trainable parameters besides. Never empty.
    """
    by_parameter = _make_slices(units)
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(by_parameter.get(id(parameter)) for parameter in stepped):
        nothing = _stand_in(device)
        optimizer.param_groups[0]["params"].append(nothing.parameter)
        by_parameter[id(nothing.parameter)] = [nothing]
        stepped.append(nothing.parameter)
    for parameter in stepped:
        _move_state(optimizer, parameter, by_parameter.get(id(parameter), []))
    for group in optimizer.param_groups:
        group["params"] = [s.parameter for p in group["params"] for s in by_parameter.get(id(p), [])]
    return [piece for parameter in stepped for piece in by_parameter.get(id(parameter), [])]


def _make_slices(units: tuple[Unit, ...]) -> dict[int, list[Slice]]:
    """Slices of every trainable parameter by its ``id``; an empty list for those with no part on this rank."""
    slices: dict[int, list[Slice]] = {}
    for unit in units:
        position = 0
        for buffer in unit.trainable:
            for parameter in buffer.parameters:
                slices[id(parameter)] = []
            for fragment in buffer.fragments():
                cut = _cut(buffer, fragment, unit.index, position + fragment.slot)
                slices[id(buffer.parameters[fragment.slot])].append(cut)
            position += len(buffer.parameters)
    return slices


def _cut(buffer: FlatBuffer, fragment: Fragment, unit: int, position: int) -> Slice:
    gradient = buffer.gradient
    assert gradient is not None
    stop = fragment.offset + fragment.stop - fragment.start
    parameter = nn.Parameter(buffer.shard[fragment.offset : stop])
    slot = buffer.layout.slots[fragment.slot]
    part = gradient.shard[fragment.offset : stop]
    return Slice(slot.name, unit, position, fragment.start, slot.strides, parameter, part, lambda: gradient.arrived)


def _stand_in(device: torch.device) -> Slice:
    """A slice of nothing, for a rank that owns no part of a tiny model: GradScaler insists on a gradient to look at."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    return Slice("<nothing>", -1, 0, 0, (), parameter, torch.zeros(1, device=device), lambda: False)


def _move_state(optimizer: Optimizer, parameter: nn.Parameter, pieces: list[Slice]) -> None:
    """Cut the state an optimizer has for a parameter the way the parameter was cut.

    Tensors of the parameter's shape are cut, everything else is copied to each slice; right for elementwise optimizers.
    """
    state = optimizer.state.pop(parameter, None)
    if not state:
        return
    for piece in pieces:
        own = optimizer.state[piece.parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
                dense = torch.empty_strided(value.shape, piece.strides, dtype=value.dtype, device=value.device)
                row = dense.copy_(value).as_strided((dense.numel(),), (1,))
                own[key] = row[piece.start : piece.start + piece.parameter.numel()].clone()
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value
