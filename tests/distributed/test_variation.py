"""Graphs that vary: between ranks, from one step to the next, and inside a unit."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Block, Pair, Route, Routed, chain, make_config, share
from tests.distributed.test_sequence import ALL, BRANCHES, follow

BARE = {"reuse": 0, "prefetch": 0}
LEAVES: dict[str, list[list[Route]]] = {
    "to the same block from different ones": [[chain(0, 2), chain(1, 2)], [chain(3, 0, 2), chain(3, 1, 2)]],
    "at different uses": [[chain(0, 2), chain(1, 2)], [chain(0, 3), chain(1, 3)]],
    "to a block that none has used, alone": [[chain(0, 1)], [chain(0, 1)], [chain(0, 1), chain(0, 2)], [chain(0, 2)]],
    "to two such blocks": [[chain(0, 1)], [chain(0, 1)], [chain(1, 2), chain(0, 1)], [chain(1), chain(3, 2)]],
    "after gradients that came late": [[ALL], [ALL], BRANCHES, [chain(0, 1)], [chain(0, 1), chain(0, 1, 2)]],
}


@pytest.mark.parametrize("settings", [{}, BARE, {"live": 0}, {"overlap_comm": False}], ids=str)
@pytest.mark.parametrize("steps", LEAVES)
def test_ranks_leave_a_known_order(steps: str, settings: dict[str, object]) -> None:
    run_ranks(2, follow, LEAVES[steps], settings)


def test_a_rank_comes_back_for_what_the_live_limit_took() -> None:
    """Known in one order, used in the other: within limit 0 nothing may wait for its use."""
    run_ranks(2, follow, [[BRANCHES[0]], [BRANCHES[0]], BRANCHES, BRANCHES], {"live": 0})


class Doubtful(nn.Module):
    """Two layers of one unit, each of them skipped on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, use: tuple[bool, bool]) -> Tensor:
        for layer, wanted in zip((self.first, self.second), use, strict=True):
            x = x + torch.tanh(layer(x)) if wanted else x
        return x


class Depth(nn.Module):
    """Stochastic depth inside blocks."""

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


@pytest.mark.parametrize("steps", [[[SECOND], [BOTH], [SECOND], [BOTH]], [[SECOND], [SECOND], [BOTH, SECOND]]])
@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_a_unit_used_for_the_first_time(world: int, steps: list) -> None:
    """Backward needs its weight after all gradients that were known to come have come."""
    run_ranks(world, depth, [step[:world] for step in steps])


class Recomputed(Routed):
    """Every block is checkpointed, the reentrant way."""

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


def test_reentrant_checkpointing_in_another_order() -> None:
    run_ranks(2, recomputed, [[ALL], [ALL], [ALL, chain(1, 0, 2, 3)], [ALL]])


class Parts(nn.Module):
    """A block whose layer is recomputed, the reentrant way, as often as it is called.

    What is frozen of it keeps its weights there until backward has left it.
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
    """Blocks whose gradients come as often as they call their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parts() for _ in range(3))

    def forward(self, x: Tensor, calls: tuple[int, ...]) -> Tensor:
        x = x.requires_grad_()
        for block, count in zip(self.blocks, calls, strict=True):
            x = block(x, count)
        return x


def sent_in_parts() -> list[dict[str, int]]:
    """How often each unit was reduced, in each step; backward is learned in the first."""
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
    """A unit is complete when its gradients have come as often as they do on any rank."""
    for found in run_ranks(2, sent_in_parts):
        assert found[1:] == [{f"blocks.{number}": 1 for number in range(3)}] * 3, found


class Around(Block):
    """A block that may run another one in its middle; backward then comes to that one before its own gradients."""

    def forward(self, x: Tensor, inner: nn.Module | None = None) -> Tensor:
        middle = self.lin(x)
        return x + torch.tanh(middle if inner is None else inner(middle))


class Encircled(nn.Module):
    """Block 0, then block 1 after block 2, or around it, or alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Around() for _ in range(3))

    def forward(self, x: Tensor, how: str) -> Tensor:
        first, last, other = self.blocks
        x = first(x)
        return last(x, other) if how == "around" else last(other(x) if how == "after" else x)


def encircle(settings: dict[str, object]) -> None:
    pair = Pair(Encircled(), make_config(**settings))
    for ways in (["alone"], ["alone"], ["after", "around"], ["around", "after"], ["alone"], ["after"]):
        pair.train(*ways)
        pair.check()


@pytest.mark.parametrize("settings", [{}, BARE, {"overlap_comm": False}], ids=str)
def test_ranks_leave_a_known_order_when_one_has_sent_more(settings: dict[str, object]) -> None:
    """Both come to block 2 in backward, one with block 1's gradients sent, the other before it has any."""
    run_ranks(2, encircle, settings)


