"""Ranks whose backwards use different units, or the same units a different number of times.

Each rank starts its backward at other outputs, or runs other forwards in the same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.branch_routes import agreements
from tests.support.branching_models import Block, make_config
from tests.support.rank_pool import run_ranks, some
from tests.support.sharded_and_plain import Pair


class Experts(nn.Module):
    """A stem, and three experts that take the stem's output. Each is a unit.

    Args:
        recompute: True to run experts with activation checkpointing.
        frozen: True to freeze the stem and expert 1.
    """

    def __init__(self, *, recompute: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.stem = Block()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute
        for part in (self.stem, self.experts[1]) if frozen else ():
            part.requires_grad_(False)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> list[Tensor]:
        x = self.stem(x)
        return [self._run(self.experts[index], x).square().mean() for index in chosen]

    def _run(self, expert: nn.Module, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(expert, x, use_reentrant=True)
            return recomputed
        result: Tensor = expert(x)
        return result


NoSync = Callable[[], contextlib.AbstractContextManager[None]]
Backwards = Callable[[nn.Module, Tensor, int, NoSync], None]


def one_of_two_outputs(model: nn.Module, x: Tensor, choice: int, no_sync: NoSync) -> None:
    """Run one forward of two experts, and backward from the output of expert ``choice`` only."""
    model(x, (0, 1))[choice].backward()


def first_of_two_forwards(model: nn.Module, x: Tensor, choice: int, no_sync: NoSync) -> None:
    """Run one backward from the losses of two forwards; ``choice`` is the expert of the first forward."""
    (model(x, (choice,))[0] + model(x, (0,))[0]).backward()


def backward_without_a_forward_of_its_own(model: nn.Module, x: Tensor, choice: int, no_sync: NoSync) -> None:
    """Run two forwards, then the second one's backward, then the first one's."""
    first, second = model(x, (choice,))[0], model(x, (0,))[0]
    second.backward()
    first.backward()


def backwards_in_the_order_of_forwards(model: nn.Module, x: Tensor, choice: int, no_sync: NoSync) -> None:
    """Run two forwards, then the first one's backward, then the second one's."""
    first, second = model(x, (choice,))[0], model(x, (0,))[0]
    first.backward()
    second.backward()


def forward_outside_no_sync(model: nn.Module, x: Tensor, choice: int, no_sync: NoSync) -> None:
    """Run a forward outside of ``no_sync`` and its backward inside, then a usual forward and backward."""
    loss = model(x, (choice,))[0]
    with no_sync():
        loss.backward()
    model(x, (0,))[0].backward()


WAYS = [
    one_of_two_outputs,
    first_of_two_forwards,
    backward_without_a_forward_of_its_own,
    backwards_in_the_order_of_forwards,
    forward_outside_no_sync,
]


class Chooser:
    """Trains a sharded model on which each rank has a choice, and a plain model that runs the choices of all ranks."""

    def __init__(self, settings: dict[str, object], **kind: bool) -> None:
        self.pair = Pair(Experts(**kind), make_config(**settings))

    def step(self, way: Backwards, *choices: int) -> int:
        """Train one step, compare the weights, and return the number of exchanges.

        Args:
            way: function that runs the forwards and backwards of a step.
            *choices: choices of expert, given to the ranks in turn.
        """
        pair = self.pair
        talked = -agreements(pair.optimizer)
        pair.zero_grad()
        way(pair.model, pair.batch(pair.rank), choices[pair.rank % len(choices)], pair.optimizer.no_sync)
        for rank in range(pair.world):
            way(pair.plain, pair.batch(rank), choices[rank % len(choices)], contextlib.nullcontext)
        for parameter in pair.plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= pair.world
        pair.step()
        talked += agreements(pair.optimizer)
        pair.check()
        return talked


def part(way: Backwards, settings: dict[str, object], recompute: bool) -> int:
    """Train steps with equal and with different choices, and return the exchanges of a last step that differs."""
    chooser = Chooser(settings, recompute=recompute)
    for choices in ((0,), (0,), (0, 1), (1, 0), (2 if way is not one_of_two_outputs else 1, 0), (0,)):
        chooser.step(way, *choices)
    return chooser.step(way, 0, 1)


@pytest.mark.every(8)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}], ids=["default", "bare"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ranks_part_in_backward(way: Backwards, settings: dict[str, object], recompute: bool) -> None:
    """Orders are learned in steps with equal choices. Then one rank needs units that the other ranks do not need."""
    run_ranks(2, part, way, settings, recompute)


def thaw(settings: dict[str, object]) -> None:
    """Train a frozen stem from the third step on.

    Behind a frozen stem, backward does not reach a frozen expert. Once the stem is trained, backward needs the expert's
    weights.
    """
    chooser = Chooser(settings, frozen=True)
    for _ in range(2):
        chooser.step(one_of_two_outputs, 0)
    for each in (chooser.pair.model, chooser.pair.plain):
        each.stem.requires_grad_(True)
    for choices in ((0,), (0,), (0, 1), (1, 0)):
        chooser.step(one_of_two_outputs, *choices)


@pytest.mark.parametrize("settings", some([{}, {"reuse": 0, "prefetch": 0}], 2), ids=["default", "bare"])
def test_ranks_part_once_more_is_trained(settings: dict[str, object]) -> None:
    run_ranks(2, thaw, settings)


def quiet(frozen: bool) -> int:
    """Return the number of exchanges in the fourth of four equal steps.

    Args:
        frozen: True to freeze the stem and expert 1, so that backward reaches neither.
    """
    pair = Pair(Experts(frozen=frozen), make_config())
    talked = 0
    for _ in range(4):
        talked = -agreements(pair.optimizer)
        pair.optimizer.zero_grad()
        torch.stack(pair.model(pair.batch(pair.rank), (0, 1, 2))).sum().backward()
        pair.optimizer.step()
        talked += agreements(pair.optimizer)
    return talked


def test_backward_of_a_frozen_stem_needs_no_word() -> None:
    """Units that backward cannot reach must not make ranks exchange at the end of backward."""
    assert run_ranks(2, quiet, True) == run_ranks(2, quiet, False) == [0, 0]


class Repeats(nn.Module):
    """A model that calls block 0 once, and then blocks 0 and 1 ``times`` times; block 1 runs with checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(times):
            x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=True)
        return x.square().mean()


