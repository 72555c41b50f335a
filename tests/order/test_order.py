"""Simulated ranks issue the same collectives, never wait for one that no rank issues, and stop exchanging messages.

A route is the sequence of units that a rank uses in a pass.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.order.rank import Rank
from tests.order.trial import repeated
from tests.order.world import Deadlock, World
from tests.support.rank_pool import some
from zeropp.order.prefetch import Limits

Uses = tuple[int, ...]
UNITS = 3
SIZES = [4] * UNITS


def train(routes: Sequence[Sequence[Uses]], world: World, *, steps_silent: int = 0) -> list[Rank]:
    """Run forward along each rank's route, backward along its reverse, and a step, for each step; return the ranks.

    Args:
        routes: the route of each rank, for each step.
        world: the world of the ranks.
        steps_silent: number of last steps that must make no exchange but the step sync.
    """
    marks: list[int] = []

    def program(number: int) -> Rank:
        rank = Rank(world, number, SIZES)
        for step, route in enumerate(routes):
            if number == 0 and step == len(routes) - steps_silent:
                marks.append(len(world.exchanges))
            rank.forward(route[number])
            rank.backward(route[number][::-1])
            rank.step()
        return rank

    ranks = world.run(program)
    check(ranks, world)
    if marks:
        assert len(world.exchanges) - marks[0] == steps_silent, "the last steps made exchanges other than step syncs"
    return ranks


def check(ranks: Sequence[Rank], world: World) -> None:
    """Assert equal orders of collectives on all ranks, and that every gradient is reduced exactly once."""
    assert all(issued == world.issued[0] for issued in world.issued), world.issued
    for rank in ranks:
        assert rank.delivered == rank.given, f"gradients {rank.given} arrived, but {rank.delivered} were reduced"


ROUTES: list[Uses] = [(0, 1, 2), (2, 1, 0), (0,), (1, 2), (0, 1, 0), ()]


def test_equal_routes_are_silent_from_the_second_step_on() -> None:
    for route in ROUTES:
        if set(route) == set(range(UNITS)):
            train([[route, route]] * 3, World(2), steps_silent=1)


def ask_in_vain(routes: Sequence[Sequence[Uses]]) -> bool:
    """Return True if one rank alone uses a unit more often than ever before, after steps that were equal on all ranks.

    If these steps have used every unit, later passes end without an exchange, so the other ranks do not take part in
    the request.
    """
    common = routes[0][0]
    for route in routes:
        if any(Counter(each) - Counter(common) for each in route):
            return set(common) == set(range(UNITS)) and len(set(route)) > 1
        if any(each != common for each in route):
            return False
    return False


@pytest.mark.every(3)
@pytest.mark.parametrize("first", some(ROUTES, 2))
def test_two_ranks_two_steps(first: Uses) -> None:
    """After a common first step, two ranks take any routes in two steps. They train, or deadlock if ``ask_in_vain``."""
    refused = 0
    for one, other in itertools.product(itertools.product(ROUTES, repeat=2), repeat=2):
        routes = [(first, first), one, other]
        if ask_in_vain(routes):
            with pytest.raises(Deadlock):
                train(routes, World(2))
            refused += 1
        else:
            train(routes, World(2))
    assert refused == (370 if set(first) == set(range(UNITS)) else 0)  # of 1296 combinations of routes


def test_ranks_in_different_passes_are_refused_though_they_say_the_same() -> None:
    """One rank exchanges at the end of its forward, which is silent, and the other one at the end of its backward."""
    world = World(2)

    def program(number: int) -> None:
        rank = Rank(world, number, [4] * 4, Limits(100, 8, 8))
        rank.forward((0, 1, 2, 3))
        rank.backward((2, 0))
        rank.step()
        rank.forward((0, 1, 0, 2, 3) if number == 0 else (0, 1, 2, 3))
        rank.backward((3, 2, 1, 0))

    with pytest.raises(Deadlock, match="different passes"):
        world.run(program)


@pytest.mark.parametrize("pattern", list(itertools.product(range(2), repeat=3)))
def test_it_does_not_matter_who_goes_on(pattern: tuple[int, ...]) -> None:
    routes = [[(0, 1, 2)] * 2, [(0, 1, 2), (0, 2)], [(2, 1, 0), (0, 1, 2)], [(0, 1, 2), (1,)]]
    expected = World(2)
    train(routes, expected)
    world = World(2, repeated(pattern))
    train(routes, world)
    assert world.issued == expected.issued and world.exchanges == expected.exchanges


def experts(step: int, rank: int, layers: int = 3, count: int = 4) -> Uses:
    """Return a route: for each layer, the layer's unit and the unit of an expert that the rank's data selects."""
    draw = random.Random(1000 * step + rank)
    return tuple(unit for layer in range(layers) for unit in _layer(layer * (count + 1), draw.randrange(count)))


def _layer(first: int, expert: int) -> Uses:
    return (first, first + 1 + expert)


@pytest.mark.parametrize("live", [1000, 8], ids=["all may be gathered", "two units may be gathered"])
@pytest.mark.parametrize("alike", [False, True], ids=["each rank its own", "all ranks the same"])
def test_experts(live: int, alike: bool) -> None:
    """Routes through experts are too many to learn. Ranks still agree, and gather at most twice as often as needed."""
    world, steps = World(2), 40
    issued: list[int] = []

    def program(number: int) -> Rank:
        rank = Rank(world, number, [4] * 15, Limits(4, live, 1000))
        for step in range(steps):
            way = experts(step, 0 if alike else number)
            rank.forward(way)
            rank.backward(way[::-1])
            rank.step()
            if number == 0:
                issued.append(sum(what[0] == "gather" for what in world.issued[0]))
        return rank

    check(world.run(program), world)
    wanted = sum(2 * len(set(experts(step, 0)) | set(experts(step, 0 if alike else 1))) for step in range(20, steps))
    assert issued[-1] - issued[19] <= 2 * wanted, f"{issued[-1] - issued[19]} gathers where {wanted} are wanted"


def static(number: int, world: World, ways: Sequence[Sequence[Uses]]) -> Rank:
    """Train along a route in each step, with ``static_graph``."""
    rank = Rank(world, number, SIZES, static=True)
    for way in ways:
        rank.forward(way[number])
        rank.backward(way[number][::-1])
        rank.step()
    return rank


def test_a_static_graph_is_silent_though_modules_are_left_out() -> None:
    """Without ``static_graph``, a forward that leaves units out ends with an exchange, because a rank may need them."""
    for promised, more in ((True, 0), (False, 1)):
        world, marks = World(2), []

        def program(number: int, world: World = world, marks: list[int] = marks, promised: bool = promised) -> Rank:
            rank = Rank(world, number, SIZES, static=promised)
            for _ in range(5):
                marks.append(len(world.exchanges))
                rank.forward((0, 2))
                rank.backward((2, 0))
                rank.step()
            return rank

        check(world.run(program), world)
        assert len(world.exchanges) - marks[-1] == 1 + more


def test_a_broken_promise_of_a_static_graph_is_named() -> None:
    for other in ((0, 1), (0, 2, 1)):
        world = World(2)
        with pytest.raises(Deadlock, match=r"asking for unit 'unit 1'.*static_graph"):
            world.run(lambda n, world=world, other=other: static(n, world, [((0, 2), (0, 2)), ((0, 2), other)]))


@pytest.mark.parametrize("live", [1000, 4], ids=["all may be gathered", "one unit may be gathered"])
@pytest.mark.parametrize("longer", [False, True], ids=["other ways", "ways that go on"])
def test_ways_that_all_ranks_take_in_turn_are_learned_once(live: int, longer: bool) -> None:
    """After that, a phase has an exchange at most where the routes part and at its end."""
    ways: list[Uses] = [(0, 1), (0, 1, 2), (0, 1, 2, 3)] if longer else [(0, 1), (2, 3), (4, 5)]
    world, marks = World(2), []

    def program(number: int) -> Rank:
        rank = Rank(world, number, [4] * 6, Limits(4, live, 1000))
        for turn in range(6):
            if number == 0 and turn >= 4:
                marks.append(len(world.exchanges))
            for way in ways:
                rank.forward(way)
                rank.backward(way[::-1])
                rank.step()
        return rank

    check(world.run(program), world)
    steps = len(ways)  # each has a forward, a backward and a step sync
    assert len(world.exchanges) - marks[-1] <= steps * (2 * 3 + 1), len(world.exchanges) - marks[-1]