class Borrowing(Routed):
    """Uses a block's weight once more, outside the block."""

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        return F.linear(super().forward(x, route), self.blocks[0].lin.weight)


def two_backwards(retain: bool) -> None:
    """Two graphs before the first backward, or one graph twice."""
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


@pytest.mark.parametrize("retain", [False, True])
def test_two_backwards_with_a_borrowed_weight(retain: bool) -> None:
    run_ranks(2, two_backwards, retain)


def reductions(pair: Pair) -> int:
    return sum(row.calls for row in pair.optimizer.engine.comm.ledger.rows if row.kind == "reduce")


def evaluated_in_a_window() -> list[int]:
    """Reductions during evaluations, the first of them while no_sync keeps gradients back."""
    pair = Pair(Routed(), make_config())
    pair.train(ALL)
    pair.zero_grad()
    with pair.optimizer.no_sync():
        pair.backward(ALL)
    found = []
    for _ in range(3):
        before = reductions(pair)
        with torch.no_grad():
            pair.model.eval()(pair.batch(pair.rank), ALL)
        pair.model.train()
        found.append(reductions(pair) - before)
    pair.backward(ALL)
    pair.step()
    pair.check()
    return found


def test_a_forward_sends_no_gradients() -> None:
    assert run_ranks(2, evaluated_in_a_window) == [[0, 0, 0]] * 2


def other_kinds(first: str) -> None:
    """A kind of phase whose first time uses less than others of its sort; then one rank alone uses more."""
    pair = Pair(Routed(), make_config())
    pair.train(ALL)
    for routes in ([chain(0, 1)], [chain(0, 1), ALL]):
        pair.zero_grad()
        if first == "no_sync":
            with pair.optimizer.no_sync():
                pair.backward(*routes)
            pair.backward(ALL)
            pair.step()
        else:
            with torch.no_grad():
                pair.model.eval()(pair.batch(pair.rank), routes[pair.rank % len(routes)])
            pair.model.train()
        pair.check()


@pytest.mark.parametrize("first", ["no_sync", "eval"])
def test_what_one_kind_of_phase_knows_another_may_use(first: str) -> None:
    run_ranks(2, other_kinds, first)


def scaled(steps: list[list[Route]], edit: bool) -> list[tuple[float, bool]]:
    """Difference from the plain model and whether the step was skipped, after each step."""
    pair = Pair(Routed(), make_config(), dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for routes in steps:
        before, momentum = copy.deepcopy(pair.plain.state_dict()), copy.deepcopy(pair.plain_optimizer.state_dict())
        pair.zero_grad()
        each = routes * (pair.world // len(routes))
        for rank in range(pair.world):
            (pair.plain(pair.batch(rank), each[rank]).square().mean() / pair.world).backward()
        loss = pair.model(pair.batch(pair.rank), each[pair.rank]).square().mean()
        if edit:
            (loss * 2).backward()
            for parameter in (p for group in pair.optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(2)
            pair.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(pair.optimizer)
            scaler.update()
        pair.plain_optimizer.step()
        if pair.optimizer.step_was_skipped:
            pair.plain.load_state_dict(before)
            pair.plain_optimizer.load_state_dict(momentum)
        pair.steps += 1
        found.append((pair.difference(), pair.optimizer.step_was_skipped))
    return found


@pytest.mark.parametrize("edit", [False, True], ids=["GradScaler", "by hand"])
@pytest.mark.parametrize("world", [1, 2])
def test_late_gradients_are_not_mixed_with_scaled_ones(world: int, edit: bool) -> None:
    """In the step that first shows another order, what comes late cannot be added any more; later it can."""
    changed = BRANCHES if world == 2 else [BRANCHES[1]]
    steps = [[BRANCHES[0]], [BRANCHES[0]], changed, changed, changed[::-1], changed]
    for found in run_ranks(world, scaled, steps, edit):
        assert max(off for off, _ in found) < 1e-9, found
        assert [skipped for _, skipped in found].count(True) <= 1, found


def silent_peer() -> str:
    """Rank 1 stays away; what rank 0 raises when everything runs in the caller's order."""
    pair = Pair(Routed(), make_config(overlap_comm=False, hang_timeout=1))
    pair.train(ALL)
    if pair.rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(RuntimeError) as caught:
        pair.train(ALL)
    with pytest.raises(RuntimeError, match="no longer in step"):
        pair.train(ALL)
    dist.barrier()
    return str(caught.value)


def test_without_overlap_the_error_is_named_too() -> None:
    message = run_ranks(2, silent_peer)[0]
    assert "no longer in step" in message and "rank 0 was gathering blocks.0" in message


class Positions(nn.Module):
    """Returns a part of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 8))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count]


class Placed(nn.Module):
    """Adds positions at the start, and once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(len(x))
        x = x + positions
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * positions


def placed(persist: int, compute: str) -> None:
    pair = Pair(Placed(), make_config(persist=persist, **BARE))
    for _ in range(3):
        pair.zero_grad()
        for rank in range(pair.world):
            (pair.plain(pair.batch(rank)).square().mean() / pair.world).backward()
        pair.model(pair.batch(pair.rank)).square().mean().backward()
        pair.step()
        pair.check()
    with torch.no_grad():
        part = pair.model.positions(5) if compute == "module" else pair.model(pair.batch(0))
        wanted = pair.plain.positions(5) if compute == "module" else pair.plain(pair.batch(0))
        torch.testing.assert_close(part, wanted)


@pytest.mark.parametrize("compute", ["model", "module"])
@pytest.mark.parametrize("persist", [0, 1000])
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_returns_a_view_of_its_weight(world: int, persist: int, compute: str) -> None:
    """The weight's memory goes when the module is left, and so would the view."""
    run_ranks(world, placed, persist, compute)


def touched_between(settings: dict[str, object]) -> list[str]:
    """Uses between forward and backward that were not refused for what they are, and gradients that are not alike."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    share(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, make_config(**settings))
    x = torch.ones(2, 8)
    norms, wrong = [], []
    for step in range(4):
        loss = model(x).sum()
        weight = model[1].weight
        if step == 3:
            uses = {"add_": lambda w: w.add_(1), "data": lambda w: w.data.zero_(), "norm": lambda w: w.norm()}
            for name, use in uses.items():
                try:
                    with torch.no_grad():
                        use(weight)
                    wrong.append(name)
                except RuntimeError as error:
                    if "parameter '1.weight': its values are partitioned" not in str(error):
                        wrong.append(f"{name}: {error}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    if len(set(norms)) > 1:
        wrong.append(f"norms {norms}")
    return wrong


@pytest.mark.parametrize("settings", [{}, BARE, {"persist": 1000}], ids=["kept", "released", "persistent"])
def test_weights_kept_for_backward_are_guarded(settings: dict[str, object]) -> None:
    assert run_ranks(2, touched_between, settings) == [[], []]


class Editing(nn.Linear):
    """Edits its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def edited(persist: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8), Editing(8, 8))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(persist=persist))
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 8))
    model[1].__class__ = nn.Linear
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("persist", [0, 1000])
@pytest.mark.parametrize("world", [1, 2])
def test_an_edit_inside_forward_is_not_lost_silently(world: int, persist: int) -> None:
    for message in run_ranks(world, edited, persist):
        assert "1.weight" in message and "edit is lost" in message and "load_state_dict" in message


