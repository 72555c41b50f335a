"""Units that a rank retains for itself stay within the limit, and no more units than necessary are released."""

from __future__ import annotations

from tests.order.rank import Rank
from tests.order.world import World
from zeropp.order.prefetch import Limits
from zeropp.params.unit import UnitState


def gathered(sizes: list[int], live: int) -> Rank:
    """Return a rank whose units are all gathered and not in use."""
    rank = Rank(World(1), 0, sizes, Limits(0, live, 0))
    for unit in rank.units:
        unit.state = UnitState.GATHERED
    return rank


def there(rank: Rank) -> list[int]:
    return [unit.index for unit in rank.units if unit.state is not UnitState.SHARDED]


def test_the_unit_retained_longest_is_released_first() -> None:
    rank = gathered([4, 4, 4, 4], live=8)
    for index in range(4):
        rank.schedule.live_units.retain(index, bounded=True)
    assert there(rank) == list(rank.schedule.live_units.retained) == [2, 3]


def test_no_more_is_given_up_than_has_to_be() -> None:
    rank = gathered([6, 1, 1, 4], live=8)
    for index in (0, 1, 2):
        rank.schedule.live_units.retain(index, bounded=True)
    assert there(rank) == [0, 1, 2, 3]
    rank.schedule.live_units.retain(3, bounded=True)
    assert there(rank) == [1, 2, 3]


def test_planned_units_count_towards_the_limit_and_are_kept() -> None:
    rank = gathered([4, 4, 4], live=8)
    live_units = rank.schedule.live_units
    live_units.planned.add(0)
    for index in (0, 1, 2):
        live_units.retain(index, bounded=True)
    assert there(rank) == [0, 2] and set(live_units.retained) == {0, 2}
    live_units.drop([0])
    assert there(rank) == [0, 2], "unit 0 stays, because the rank may still use it"
    live_units.release_retained()
    assert there(rank) == []


def test_where_nobody_would_hear_everything_is_kept() -> None:
    rank = gathered([4, 4, 4], live=4)
    for index in range(3):
        rank.schedule.live_units.retain(index, bounded=False)
    assert there(rank) == [0, 1, 2]
