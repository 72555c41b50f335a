"""A simulated prefetch plan keeps its limits, gathers each unit before its use, and gathers no unit needlessly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zeropp.order.prefetch import Limits, Plan, make_plan

HUGE = 10**12


@dataclass
class Run:
    """Counts from the simulation of a plan.

    Attributes:
        gathers: number of units issued in total.
        demanded: number of units issued only at the use that needs them.
        most_held: largest number of elements gathered at once, without a unit in use that is dropped after its use.
        most_ahead: largest number of elements issued and not yet used.
        live: units that are gathered at the end.
    """

    gathers: int
    demanded: int
    most_held: int
    most_ahead: int
    live: frozenset[int]


def carry_out(plan: Plan, uses: list[int], live: frozenset[int], numel: list[int]) -> Run:
    """Simulate a plan and assert that each unit is issued once before its use and dropped only after it."""
    live, ahead = set(live), set()
    gathers = demanded = most_held = most_ahead = 0
    assert len(plan.issue) == len(plan.drop) == len(uses)
    for use, issue, drop in zip(uses, plan.issue, plan.drop, strict=True):
        for position, unit in enumerate(issue):
            assert unit not in live, f"unit {unit} is issued while it is live"
            assert unit != use or position == 0, "the unit in use is not the first to be issued"
            live.add(unit)
            if unit != use:
                ahead.add(unit)
            gathers += 1
            demanded += unit == use
        assert use in live, f"unit {use} is used and was never issued"
        ahead.discard(use)
        most_ahead = max(most_ahead, sum(numel[unit] for unit in ahead))
        # Units are dropped at this use to make room for prefetched units. The unit in use counts in addition until the
        # use ends.
        for unit in drop:
            assert unit in live, f"unit {unit} is dropped and not live"
            assert unit not in ahead, f"unit {unit} is dropped before the use it was fetched for"
            live.remove(unit)
        most_held = max(most_held, sum(numel[unit] for unit in live - {use}), sum(numel[unit] for unit in live))
    assert plan.live == live
    return Run(gathers, demanded, most_held, most_ahead, plan.live)


@dataclass
class Case:
    uses: list[int]
    lookahead: list[int]
    live: frozenset[int]
    numel: list[int]
    limits: Limits

    def plan(self) -> Plan:
        return make_plan(self.uses, self.lookahead, self.live, self.numel, self.limits)

    def run(self) -> Run:
        return carry_out(self.plan(), self.uses, self.live, self.numel)


@st.composite
def cases(draw: st.DrawFn, equal: bool = False, start_empty: bool = False) -> Case:
    count = draw(st.integers(1, 7))
    size = st.just(10) if equal else st.integers(1, 40)
    numel = draw(st.lists(size, min_size=count, max_size=count))
    order = st.lists(st.integers(0, count - 1), max_size=20)
    bound = st.integers(0, 160) | st.just(HUGE)
    limits = Limits(draw(bound), draw(bound), draw(bound))
    live: set[int] = set()
    if not start_empty:  # units that an earlier phase may have left gathered, within the same limits
        for unit in draw(st.lists(st.integers(0, count - 1), unique=True)):
            if sum(numel[u] for u in live) + numel[unit] <= limits.live:
                live.add(unit)
    return Case(draw(order), draw(order), frozenset(live), numel, limits)


def gpt(layers: int) -> tuple[list[int], list[int]]:
    """Return the uses of forward and of backward for a stack of layers."""
    return list(range(layers)), list(reversed(range(layers)))


# Properties of every plan.


@given(cases())
@settings(max_examples=600)
@example(Case([0, 1, 0], [], frozenset(), [5, 5], Limits(5, 5, HUGE)))
@example(Case([0, 1, 2, 1, 0], [2], frozenset({1}), [3, 2, 4], Limits(4, 5, HUGE)))
def test_a_plan_can_be_carried_out_within_its_limits(case: Case) -> None:
    run = case.run()
    assert run.most_held <= case.limits.live
    largest = max(case.numel) if case.limits.prefetch else 0
    assert run.most_ahead <= max(case.limits.prefetch, largest), "prefetch exceeds its limit with more than one unit"


@given(cases())
@settings(max_examples=200)
def test_plans_are_functions(case: Case) -> None:
    again = [make_plan(case.uses, case.lookahead, case.live, case.numel, case.limits) for _ in range(2)]
    assert again[0] == again[1]
    tuples = make_plan(tuple(case.uses), tuple(case.lookahead), frozenset(case.live), tuple(case.numel), case.limits)
    assert tuples == again[0]


@given(cases(start_empty=True))
@settings(max_examples=200)
def test_limits_of_zero(case: Case) -> None:
    """A limit of 0 turns off prefetch or reuse. With all limits 0, each unit is gathered at its use."""
    uses, ahead, numel = case.uses, case.lookahead, case.numel
    none = make_plan(uses, ahead, frozenset(), numel, Limits(0, 0, 0))
    assert none.issue == tuple((unit,) for unit in uses) == none.drop and none.live == frozenset()
    assert make_plan(uses, ahead, frozenset(), numel, Limits(HUGE, 0, HUGE)) == none
    no_prefetch = make_plan(uses, ahead, frozenset(), numel, Limits(0, case.limits.live, case.limits.reuse))
    assert all(set(issue) <= {unit} for unit, issue in zip(uses, no_prefetch.issue, strict=True))
    no_reuse = make_plan(uses, ahead, frozenset(), numel, Limits(case.limits.prefetch, case.limits.live, 0))
    run = carry_out(no_reuse, uses, frozenset(), numel)
    assert all(unit in drop for unit, drop in zip(uses, no_reuse.drop, strict=True)), "a unit was kept for reuse"
    assert run.gathers >= len(uses)


@given(cases())
@settings(max_examples=200)
def test_without_limits_each_unit_is_fetched_once(case: Case) -> None:
    case.limits = Limits(HUGE, HUGE, HUGE)
    run = case.run()
    needed = (set(case.uses) | set(case.lookahead) if case.uses else set()) - case.live
    assert run.gathers == len(needed)
    assert run.demanded <= 1, "only the first use may gather its own unit"
    assert run.live - case.live <= set(case.lookahead), "a unit was kept without a later use"


@given(cases(start_empty=True))
@settings(max_examples=200)
def test_nothing_is_held_for_a_use_that_never_comes(case: Case) -> None:
    run = case.run()
    assert run.live <= set(case.lookahead)
    case.lookahead = []
    assert case.run().live == frozenset()


@given(cases())
@settings(max_examples=200)
@example(Case([0], [1, 0, 2], frozenset(), [2, 1, 20], Limits(21, 21, 0)))
def test_the_lookahead_never_costs_a_gather(case: Case) -> None:
    """Both phases need at most one gather per use, plus one for each unit that was gathered before."""
    seen = case.run()
    after = make_plan(case.lookahead, [], seen.live, case.numel, case.limits)
    with_it = seen.gathers + carry_out(after, case.lookahead, seen.live, case.numel).gathers
    most = len(case.uses) + len(case.lookahead)
    assert with_it <= most + len(case.live)


# Properties of good plans.


def test_prefetch_hides_every_gather_but_the_first() -> None:
    forward, backward = gpt(6)
    run = Case(forward, backward, frozenset(), [10] * 6, Limits(10, 20, 0)).run()
    assert (run.demanded, run.most_ahead) == (1, 10)
    assert run.live == frozenset({4}), "the gather of backward's second unit starts at forward's last use"


@pytest.mark.parametrize(("prefetch", "ahead"), [(19, (0, 1)), (20, (0, 1, 2)), (21, (0, 1, 2))])
def test_prefetched_elements_may_reach_the_limit(prefetch: int, ahead: tuple[int, ...]) -> None:
    plan = make_plan([0, 1, 2, 3], [], frozenset(), [10] * 4, Limits(prefetch, HUGE, 0))
    assert plan.issue[0] == ahead


def test_one_unit_at_most_overtakes_the_one_in_use() -> None:
    """If backward begins with a unit that forward has just released, only one other gather may be issued before it."""
    forward, backward = gpt(6)
    plan = Case(forward, backward, frozenset(), [10] * 6, Limits(HUGE, HUGE, 0)).plan()
    assert plan.issue[-1] == (4,) and plan.live == frozenset({4})
    kept = Case(forward, backward, frozenset(), [10] * 6, Limits(HUGE, HUGE, HUGE)).plan()
    assert kept.live == frozenset(range(6)), "units that stay gathered delay no other gather"


def test_reuse_is_bounded_by_distance() -> None:
    """The reuse distance counts the elements used in between and the reused unit itself."""
    for reuse, kept in [(29, False), (30, True)]:
        plan = make_plan([0, 1, 2, 0], [], frozenset(), [10] * 3, Limits(0, HUGE, reuse))
        assert (0 not in plan.drop[0]) is kept and ((0,) not in plan.issue[3:]) is kept


def test_a_nearer_reuse_wins() -> None:
    plan = make_plan([0, 1, 1, 0], [], frozenset(), [10, 10], Limits(0, 10, HUGE))
    assert plan.drop == ((), (0,), (1,), (0,))
    assert plan.issue == ((0,), (1,), (), (0,))
    kept = make_plan([0, 1, 0, 1], [], frozenset(), [10, 10], Limits(0, 10, HUGE))
    assert kept.drop == ((), (1,), (0,), (1,)), "unit 1 may not push out unit 0, which is used sooner"


def test_forward_keeps_its_last_units_for_backward() -> None:
    forward, backward = gpt(6)
    plan = make_plan(forward, backward, frozenset(), [10] * 6, Limits(0, 30, HUGE))
    assert plan.live == frozenset({3, 4, 5})
    second = make_plan(backward, [], plan.live, [10] * 6, Limits(0, 30, HUGE))
    assert [unit for issue in second.issue for unit in issue] == [2, 1, 0]


def test_forward_keeps_its_last_units_for_backward_with_prefetch() -> None:
    """Prefetching for a later use must not take the room of the unit in use, which backward needs sooner."""
    layers, room = 6, 3
    forward, backward = gpt(layers)
    limits = Limits(HUGE, 10 * room, HUGE)
    plan = make_plan(forward, backward, frozenset(), [10] * layers, limits)
    first = carry_out(plan, forward, frozenset(), [10] * layers)
    second = Case(backward, [], plan.live, [10] * layers, limits).run()
    assert second.demanded == 0, f"backward waits for a gather that forward could have spared: it kept {plan.live}"
    assert first.gathers + second.gathers == 2 * layers - room


@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 6))
@settings(max_examples=100)
def test_prefetch_costs_a_stack_of_layers_no_reuse(layers: int, room: int, ahead: int) -> None:
    """If prefetch is limited to the room for live units, both passes need no more gathers than without prefetch."""
    numel = [10] * layers
    forward, backward = gpt(layers)

    def gathers(prefetch: int) -> int:
        limits = Limits(prefetch, 10 * room, HUGE)
        plan = make_plan(forward, backward, frozenset(), numel, limits)
        first = carry_out(plan, forward, frozenset(), numel)
        return first.gathers + Case(backward, [], plan.live, numel, limits).run().gathers

    assert gathers(10 * min(ahead, room)) <= gathers(0)


@given(cases(equal=True, start_empty=True), st.integers(0, 8))
@settings(max_examples=300)
def test_more_room_never_costs_a_gather(case: Case, more: int) -> None:
    """Larger limits need no more gathers, for units of equal size and without prefetch.

    With different sizes, more room can cost a gather: dropping the unit with the farthest next use is optimal for equal
    sizes only.
    """
    case.limits = Limits(0, case.limits.live, HUGE)
    little = case.run().gathers
    case.limits = Limits(0, case.limits.live + 10 * more, HUGE)
    assert case.run().gathers <= little
