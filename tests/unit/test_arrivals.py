"""One gradient hook a unit counts what hooks on all parameters count, in random sequences of backwards.

A stand-in of a unit is trained in phases: some backwards bring gradients in some order, and the unit is reduced when
it is complete, at a use before that, or at the end. Two counters see the same phases; one of them sets no hook aside.
Another test breaks one check at a time, and then the two counters must differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.source_edits import edit
from zeropp.order.reductions import Arrivals, _UnitHooks

WIDTH = 3  # parameters of the unit
Phase = list[tuple[str, Any]]


class Counter:
    """A counter of gradients with one unit, and the reductions that it leads to."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(1)) for _ in range(WIDTH)]
        self.unit = SimpleNamespace(trained=(True,) * WIDTH)
        self.arrivals = Arrivals([self.unit])  # type: ignore[list-item]
        self.arrivals.watch(0, self.parameters, lambda position: lambda parameter: self.arrived(position))
        self.seen: list[object] = []
        self.waits = False  # True if the place of the reduction in the order has not come yet
        self.called = 0  # number of calls of hooks

    def arrived(self, position: int) -> None:
        self.called += 1
        if self.arrivals.count(0, position) and not self.waits:
            self.reduce("complete")

    def reduce(self, why: str) -> None:
        """Take all gradients; note the positions that have one and, if the unit is not complete, the reason."""
        there = [at for at, each in enumerate(self.parameters) if each.grad is not None]
        self.seen.append(there if why == "complete" else (why, there))
        for each in self.parameters:
            each.grad = None

    def backward(self, order: list[int]) -> None:
        """Run a backward that brings gradients in an order."""
        value = torch.ones(1, requires_grad=True)
        for position in reversed(order):
            value = value * self.parameters[position]
        value.backward()

    def run(self, phase: Phase) -> None:
        """Run one phase; see :func:`draw_phases`."""
        for kind, argument in phase:
            if kind == "train":
                self.unit.trained = argument
                for parameter, trained in zip(self.parameters, argument, strict=True):
                    parameter.requires_grad_(trained)
                self.arrivals.update_trained()
            elif kind == "begin":
                self.waits = argument
                self.arrivals.begin()
            elif kind == "expect":
                self.arrivals.expect(argument)
            elif kind == "backward":
                self.backward([at for at in argument if self.unit.trained[at]])
            elif self.arrivals.is_missing(0):  # a use that the order places behind the reduction
                self.arrivals.recount(0)
                self.reduce("use")
        self.arrivals.end()
        # Several gradients of a parameter may be counted as one, unless the whole phase is learned.
        learns = [argument for kind, argument in phase if kind == "expect"] == [None]
        came = [sum(at in order for kind, order in phase if kind == "backward") for at in range(WIDTH)]
        counts = [c if learns or n <= 1 else min(c, 1) for c, n in zip(self.arrivals.counts[0], came, strict=True)]
        self.seen.append((counts, self.arrivals.is_missing(0)))
        self.reduce("end")


def draw_phases(draw: random.Random) -> Iterator[Phase]:
    """Yield the events of random phases. Most phases are alike, so that one hook is kept from time to time."""
    trained: tuple[bool, ...] = (True,) * WIDTH
    for _ in range(40):
        phase: Phase = []
        if draw.random() < 0.1:
            trained = (*draw.choices([True, False], k=WIDTH - 1), True)
            phase.append(("train", trained))
        once = tuple(map(int, trained))
        orders = [None, {}, {0: once}, {0: tuple(draw.choices([0, 1, 2], k=WIDTH))}]
        usual = draw.random() < 0.6
        phase += [("begin", draw.random() < 0.1), ("expect", orders[2] if usual else draw.choice(orders))]
        for _ in range(1 if usual else draw.choice([1, 1, 2, 3])):
            order = range(WIDTH) if usual else draw.sample(range(WIDTH), draw.randint(1, WIDTH))
            phase.append(("backward", order))
            if not usual and draw.random() < 0.2:
                phase.append(("expect", draw.choice(orders)))
            if not usual and draw.random() < 0.2:
                phase.append(("use", None))
        yield phase


def differs(seed: int) -> bool:
    """Return True if the two counters see different things in random phases, or do not reduce in the same places."""
    own, other = Counter(), Counter()
    for phase in draw_phases(random.Random(seed)):
        own.run(phase)
        with mock.patch.object(_UnitHooks, "note_last", lambda hooks, position, trained: None):
            other.run(phase)
        if own.seen != other.seen:
            return True
    return False


FAULTS: dict[str, Callable[[], Any]] = {
    "not all have come": edit(Arrivals, "count", "not hooks.all_arrived()", "False"),
    "none is expected": edit(Arrivals, "count", "self._missing[index] == 0 or", ""),
    "an order is learned": edit(Arrivals, "expect", "fires is None or", "fires is not None and"),
    "others are expected": edit(Arrivals, "expect", "or (expected != once and expected != never)", ""),
    "the end": edit(Arrivals, "end", "self.recount(index)", "pass"),
    "the trained ones change": edit(Arrivals, "update_trained", "hooks.watch_all()", "pass"),
    "counted before": edit(Arrivals, "recount", "counts[position] == 0", "True"),
}


@pytest.mark.parametrize("seed", range(20))
def test_one_hook_counts_what_all_hooks_count(seed: int) -> None:
    assert not differs(seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_check_is_needed(fault: str) -> None:
    with FAULTS[fault]():
        assert any(differs(seed) for seed in range(60))


@pytest.mark.parametrize("trained", [(True,) * WIDTH, (True, False, True)])
def test_one_hook_is_called_if_gradients_come_in_one_order(trained: tuple[bool, ...]) -> None:
    counter = Counter()
    order = {0: tuple(map(int, trained))}
    counter.run([("train", trained)])
    for _ in range(4):
        counter.called = 0
        counter.run([("begin", False), ("expect", order), ("backward", range(WIDTH))])
    assert counter.called == 1
