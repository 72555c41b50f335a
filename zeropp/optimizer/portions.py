"""An optimizer step in portions, so that the first new weights are on their way while the last are computed.

Only where weights that are cached between uses have to travel after a step, and with optimizers known to treat each
parameter by itself: parameters without a gradient are passed over, as torch's optimizers do.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn
from torch.optim import SGD, Optimizer

from zeropp.engine.engine import Engine
from zeropp.optimizer.elementwise import treats_each_alone
from zeropp.optimizer.slices import Slice
from zeropp.order.refresh import portion_of
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["Portion", "begin_momentum", "choose_portions", "step_by_portions", "without_gradients"]


@dataclass(frozen=True)
class Portion:
    """Slices that are stepped in one call, and the buffers that have new weights after it."""

    slices: list[Slice]
    buffers: list[FlatBuffer]


def choose_portions(engine: Engine, optimizer: Optimizer, slices: Sequence[Slice]) -> list[Portion]:
    """Units in the order of the next forward: one, one, two, four, ...; all at once where little travels after a step.

    All at once, too, where units are stale already: their renewal would begin before they are stepped. Equal on every
    rank but for the slices.
    """
    # The first unit that forward wants goes alone: it travels while the others are stepped. Later ones have time, and
    # every portion costs a call of step().
    units = [unit for unit in engine.schedule.in_forward_order() if unit.trainable_buffers]
    buffers = engine.trainable_buffers
    travelling = sum(b.layout.numel for b in buffers if b.paths.refresh is not None and b.paths.refresh.hops)
    # Several calls of a fused step cost more than one: they pay only where something is hidden behind them.
    little = 2 * travelling < sum(buffer.layout.numel for buffer in buffers)
    if little or engine.refresh.is_put_off or not treats_each_alone(optimizer):
        return [Portion(list(slices), engine.trainable_buffers)]
    by_unit: dict[int, list[Slice]] = {}
    for part in slices:
        by_unit.setdefault(part.unit, []).append(part)
    portions = []
    for _, numbered in groupby(enumerate(units), lambda each: portion_of(each[0])):
        chosen = [unit for _, unit in numbered]
        found = [part for unit in chosen for part in by_unit.get(unit.index, [])]
        portions.append(Portion(found, [buffer for unit in chosen for buffer in unit.trainable_buffers]))
    # A stand-in, which belongs to no unit.
    portions[0].slices.extend(by_unit.get(-1, []))
    return portions


@contextlib.contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the optimizer pass over some of the parameters in its groups."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def begin_momentum(optimizer: Optimizer, markers: int) -> list[list[nn.Parameter]]:
    """Parameters to be stepped apart, in as many calls: those whose momentum begins now, and those that have one.

    torch's fused SGD takes a group's first step for all parameters or for none, and fails where some of them get their
    first gradient later than others, as in a branch that is taken late. Empty where one call does.

    Args:
        optimizer: that is about to step.
        markers: how many tensors in its groups are never stepped.
    """
    # By the class's step: that of a class derived from SGD may not be meant to be called twice.
    if not isinstance(optimizer, SGD) or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(SGD.step):
        return []
    groups, state = optimizer.param_groups, optimizer.state
    # As in most steps: every parameter has its momentum.
    if len(state) + markers >= sum(len(group["params"]) for group in groups) and all(state.values()):
        return []
    groups = [group for group in groups if group["fused"] and group["momentum"]]
    fresh, begun = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
        (fresh if state.get(parameter, {}).get("momentum_buffer") is None else begun).append(parameter)
    return [fresh, begun] if fresh and begun else []


def step_by_portions(
    portions: Sequence[Portion], step: Callable[[], None], changed: Callable[[Sequence[FlatBuffer]], None]
) -> None:
    """Step portion by portion.

    Args:
        portions: all there is to step.
        step: of the optimizer, over what has a gradient.
        changed: told of buffers with new weights; of all that are left if a step fails, which may have changed them.
    """
    waiting = list(portions)
    # torch's optimizers pass over parameters whose .grad is None: so one portion is stepped, and the groups stay
    # whole.
    gradients = [(part.parameter, part.parameter.grad) for portion in portions for part in portion.slices]
    try:
        if len(portions) > 1:
            for parameter, _ in gradients:
                parameter.grad = None
        own = iter(gradients)
        for portion in portions:
            shown = [next(own) for _ in portion.slices]
            for parameter, gradient in shown:
                parameter.grad = gradient
            step()
            if len(portions) > 1:
                for parameter, _ in shown:
                    parameter.grad = None
            # Only after the step: one that fails half-way may have changed weights, and they are told of below.
            waiting.remove(portion)
            changed(portion.buffers)
    finally:
        # Gradients stay until zero_grad(), as in torch, also after an error.
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for portion in waiting:
            changed(portion.buffers)