class Stubborn(nn.Module):
    """Calls a layer again whose edit was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, edit: bool) -> Tensor:
        first, second = self.layers
        if edit:
            first.__class__ = Editing
            with pytest.raises(RuntimeError, match="edit is lost"):
                first(x)
            first.__class__ = nn.Linear
        return second(first(x))


def edit_caught() -> bool:
    model = Stubborn()
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**BARE))
    model(torch.ones(2, 8), False)
    return bool(model(torch.ones(2, 8), True).isfinite().all())


def test_a_layer_whose_edit_was_named_has_values_in_the_same_forward() -> None:
    assert run_ranks(2, edit_caught) == [True, True]


def edited_by_hand(clipping: float) -> None:
    """Between backward and step: one gradient taken away, one replaced, one changed in place; on every rank."""
    pair = Pair(Routed(3), make_config(persist=9, gradient_clipping=clipping))
    for _ in range(3):
        pair.zero_grad()
        pair.backward(ALL[:3])
        plain = dict(pair.plain.named_parameters())
        plain["blocks.0.lin.weight"].grad = None
        plain["blocks.1.lin.weight"].grad.mul_(3)
        plain["blocks.2.lin.bias"].grad.mul_(2)
        for piece in pair.optimizer._slices.stepped:
            if piece.name == "blocks.0.lin.weight":
                piece.parameter.grad = None
            if piece.name == "blocks.1.lin.weight":
                piece.parameter.grad = piece.parameter.grad * 3
            if piece.name == "blocks.2.lin.bias":
                piece.parameter.grad.mul_(2)
        norm = nn.utils.clip_grad_norm_(pair.plain.parameters(), clipping or math.inf)
        pair.step()
        pair.check()
        assert pair.optimizer.grad_norm == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize("clipping", [0.0, 0.01])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_edited_by_hand(world: int, clipping: float) -> None:
    run_ranks(world, edited_by_hand, clipping)


def odd_leaf() -> list[str]:
    model = Routed()
    config = make_config()
    config["zero_optimization"]["leaf_module"] = {"names": ["blocks.0", "nosuch"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    return [str(warning.message) for warning in caught if "leaf_module" in str(warning.message)]


def test_a_leaf_that_is_not_there_is_named() -> None:
    [[message]] = run_ranks(1, odd_leaf, init=False)
    assert "'nosuch'" in message and "blocks.0" not in message
