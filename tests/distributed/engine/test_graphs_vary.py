"""Graphs that vary inside a unit: skipped or recomputed layers, repeated calls, and weights used outside blocks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.branch_routes import ALL, BARE, BRANCHES
from tests.support.branching_models import Block, Route, Routed, chain, gathers, make_config
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair


class Doubtful(nn.Module):
    """Two residual layers in one unit. ``use`` has a flag for each layer: False skips the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, use: tuple[bool, bool]) -> Tensor:
        for layer, wanted in zip((self.first, self.second), use, strict=True):
            x = x + torch.tanh(layer(x)) if wanted else x
        return x


class Depth(nn.Module):
    """Stochastic depth: three blocks whose layers are skipped as the argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubtful() for _ in range(3))

    def forward(self, x: Tensor, uses: tuple[tuple[bool, bool], ...]) -> Tensor:
        for block, use in zip(self.blocks, uses, strict=True):
            x = block(x, use)
        return x


BOTH, SECOND = ((True, True),) * 3, ((False, True),) * 3


def depth(steps: list[list[tuple[tuple[bool, bool], ...]]]) -> None:
    pair = Pair(Depth(), make_config(**BARE))
    for routes in steps:
        pair.train(*routes)
        pair.check()


@pytest.mark.every(5)
@pytest.mark.parametrize("steps", [[[SECOND], [BOTH], [SECOND], [BOTH]], [[SECOND], [SECOND], [BOTH, SECOND]]])
@pytest.mark.parametrize("world", [2, 1])
def test_a_part_of_a_unit_used_for_the_first_time(world: int, steps: list) -> None:
    """A unit stays gathered for a layer that was unused when the order was learned.

    Backward reaches that layer after all gradients that the order expects have arrived.
    """
    run_ranks(world, depth, [step[:world] for step in steps])


class Recomputed(Routed):
    """Blocks that all run under reentrant checkpointing."""

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        x = x.requires_grad_()
        for stage in ALL if route is None else route:
            x = sum((checkpoint(self.blocks[i], x, use_reentrant=True) for i in stage), torch.zeros_like(x))
        return x


def recomputed(steps: list[list[Route]]) -> None:
    pair = Pair(Recomputed(), make_config())
    for routes in steps:
        pair.train(*routes)
        pair.check()


@pytest.mark.campaign
def test_reentrant_checkpointing_in_another_order() -> None:
    run_ranks(2, recomputed, [[ALL], [ALL], [ALL, chain(1, 0, 2, 3)], [ALL]])


class Parts(nn.Module):
    """A block that runs its layer several times, each time under reentrant checkpointing.

    The bias is frozen, so backward keeps the unit gathered until it has left the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.lin.bias.requires_grad_(False)

    def forward(self, x: Tensor, calls: int) -> Tensor:
        for _ in range(calls):
            x = x + torch.tanh(checkpoint(self.lin, x, use_reentrant=True))
        return x


class InParts(nn.Module):
    """Three blocks. The gradient of a block arrives in as many parts as the block calls its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parts() for _ in range(3))

    def forward(self, x: Tensor, calls: tuple[int, ...]) -> Tensor:
        x = x.requires_grad_()
        for block, count in zip(self.blocks, calls, strict=True):
            x = block(x, count)
        return x


def sent_in_parts() -> list[dict[str, int]]:
    """Train four steps in which ranks call layers different numbers of times. Backward is learned in the first step.

    Returns:
        For each step, the number of reductions of each unit.
    """
    pair = Pair(InParts(), make_config())
    found = []
    for _ in range(4):
        pair.optimizer.engine.comm.ledger.reset()
        pair.train((1, 2, 1), (1, 1, 3))
        pair.check()
        rows = pair.optimizer.engine.comm.ledger.rows
        found.append({row.unit: row.calls for row in rows if row.kind == "reduce"})
    return found


def test_gradients_that_come_more_often_on_one_rank_are_sent_once() -> None:
    """Each rank expects as many gradients as the rank with the most receives, so no reduction is issued too early."""
    for found in run_ranks(2, sent_in_parts):
        assert found[1:] == [{f"blocks.{number}": 1 for number in range(3)}] * 3, found


class Borrowing(Routed):
    """Blocks, and one more use of the first block's weight after them, outside of the block."""

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        return F.linear(super().forward(x, route), self.blocks[0].lin.weight)