def repeat(settings: dict[str, object]) -> None:
    """Train steps in which the first forward calls the blocks with varying frequency."""
    pair = Pair(Repeats(), make_config(**settings))
    for times, second in (((1, 1), 1), ((1, 1), 1), ((3, 3), 0), ((1, 3), 1), ((2, 1), 1)):
        pair.zero_grad()
        for rank in range(pair.world):
            (_repeated(pair.plain, pair.batch(rank), times[rank], second) / pair.world).backward()
        _repeated(pair.model, pair.batch(pair.rank), times[pair.rank], second).backward()
        pair.step()
        pair.check()


def _repeated(model: nn.Module, x: Tensor, first: int, second: int) -> Tensor:
    """Return the loss of a forward with ``first`` repetitions, plus another with ``second`` ones unless that is 0."""
    loss: Tensor = model(x, first)
    return loss + model(x, second) if second else loss


@pytest.mark.parametrize(
    "settings", some([{}, {"reuse": 0, "prefetch": 0}, {"live": 0}], 3), ids=["default", "bare", "live0"]
)
def test_a_forward_before_the_last_calls_a_block_more_often(settings: dict[str, object]) -> None:
    """Backward needs a known unit more often on one rank than in the learned order.

    Ranks expect this because such forwards have varied before, in a step with another kind of backward (after one
    forward).
    """
    run_ranks(2, repeat, settings)
