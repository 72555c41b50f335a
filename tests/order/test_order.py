"""The order of collectives, simulated: ranks issue the same, wait for nothing that nobody issues, and are silent."""

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
    """Forward along each step's route of the rank, backward along it in reverse, step; returns the ranks.

    Args:
        routes: of each step, of each rank.
        world: of the ranks.
        steps_silent: how many last steps must not exchange anything but what a step always does.
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
        assert len(world.exchanges) - marks[0] == steps_silent, "more was exchanged than the sums of the steps"
    return ranks


def check(ranks: Sequence[Rank], world: World) -> None:
    """Equal orders, every gradient delivered once."""
    assert all(issued == world.issued[0] for issued in world.issued), world.issued
    for rank in ranks:
        assert rank.delivered == rank.given, f"gradients {rank.given} were given, {rank.delivered} delivered"


ROUTES: list[Uses] = [(0, 1, 2), (2, 1, 0), (0,), (1, 2), (0, 1, 0), ()]


def test_equal_routes_are_silent_from_the_second_step_on() -> None:
    for route in ROUTES:
        if set(route) == set(range(UNITS)):
            train([[route, route]] * 3, World(2), steps_silent=1)


def ask_in_vain(routes: Sequence[Sequence[Uses]]) -> bool:
    """Whether one rank alone uses a unit once more than ever before, where every step before was the same on all ranks.

    Such steps are silent once every unit has been used: no rank would hear another ask.
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
    """Whatever route each rank takes in each of two steps after a common one: they train, or one asks in vain."""
    refused = 0
    for one, other in itertools.product(itertools.product(ROUTES, repeat=2), repeat=2):
        routes = [(first, first), one, other]
        if ask_in_vain(routes):
            with pytest.raises(Deadlock):
                train(routes, World(2))
            refused += 1
        else:
            train(routes, World(2))
    assert refused == (370 if set(first) == set(range(UNITS)) else 0)  # of 1296


def test_ranks_in_different_passes_are_refused_though_they_say_the_same() -> None:
    """One asks at the end of its forward, where nobody listens, and the others at the end of their backward."""
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
    """A layer's own unit, then one of its experts, by the rank's data; layer after layer."""
    draw = random.Random(1000 * step + rank)
    return tuple(unit for layer in range(layers) for unit in _layer(layer * (count + 1), draw.randrange(count)))


def _layer(first: int, expert: int) -> Uses:
    return (first, first + 1 + expert)


@pytest.mark.parametrize("live", [1000, 8], ids=["all may be gathered", "two units may be gathered"])
@pytest.mark.parametrize("alike", [False, True], ids=["each rank its own", "all ranks the same"])
def test_experts(live: int, alike: bool) -> None:
    """Ways through experts are too many to be known: ranks stay in step, and gather little that nobody wants."""
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
    """Train along a way in each step, all steps promised to be alike."""
    rank = Rank(world, number, SIZES, static=True)
    for way in ways:
        rank.forward(way[number])
        rank.backward(way[number][::-1])
        rank.step()
    return rank


def test_a_static_graph_is_silent_though_modules_are_left_out() -> None:
    """Without the promise a forward that leaves units out ends with a round: another rank may come to want them."""
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
    """Then a phase asks at most where the ways part, and at its end."""
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
    steps = len(ways)  # of a forward, a backward and a sum each
    assert len(world.exchanges) - marks[-1] <= steps * (2 * 3 + 1), len(world.exchanges) - marks[-1]