def two_backwards(retain: bool) -> None:
    """Train two steps with two backwards each.

    Args:
        retain: True for two backwards through one graph; False for two graphs, both made before the first backward.
    """
    pair = Pair(Borrowing(), make_config(**BARE))
    for _ in range(2):
        pair.zero_grad()
        for rank in range(pair.world):
            out = pair.plain(pair.batch(rank), ALL).square().mean() / pair.world
            (2 * out).backward()
        losses = [pair.model(pair.batch(pair.rank), ALL).square().mean() for _ in range(1 if retain else 2)]
        losses[0].backward(retain_graph=retain)
        losses[-1].backward()
        pair.step()
        pair.check()


@pytest.mark.every(2)
@pytest.mark.parametrize("retain", [False, True])
def test_two_backwards_with_a_borrowed_weight(retain: bool) -> None:
    run_ranks(2, two_backwards, retain)


def scaled(steps: list[list[Route]], edit: bool) -> list[tuple[float, bool]]:
    """Train along routes with scaled losses.

    Args:
        steps: routes of each step: one for all ranks, or one per rank.
        edit: True to double the loss and halve the gradients by hand; False to use torch's GradScaler.

    Returns:
        For each step, the largest difference of weights from plain torch, and True if the step was skipped.
    """
    pair = Pair(Routed(), make_config())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pair.sharded.call = lambda loss: (loss * 2 if edit else scaler.scale(loss)).backward()
    found = []
    for routes in steps:
        before, momentum = copy.deepcopy(pair.plain.state_dict()), copy.deepcopy(pair.plain_optimizer.state_dict())
        pair.zero_grad()
        pair.backward(*routes)
        if edit:
            for parameter in (p for group in pair.optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(2)
            pair.optimizer.step()
        else:
            scaler.step(pair.optimizer)
            scaler.update()
        pair.plain_optimizer.step()
        pair.advance()
        if pair.optimizer.step_was_skipped:
            pair.plain.load_state_dict(before)
            pair.plain_optimizer.load_state_dict(momentum)
        found.append((pair.difference(), pair.optimizer.step_was_skipped))
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("edit", [False, True], ids=["GradScaler", "by hand"])
@pytest.mark.parametrize("world", [2, 1])
def test_late_gradients_are_not_mixed_with_scaled_ones(world: int, edit: bool) -> None:
    """At most one step is skipped, when a rank first takes another order of blocks.

    A gradient that arrives late in such a step cannot be added to gradients that the user has unscaled already. In
    later steps ranks expect the gradient in time.
    """
    changed = BRANCHES if world == 2 else [BRANCHES[1]]
    steps = [[BRANCHES[0]], [BRANCHES[0]], changed, changed, changed[::-1], changed]
    for found in run_ranks(world, scaled, steps, edit):
        assert max(off for off, _ in found) < 1e-9, found
        assert [skipped for _, skipped in found].count(True) <= 1, found


class Twice(nn.Module):
    """Two blocks. The first is called before and after ``loops`` calls of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, loops: int) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(loops):
            x = self.blocks[1](x)
        return self.blocks[0](x)


def loops() -> None:
    pair = Pair(Twice(), make_config(reuse=0, prefetch=0))
    for routes in ((1,), (1,), (3,), (1, 3), (2, 1)):
        pair.train(*routes)
        pair.check()


@pytest.mark.campaign
def test_a_block_called_a_varying_number_of_times() -> None:
    run_ranks(2, loops)


class Deep(nn.Module):
    """A module that uses its weight, calls itself, and uses the weight again, ``depth`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return self(y, depth - 1) + y @ self.weight if depth else y


class Tower(nn.Module):
    """Two modules that call themselves, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Deep() for _ in range(2))

    def forward(self, x: Tensor, depths: tuple[int, int]) -> Tensor:
        return self.blocks[1](self.blocks[0](x, depths[0]), depths[1])


def depths() -> list[dict[str, int]]:
    """Run two forwards without gradients, in training and in eval mode, and train two steps with other depths.

    Returns:
        For each forward without gradients, the number of gathers of each unit.
    """
    pair = Pair(Tower(), make_config(reuse=0, prefetch=0))
    found = []
    for each in ((3, 1), (2, 2)):
        before = gathers(pair.optimizer)
        pair.model.train(not found)
        with torch.no_grad():
            pair.model(pair.batch(0), each)
        after = gathers(pair.optimizer)
        found.append({unit: count - before.get(unit, 0) for unit, count in after.items()})
    pair.model.train()
    for each in ((2, 1), (0, 3)):
        pair.train(each)
        pair.check()
    return found


def test_a_module_that_calls_itself_is_gathered_once_while_that_is_learned() -> None:
    for found in run_ranks(2, depths):
        assert found == [{"blocks.0": 1, "blocks.1": 1}] * 2
