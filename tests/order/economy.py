"""Properties of learned orders: known passes need no exchange, no useless gather and no useless reduction.

Each function checks one property. A route is the sequence of units that a pass uses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.order.programs import LIMITS, UNITS, Uses
from tests.order.rank import ENDLESS, Rank
from tests.order.world import Deadlock, World
from zeropp.order.prefetch import Limits
from zeropp.params.unit import UnitState

__all__ = ["ECONOMIES"]

FULL: Uses = tuple(range(UNITS))
BACK: Uses = FULL[::-1]
WAYS: list[Uses] = [way for count in range(1, UNITS + 1) for way in itertools.permutations(range(UNITS), count)]
AGAIN, FORK = 4, 3  # numbers of two kinds of exchange in zeropp.order.schedule
Deed = Callable[[Rank], object]


def traces(*deeds: Deed, limits: Limits = ENDLESS, **more: Any) -> list[tuple[list[object], list[tuple[object, ...]]]]:
    """Let two ranks do the same, and return the exchanges and rank 0's collectives of each deed.

    Args:
        deeds: actions of a rank, such as a training step.
        limits: limits of the prefetch plan.
        more: arguments of ``Rank``.
    """
    world = World(2)
    marks: list[tuple[int, int]] = []

    def program(number: int) -> None:
        rank = Rank(world, number, [4] * UNITS, limits, **more)
        for deed in deeds:
            if number == 0:
                marks.append((len(world.exchanges), len(world.issued[0])))
            deed(rank)

    world.run(program)
    ends = [*marks[1:], (len(world.exchanges), len(world.issued[0]))]
    return [(world.exchanges[a:c], world.issued[0][b:d]) for (a, b), (c, d) in zip(marks, ends, strict=True)]


def step(way: Uses, *, back: Uses | None = None, held: bool = False, late: Uses = ()) -> Deed:
    """Return a deed: forward, backward and step.

    Args:
        way: the route of forward.
        back: the route of backward; the reverse of ``way`` by default.
        held: True to run another micro-batch before, over all units, whose gradients are held.
        late: units whose gradients come after all uses of backward.
    """

    def deed(rank: Rank) -> None:
        if held:
            rank.forward(FULL)
            rank.backward(BACK, last=False)
        rank.forward(way)
        rank.backward(way[::-1] if back is None else back, late=late)
        rank.step()

    return deed


def reduced(issued: list[tuple[object, ...]]) -> Counter[object]:
    return Counter(unit for kind, unit in issued if kind == "reduce")


def left_at_once(one: Uses, other: Uses) -> bool:
    """Return True if the first unit that ``other`` needs differently does not occur later in ``one``.

    A rank then notices at that place that the pass takes another route.
    """
    place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return place < len(other) and other[place] not in one[place:]


def a_way_that_all_ranks_leave_another_for_is_known_as_if_there_were_no_other() -> None:
    for first in [(0, 1), (0, 1, 2), (0, 1, 0, 2)]:
        _as_if_there_were_no_other(first)


def _as_if_there_were_no_other(first: Uses) -> None:
    ways = [way for way in WAYS if left_at_once(first, way) and left_at_once(first[::-1], way[::-1])]
    for way, limits in itertools.product(ways, LIMITS):
        *_, (said, issued) = traces(*[step(first)] * 2, *[step(way)] * 3, limits=limits)
        *_, (_, alone) = traces(*[step(way)] * 3, limits=limits)
        assert Counter(issued) == Counter(alone), f"{first}, then {way}, {limits}: {issued}; otherwise {alone}"
        assert set(said) <= {FORK, "step"}, f"{first}, then {way}, {limits}: learned anew"


def a_way_that_was_not_foreseen_sends_each_gradient_once() -> None:
    """After a pass has left the expected route, a later step reduces each gradient of its own route exactly once."""
    for one, other in [((1, 2, 3), (0, 2, 3)), ((2, 1, 3), (0, 1, 3)), ((3, 1), (2, 1))]:
        *_, (said, issued) = traces(*map(step, (one, other, one, one)))
        assert reduced(issued) == Counter(one), f"{one} after {other}: {issued}"
        assert set(said) <= {FORK, "step"}


def a_unit_used_twice_is_sent_once_from_the_first_backward_on() -> None:
    for _, issued in traces(*[step((0, 1, 0, 2, 3))] * 2):
        assert reduced(issued) == Counter(FULL)


def after_an_error_ranks_say_one_word() -> None:
    usual = step(FULL)
    for fails in range(6):
        failures: list[Deed] = [
            lambda rank, fails=fails: rank.forward(FULL, fails=fails),
            lambda rank, fails=fails: rank.forward(FULL) and rank.backward(BACK, fails=fails),
        ]
        for failure in failures:
            *_, (failed, _), (again, _), (silent, _) = traces(usual, usual, failure, usual, usual)
            assert (failed, again, silent) == ([], [AGAIN, "step"], ["step"])


def gradients_held_until_the_step_are_reduced_in_the_last_backward() -> None:
    """The backwards that hold their gradients need no exchange."""
    *_, (said, issued) = traces(step(FULL, back=(1, 0)), *[step(FULL, back=(1, 0), held=True)] * 3)
    assert reduced(issued) == Counter(FULL)
    assert said == [FORK, "step"], "ranks may run backward over different parts of the graph, so one exchange is needed"


def a_gradient_that_came_late_on_one_way_is_waited_for_on_the_others() -> None:
    ways = ((3, 2, 1, 0), (3, 1, 2, 0))
    usual, late = ([step(FULL, back=way, late=units) for way in ways] for units in ((), (3,)))
    *_, (_, issued) = traces(*usual, *usual, *late, limits=Limits(prefetch=0, live=0, reuse=0))
    assert reduced(issued) == Counter(FULL)


def a_weight_whose_gradient_was_not_expected_stays_while_backward_may_need_it() -> None:
    """One parameter of a unit has its usual gradient, and another one has its first gradient later in the backward."""
    rank = Rank(World(1), 0, [4])
    unit = rank.units[0]
    unit.gradients[0].trained = (True, True)
    rank.reductions.update_trained()
    for both in (False, True):
        rank.forward((0,))
        rank.schedule.begin_phase(rank._backward_key(rank.outstanding), None)
        rank.backward_uses.fetch_known_uses()
        rank.backward_uses.use(unit)
        if rank.reductions.count_gradient(0, 0):
            rank.reductions.send_complete()
            rank.backward_uses.end_use(unit)
        assert unit.state is UnitState.UNSHARDED, f"with both: {both}"
        if both and rank.reductions.count_gradient(0, 1):
            rank.reductions.send_complete()
            rank.backward_uses.end_use(unit)
        rank.backward_uses.give_up()
        rank.schedule.end_phase()
        rank.since += 1
        rank.step()
        assert unit.state is UnitState.SHARDED


def a_forward_that_uses_all_that_is_inside_its_module_is_silent() -> None:
    for way, words in (((0, 1), []), ((0,), [FORK])):
        *_, (said, _) = traces(*[step(way)] * 3, inside=(0, 1))
        assert said == [*words, "step"], f"{way}: {said}"


def where_nothing_is_gathered_a_rank_may_run_a_forward_alone() -> None:
    usual = step(FULL)
    alone: Deed = lambda rank: rank.number or rank.forward(FULL, grad=False)  # noqa: E731
    *_, (said, issued), _ = traces(
        usual, usual, alone, usual, lambda rank: rank.freeze((1,)) or step(FULL)(rank), persistent=FULL
    )
    assert said == ["step"] and not any(kind == "gather" for kind, _ in issued)


def a_set_of_trained_parameters_is_learned_once() -> None:
    usual = step(FULL)
    some: Deed = lambda rank: rank.freeze((1,))  # noqa: E731
    every: Deed = lambda rank: rank.freeze(())  # noqa: E731
    *_, (said, issued) = traces(usual, usual, some, usual, every, usual, some, usual)
    assert said == ["step"] and reduced(issued) == Counter((0, 2, 3))


def a_backward_that_comes_to_more_since_others_are_trained_is_heard() -> None:
    """If other units are trained, ranks drop the known order of the forward and learn a new one.

    They then exchange which units the backward may reach, so the backward may use more units than before.
    """

    def program(leaves: Uses, back: Uses) -> Deed:
        return lambda rank: rank.forward(FULL, leaves=leaves) and rank.backward(back) and rank.step()

    short = (2, 1, 0)
    changed: Deed = lambda rank: rank.freeze((0,))  # noqa: E731
    more: Deed = lambda rank: program((), BACK if rank.number else short)(rank)  # noqa: E731
    traces(*[program((3,), short)] * 2, changed, program((), short), more)


def ranks_that_failed_in_different_passes_are_told_before_they_go_on() -> None:
    """The ranks have issued the same collectives, but the rank that finished one more pass has learned more."""
    world = World(2)

    def program(number: int) -> None:
        rank = Rank(world, number, [4] * UNITS)
        for _ in range(2):
            step(FULL, held=True)(rank)
        rank.forward(FULL)
        if rank.backward(BACK, last=False, fails=UNITS + 1 if number == 0 else None):
            rank.forward(FULL, fails=0)
        rank.forward(FULL)

    try:
        world.run(program)
    except Deadlock as refused:
        assert "different passes" in str(refused), refused
    else:
        raise AssertionError("ranks continued although they had finished different passes")


ECONOMIES: list[Callable[[], None]] = [
    a_way_that_all_ranks_leave_another_for_is_known_as_if_there_were_no_other,
    a_way_that_was_not_foreseen_sends_each_gradient_once,
    a_unit_used_twice_is_sent_once_from_the_first_backward_on,
    after_an_error_ranks_say_one_word,
    gradients_held_until_the_step_are_reduced_in_the_last_backward,
    a_gradient_that_came_late_on_one_way_is_waited_for_on_the_others,
    a_weight_whose_gradient_was_not_expected_stays_while_backward_may_need_it,
    a_forward_that_uses_all_that_is_inside_its_module_is_silent,
    where_nothing_is_gathered_a_rank_may_run_a_forward_alone,
    a_set_of_trained_parameters_is_learned_once,
    a_backward_that_comes_to_more_since_others_are_trained_is_heard,
    ranks_that_failed_in_different_passes_are_told_before_they_go_on,
]
