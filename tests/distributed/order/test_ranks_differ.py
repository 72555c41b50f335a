"""Ranks that use different parts of a model, or the same parts in different orders, train like plain torch."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import Tensor, nn

from tests.support.branch_routes import ALL, BARE, BRANCHES, follow
from tests.support.branching_models import Block, Route, Routed, chain, make_config
from tests.support.rank_pool import run_ranks, some, spread
from tests.support.sharded_and_plain import Pair

# Different orders of the same blocks.


@pytest.mark.parametrize(
    "settings",
    some([{}, {"reuse": 0, "prefetch": 0}, {"overlap_comm": False}, {"live": 0}], 2),
    ids=["default", "bare", "inline", "live0"],
)
def test_gradients_finished_in_opposite_orders(settings: dict[str, object]) -> None:
    """If two ranks issued reductions of equal size in different orders, sums would be wrong without any error."""
    assert run_ranks(2, follow, [BRANCHES] * 3, settings) == [0, 0]


def test_opposite_orders_after_a_common_one() -> None:
    run_ranks(2, follow, [[BRANCHES[0]], [BRANCHES[0]], BRANCHES, BRANCHES[::-1]], {})


def test_opposite_orders_on_four_ranks() -> None:
    routes = [((0, 1), (2, 3)), ((1, 0), (2, 3)), ((0, 1), (3, 2)), ((1, 0), (3, 2))]
    run_ranks(4, follow, [routes] * 2 + [routes[::-1]], {}, local_world_size=2)


# Parts of a known order, and additional blocks.


PARTS = [{}, {"reuse": 0, "prefetch": 0}, {"persist": 1000}, {"live": 0}]


@pytest.mark.parametrize("settings", some(PARTS, 2), ids=["default", "bare", "persistent", "live0"])
def test_parts_of_a_known_sequence(settings: dict[str, object]) -> None:
    """A rank takes part in gathers and reductions of blocks that it skips.

    Forward and backward each end with an exchange, because a rank may need more. Persistent parameters need no gathers
    and thus no exchange.
    """
    steps = [
        [ALL],
        [ALL, chain(0, 3)],
        [chain(0, 2), chain(1, 3)],
        [((3,),), ALL],
        [((0,),), ALL],
        [chain(1, 2), chain(1, 2)],
    ]
    assert run_ranks(2, follow, steps, settings) == [0 if "persist" in settings else 2] * 2


def test_used_on_one_rank_only_counts_zero_elsewhere() -> None:
    """Ranks that skip a block contribute zeros to the mean of its gradient."""
    routes = [ALL, chain(0, 3), chain(0, 3), chain(0, 2, 3)]
    run_ranks(4, follow, [routes] * 3, {})


def test_unused_module_keeps_its_weights_and_momentum() -> None:
    """A module that no rank uses gets no update, as with ``grad is None`` in plain torch.

    Neither weight decay nor the previous step's gradient may change it.
    """
    run_ranks(2, follow, [[ALL], [ALL], [chain(0, 1)], [chain(2, 3)], [ALL]], {})


def test_gradients_stay_until_zero_grad() -> None:
    run_ranks(2, follow, [[ALL], [chain(0, 1)], [ALL, chain(0, 3)]], {}, zero_grad=False)


KNOWN = {"first": chain(0, 1), "last": chain(2, 3)}
PERSIST = {"partitioned": 0, "persistent": 1000}


@pytest.mark.parametrize(("known", "persist"), spread(KNOWN, PERSIST, 2))
def test_first_use_after_several_steps(known: str, persist: str) -> None:
    """Persistent parameters are one unit. If the last blocks are known, backward reaches the first ones too late.

    Their gradients arrive after the unit was reduced, so they are stray.
    """
    run_ranks(2, follow, [[KNOWN[known]]] * 3 + [[ALL]] * 2 + [[KNOWN[known]]], {"persist": PERSIST[persist]})


@pytest.mark.parametrize("known", KNOWN)
def test_late_gradient_on_one_rank(known: str) -> None:
    """Persistent parameters need no gather, so one rank may use them first; the step sync finds its stray gradient."""
    steps = [[KNOWN[known]]] * 3 + [[KNOWN[known], ALL]] * 2 + [[ALL]]
    run_ranks(2, follow, steps, {"persist": 1000})


def forward_fails(settings: dict[str, object], steps: list[list[Route]]) -> bool:
    """Let a forward fail between each backward and its step, which must still use the gradients.

    Args:
        settings: keys for ``make_config``; in stage 2 gradients are held by ``no_sync``.
        steps: the routes of each step.

    Returns:
        True if this rank had a stray gradient in some step.
    """
    pair, late = Pair(Routed(), make_config(**settings)), False
    for routes in steps:
        pair.zero_grad()
        with pair.optimizer.no_sync() if settings.get("stage") == 2 else contextlib.nullcontext():
            pair.backward(*routes)
        late |= any(gradient.has_stray() for unit in pair.optimizer.engine.units for gradient in unit.gradients)
        with pytest.raises(RuntimeError, match="shapes"):
            pair.model(pair.batch(pair.rank)[:, :3], routes[0])
        pair.step()
        pair.check()
    return late


def test_a_forward_fails_while_a_late_gradient_waits_for_the_boundary() -> None:
    steps = [[KNOWN["last"]]] * 3 + [[KNOWN["last"], ALL]] * 2 + [[ALL]]
    assert any(run_ranks(2, forward_fails, {"persist": 1000}, steps))


def test_a_forward_fails_while_gradients_are_held_by_no_sync() -> None:
    run_ranks(2, forward_fails, {"stage": 2}, [[ALL], [chain(0, 1), ALL]])


class Detached(Routed):
    """A model in which blocks from number ``cut`` on run in forward, but get no gradient."""

    def forward(self, x: Tensor, cut: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = x + y.detach() if index >= cut else y
        return x


def detached(settings: dict[str, object]) -> None:
    """Train with varying ``cut``, so that backward reaches blocks for the first time after their order was learned."""
    pair = Pair(Detached(), make_config(**settings))
    for cut in (2, 2, 4, 2, 4):
        pair.train(cut)
        pair.check()


@pytest.mark.parametrize("settings", some([{}, {"reuse": 0, "prefetch": 0}], 2), ids=["default", "bare"])
def test_gradient_that_comes_late(settings: dict[str, object]) -> None:
    run_ranks(2, detached, settings)


def test_ranks_take_different_branches() -> None:
    """Both branches are known from steps in which all ranks took the same one.

    The two known orders part at their first use, so ranks exchange the units that they need there.
    """
    branches = [chain(0, 1), chain(2, 3)]
    common = [[branches[0]], [branches[1]], [branches[0]], [branches[1]]]
    run_ranks(2, follow, [*common, branches, branches[::-1], [ALL], branches, [branches[1]]], {})


def random_routes(seed: int, world: int) -> list[list[Route]]:
    """Return the routes of seven steps.

    All ranks call all blocks in the first step. In every other step the ranks take one common route with probability
    0.3, and otherwise each takes its own random blocks.
    """
    rng = random.Random(seed)

    def route() -> Route:
        blocks = rng.sample(range(4), rng.randint(1, 4))
        cut = rng.randint(0, len(blocks))
        return tuple(stage for stage in (tuple(blocks[:cut]), *((block,) for block in blocks[cut:])) if stage)

    steps: list[list[Route]] = [[ALL]]
    for _ in range(6):
        same = route()
        steps.append([same if rng.random() < 0.3 else route() for _ in range(world)])
    return steps


def random_settings(seed: int) -> dict[str, object]:
    rng = random.Random(-seed)
    return {
        "prefetch": rng.choice([0, 512, 10**9]),
        "reuse": rng.choice([0, 1024, 10**9]),
        "live": rng.choice([0, 600, 10**9]),
        "overlap_comm": rng.random() < 0.7,
        "hang_timeout": 10,
    }


@pytest.mark.parametrize("seed", some(range(8), 2))
def test_random_parts_on_every_rank(seed: int) -> None:
    run_ranks(2, follow, random_routes(seed, 2), random_settings(seed))


@pytest.mark.parametrize("seed", some(range(8, 10), 2))
def test_random_parts_on_four_ranks(seed: int) -> None:
    run_ranks(4, follow, random_routes(seed, 4), random_settings(seed), local_world_size=2)


@pytest.mark.campaign
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", range(10, 60))
def test_random_parts(seed: int, world: int) -> None:
    run_ranks(world, follow, random_routes(seed, world), random_settings(seed))


# Units that the known orders lack.


LEAVES: dict[str, list[list[Route]]] = {
    "to the same block from different ones": [[chain(0, 2), chain(1, 2)], [chain(3, 0, 2), chain(3, 1, 2)]],
    "at different uses": [[chain(0, 2), chain(1, 2)], [chain(0, 3), chain(1, 3)]],
    "to a block that none has used, alone": [[chain(0, 1)], [chain(0, 1)], [chain(0, 1), chain(0, 2)], [chain(0, 2)]],
    "to two such blocks": [[chain(0, 1)], [chain(0, 1)], [chain(1, 2), chain(0, 1)], [chain(1), chain(3, 2)]],
    "after gradients that came late": [[ALL], [ALL], BRANCHES, [chain(0, 1)], [chain(0, 1), chain(0, 1, 2)]],
}


@pytest.mark.every(4)
@pytest.mark.parametrize("settings", [{}, BARE, {"live": 0}, {"overlap_comm": False}], ids=str)
@pytest.mark.parametrize("steps", LEAVES)
def test_ranks_leave_a_known_order(steps: str, settings: dict[str, object]) -> None:
    run_ranks(2, follow, LEAVES[steps], settings)


def test_a_rank_asks_again_for_units_released_by_the_live_limit() -> None:
    """With a live limit of 0, a unit that is gathered for the other rank is released at once.

    So a rank that uses the blocks in the other order must ask for the unit again.
    """
    run_ranks(2, follow, [[BRANCHES[0]], [BRANCHES[0]], BRANCHES, BRANCHES], {"live": 0})


class Around(Block):
    """A block that may run another block inside itself. Backward reaches the inner block before the outer weights."""

    def forward(self, x: Tensor, inner: nn.Module | None = None) -> Tensor:
        middle = self.lin(x)
        return x + torch.tanh(middle if inner is None else inner(middle))


class Encircled(nn.Module):
    """A model that runs block 0, and then block 1 after block 2 ("after"), around block 2 ("around"), or without it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Around() for _ in range(3))

    def forward(self, x: Tensor, how: str) -> Tensor:
        first, last, other = self.blocks
        x = first(x)
        return last(x, other) if how == "around" else last(other(x) if how == "after" else x)


def encircle(settings: dict[str, object]) -> None:
    """Train steps in which ranks run block 1 in different ways."""
    pair = Pair(Encircled(), make_config(**settings))
    for ways in (["alone"], ["alone"], ["after", "around"], ["around", "after"], ["alone"], ["after"]):
        pair.train(*ways)
        pair.check()


@pytest.mark.parametrize("settings", some([{}, BARE, {"overlap_comm": False}], 2), ids=str)
def test_ranks_leave_a_known_order_when_one_has_sent_more(settings: dict[str, object]) -> None:
    """When backward needs block 2, one rank has reduced block 1, and the other has no gradient of block 1 yet."""
    run_ranks(2, encircle, settings)
