"""Levels, the order of pieces, hops and nodes, computed with integers only."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp.config import ConfigError, load_config
from zeropp.partition.levels import Chain, HopSpec, Mode, Placement, build_chain, ranks_per_node
from zeropp.setup.choices import choose_mode

MAX_WORLD = 4096


@st.composite
def chains(draw: st.DrawFn, limit: int = MAX_WORLD) -> Chain:
    """Draw a divisor chain whose last level is at most ``limit``."""
    levels = [1]
    while levels[-1] * 2 <= limit and draw(st.integers(0, 4)):
        largest = limit // levels[-1]
        levels.append(levels[-1] * draw(st.sampled_from([f for f in (2, 2, 2, 3, 4, 5, 7, 8, 16, 97) if f <= largest])))
    return Chain(tuple(levels))


def pairs(chain: Chain) -> list[tuple[int, int]]:
    """Return every (outer, inner) pair of levels, adjacent or not."""
    return [(outer, inner) for i, inner in enumerate(chain.levels) for outer in chain.levels[i:]]


# Slices and owners.


@given(chains())
@settings(max_examples=30)
def test_pieces_and_ranks_are_one_to_one(chain: Chain) -> None:
    pieces = [chain.slice_index(rank, chain.world) for rank in range(chain.world)]
    assert sorted(pieces) == list(range(chain.world))
    assert [chain.owner(piece) for piece in pieces] == list(range(chain.world))


@given(chains())
@settings(max_examples=15)
def test_slices_nest(chain: Chain) -> None:
    """At each level every slice is on equally many ranks, and lies in the same rank's slice of every smaller level."""
    for outer, inner in pairs(chain):
        held = [chain.slice_index(rank, outer) for rank in range(chain.world)]
        assert sorted(held) == [index for index in range(outer) for _ in range(chain.world // outer)]
        within = [chain.slice_index(rank, inner) for rank in range(chain.world)]
        assert within == [index * inner // outer for index in held]


def test_the_example_of_two_nodes() -> None:
    chain = Chain((1, 2, 4))
    assert [chain.owner(piece) for piece in range(4)] == [0, 2, 1, 3]
    assert [chain.slice_index(rank, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert [chain.hop_ranks(rank, 4, 2) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [chain.hop_ranks(rank, 2, 1) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert chain.hop_ranks(3, 4, 1) == (0, 2, 1, 3)


def test_one_level_is_rank_order() -> None:
    chain = Chain((1, 6))
    assert [chain.owner(piece) for piece in range(6)] == list(range(6))
    assert chain.hop_ranks(4, 6, 1) == tuple(range(6))
    assert Chain((1,)).hops(1, 1) == [] and Chain((1,)).owner(0) == 0 and Chain((1,)).hop_ranks(0, 1, 1) == (0,)


# Hops.


@given(chains(limit=512), st.data())
@settings(max_examples=40)
def test_gathers_end_with_the_whole_buffer(chain: Chain, data: st.DataObject) -> None:
    """Simulate the gathers of all ranks hop by hop with lists of element indices."""
    start = data.draw(st.sampled_from(chain.levels))
    size = 3 * chain.world
    held = {}
    for rank in range(chain.world):
        index = chain.slice_index(rank, start)
        held[rank] = list(range(index * size // start, (index + 1) * size // start))
    for outer, inner in chain.hops(start, 1):
        held = {
            rank: [place for member in chain.hop_ranks(rank, outer, inner) for place in held[member]] for rank in held
        }
        for rank, places in held.items():
            index, part = chain.slice_index(rank, inner), size // inner
            assert places == list(range(index * part, (index + 1) * part)), (outer, inner, rank)
    assert all(places == list(range(size)) for places in held.values())


@given(chains(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_one_hop_between_any_two_levels(chain: Chain, seed: int) -> None:
    """Member i has part i of the slice that all members have at the inner level; the levels need not be adjacent."""
    rng = random.Random(seed)
    for outer, inner in pairs(chain):
        rank = rng.randrange(chain.world)
        members = chain.hop_ranks(rank, outer, inner)
        count = outer // inner
        assert len(members) == len(set(members)) == count and rank in members
        common = chain.slice_index(rank, inner)
        assert [chain.slice_index(member, outer) for member in members] == [common * count + i for i in range(count)]
        assert chain.hop_ranks(rng.choice(members), outer, inner) == members


@given(chains(limit=512), st.data())
@settings(max_examples=40)
def test_hop_groups_partition_the_ranks(chain: Chain, data: st.DataObject) -> None:
    outer, inner = data.draw(st.sampled_from(pairs(chain)))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(chain.world):
        groups.setdefault(chain.hop_ranks(rank, outer, inner), []).append(rank)
    assert sum(len(group) for group in groups) == chain.world
    for group, callers in groups.items():
        assert sorted(group) == callers, "all members must compute the same group"


@given(chains())
@settings(max_examples=40)
def test_groups_of_adjacent_levels_ascend(chain: Chain) -> None:
    """torch sorts the ranks of a group, so the order of pieces must be ascending rank order."""
    for outer, inner in chain.hops(chain.world, 1):
        for rank in (0, chain.world - 1, chain.world // 3):
            members = chain.hop_ranks(rank, outer, inner)
            assert members == tuple(sorted(members))


@given(chains())
@settings(max_examples=30)
def test_hops_walk_down_the_levels(chain: Chain) -> None:
    for outer, inner in pairs(chain):
        hops = chain.hops(outer, inner)
        walked = [outer, *(low for _, low in hops)]
        assert walked == sorted((v for v in chain.levels if inner <= v <= outer), reverse=True)
        assert [high for high, _ in hops] == walked[:-1]


# Allowed sizes.


@given(chains(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_build_chain_takes_sizes_in_any_order(chain: Chain, rng: random.Random) -> None:
    sizes = [*chain.levels, *chain.levels[:2]]
    rng.shuffle(sizes)
    assert build_chain(chain.world, sizes) == chain


@pytest.mark.parametrize(
    ("world", "sizes"), [(8, [3]), (12, [4, 6]), (4, [8]), (8, [0]), (8, [-2]), (8, [2, 3]), (6, [6, 4])]
)
def test_build_chain_refuses(world: int, sizes: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        build_chain(world, sizes)
    legal = [d for d in range(1, world + 1) if world % d == 0]
    assert str(sorted(set(sizes))) in str(caught.value)
    assert f"Sizes that divide {world}: {legal}" in str(caught.value)


def test_a_refusal_states_no_falsehood() -> None:
    """The size 8 is refused for 4 ranks, but not with the reason that 4 does not divide 8."""
    with pytest.raises(ValueError) as caught:
        build_chain(4, [8])
    assert "4 does not divide 8" not in str(caught.value)


@given(st.integers(1, MAX_WORLD), st.lists(st.integers(1, 64), max_size=3))
@settings(max_examples=150)
def test_build_chain_decides_rightly(world: int, sizes: list[int]) -> None:
    wanted = sorted({1, world, *sizes})
    legal = wanted[-1] == world and all(b % a == 0 for a, b in itertools.pairwise(wanted))
    if legal:
        assert build_chain(world, sizes).levels == tuple(wanted)
    else:
        with pytest.raises(ValueError, match="each size must divide the next"):
            build_chain(world, sizes)


@pytest.mark.parametrize("levels", [(), (2, 4), (1, 1), (1, 4, 2), (1, 2, 3), (1, 0)])
def test_a_chain_that_is_none(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must start at 1|no divisor chain"):
        Chain(levels)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 is not a level of \(1, 2, 4\)"):
        Chain((1, 2, 4)).slice_index(0, 3)


# Nodes.


@given(st.integers(1, 64), st.integers(1, 64))
def test_whole_nodes(nodes: int, local: int) -> None:
    assert ranks_per_node(range(nodes * local), local) == (local if nodes * local > 1 else 1)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.data())
def test_the_same_few_ranks_of_each_node(nodes: int, per_node: int, factor: int, data: st.DataObject) -> None:
    """Groups such as a mesh dimension may have part of the ranks of some nodes, equally many of each."""
    local = per_node * factor
    chosen = sorted(data.draw(st.permutations(range(12))).copy()[:nodes])
    ranks = []
    for node in chosen:
        ranks += sorted(node * local + offset for offset in data.draw(st.permutations(range(local)))[:per_node])
    assert ranks_per_node(ranks, local) == (per_node if len(ranks) > 1 else 1)


@pytest.mark.parametrize(
    ("ranks", "local", "expected"),
    [
        ([0, 2], 2, 1),  # a mesh dimension across nodes
        ([0, 1], 2, 2),
        ([2, 3], 2, 2),
        ([0, 2, 4, 6], 4, 2),
        ([0, 1, 2], 8, 3),  # fewer ranks than a node can have
        ([5], 2, 1),
    ],
)
def test_groups_that_are_not_the_world(ranks: list[int], local: int, expected: int) -> None:
    assert ranks_per_node(ranks, local) == expected


@pytest.mark.parametrize(
    ("ranks", "local"),
    [
        ([0, 1, 2], 2),  # two ranks of one node, one of the next
        ([0, 2, 3], 2),
        ([0, 2, 1, 3], 2),  # ranks of one node are not adjacent
        ([0, 1, 2, 3, 4, 5], 4),
        ([0, 1, 4, 6, 7, 8], 4),
    ],
)
def test_uneven_nodes(ranks: list[int], local: int) -> None:
    with pytest.raises(ValueError) as caught:
        ranks_per_node(ranks, local)
    message = str(caught.value)
    assert str(ranks) in message and str([rank // local for rank in ranks]) in message
    assert "LOCAL_WORLD_SIZE" in message and "local_world_size" in message and "Choose a group" in message


@pytest.mark.parametrize("text", ["0", "-1", "two", "2.0"])
def test_a_launcher_that_says_nonsense(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid LOCAL_WORLD_SIZE is an error even if host names are given: the launcher may mean another size."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ValueError) as caught:
        ranks_per_node([0, 1], None, ["a", "a"])
    assert repr(text) in str(caught.value) and "torchrun" in str(caught.value)
    assert '"local_world_size"' in str(caught.value)
    assert ranks_per_node([1], None) == 1  # a single rank needs no node size
    assert ranks_per_node([0, 1], 2) == 2


@pytest.mark.parametrize("text", [None, ""])
def test_hosts_where_no_launcher_says_anything(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert ranks_per_node(range(4), None, ["a", "a", "b", "b"]) == 2
    assert ranks_per_node([3, 9], None, ["b", "a"]) == 1
    assert ranks_per_node(range(3), None, ["a", "a", "a"]) == 3
    for hosts in (["a", "b", "b"], ["a", "b", "b", "a"], ["a", "a", "b", "a"]):  # uneven, or node's ranks not adjacent
        with pytest.raises(ValueError, match=r"same number of ranks.*local_world_size"):
            ranks_per_node(range(len(hosts)), None, hosts)
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE is not set.*torchrun"):
        ranks_per_node(range(2), None)


def test_a_claimed_node_lies_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_per_node(range(4), 2, ["a"] * 4) == 2  # two simulated nodes on one host
    assert ranks_per_node(range(4), 2, ["a", "a", "b", "b"]) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for claimed in (4, None):
        with pytest.raises(ValueError, match=r"4 ranks per node.*rank 0 on host 'a' and rank 2 on host 'b'"):
            ranks_per_node(range(4), claimed, ["a", "a", "b", "b"])


def test_the_environment_is_read_and_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "4")
    assert ranks_per_node(range(8), None) == 4
    assert ranks_per_node(range(8), 2) == 2


# Placement.


def whole(chain: Chain, rank: int, local: int) -> Placement:
    """Return a placement with states and gradients sharded over all ranks, and no cached weights."""
    return Placement(Mode(chain, chain.world, None, chain.world), rank, local)


@given(st.integers(1, 16), st.integers(1, 16), st.data())
def test_link_classes(nodes: int, local: int, data: st.DataObject) -> None:
    """A hop is local exactly if all its members are on one node. Gathers cross nodes first."""
    chain = build_chain(nodes * local, [local])
    rank = data.draw(st.integers(0, chain.world - 1))
    path = whole(chain, rank, local).gather_path(chain.world, 1)
    for hop in path:
        assert (hop.link == "local") == (len({member // local for member in hop.ranks}) == 1)
    links = [hop.link for hop in path]
    assert links == ["cross"] * (nodes > 1) + ["local"] * (local > 1)


@given(chains(limit=256), st.data())
@settings(max_examples=60)
def test_a_level_may_lie_inside_or_across_nodes(chain: Chain, data: st.DataObject) -> None:
    local = data.draw(st.sampled_from(chain.levels))
    rank = data.draw(st.integers(0, chain.world - 1))
    for hop in whole(chain, rank, local).gather_path(chain.world, 1):
        assert hop.link == ("local" if hop.outer <= local else "cross")


@given(chains(), st.data())
@settings(max_examples=40)
def test_the_reduce_path_is_the_mirror(chain: Chain, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, chain.world - 1))
    placement = whole(chain, rank, 1)
    outer, inner = data.draw(st.sampled_from(pairs(chain)))
    gather, reduce = placement.gather_path(outer, inner), placement.reduce_path(inner, outer)
    assert reduce == tuple(reversed(gather))
    assert [(hop.outer, hop.inner) for hop in gather] == chain.hops(outer, inner)
    assert all(hop.ranks == chain.hop_ranks(rank, hop.outer, hop.inner) for hop in gather)


def mode_of(world: int, local: int, zero: dict[str, object], **extension: object) -> Mode:
    return choose_mode(load_config({"zero_optimization": {"stage": 3, **zero}, "zeropp": extension}), world, local)


MODES: list[tuple[dict[str, object], dict[str, object], tuple[object, ...]]] = [
    # 8 ranks on 2 nodes: the levels of the chain, then the levels of states, cached weights and gradients.
    ({"stage": 0}, {}, ((1, 4, 8), 1, 1, 1)),
    ({"stage": 1}, {}, ((1, 4, 8), 8, 1, 1)),
    ({"stage": 2}, {}, ((1, 4, 8), 8, 1, 8)),
    ({}, {}, ((1, 4, 8), 8, None, 8)),
    ({"zero_hpz_partition_size": 2}, {}, ((1, 2, 4, 8), 8, 2, 8)),
    ({"zero_hpz_partition_size": 4}, {}, ((1, 4, 8), 8, 4, 8)),
    ({"zero_hpz_partition_size": 8}, {}, ((1, 4, 8), 8, None, 8)),
    ({"zero_hpz_partition_size": 16}, {}, ((1, 4, 8), 8, None, 8)),
    ({"mics_shard_size": 1}, {}, ((1, 4, 8), 1, None, 1)),
    ({"mics_shard_size": 2}, {}, ((1, 2, 4, 8), 2, None, 2)),
    ({"mics_shard_size": 4, "zero_hpz_partition_size": 2}, {}, ((1, 2, 4, 8), 4, 2, 4)),
    ({"mics_shard_size": 8}, {}, ((1, 4, 8), 8, None, 8)),
    ({}, {"defer_cross_reduction": True}, ((1, 4, 8), 8, None, 4)),
    ({"stage": 2}, {"defer_cross_reduction": True}, ((1, 4, 8), 8, 1, 4)),
    ({"mics_shard_size": 2}, {"defer_cross_reduction": True}, ((1, 2, 4, 8), 2, None, 2)),
]


@pytest.mark.parametrize(("zero", "extension", "expected"), MODES)
def test_modes_are_levels(zero: dict[str, object], extension: dict[str, object], expected: tuple[object, ...]) -> None:
    mode = mode_of(8, 4, zero, **extension)
    assert (mode.chain.levels, mode.states, mode.cached, mode.gradients) == expected
    assert mode.for_unit(persistent=True).cached == 1 and mode.for_unit(persistent=False) == mode


def test_groups_of_several_nodes() -> None:
    mode = mode_of(8, 2, {"zero_hpz_partition_size": 4})
    assert (mode.chain.levels, mode.cached) == ((1, 2, 4, 8), 4)
    assert mode_of(8, 2, {"mics_shard_size": 4}).states == 4


@pytest.mark.parametrize(
    ("world", "local", "zero", "message"),
    [
        (2, 2, {"zero_hpz_partition_size": 3}, r"zero_hpz_partition_size is 3; .* one of \[1, 2\]"),
        (4, 2, {"mics_shard_size": 2, "zero_hpz_partition_size": 3}, r"partition_size is 3; .* \[1, 2\]"),
        (8, 4, {"zero_hpz_partition_size": 3}, r"zero_hpz_partition_size is 3; .* one of \[1, 2, 4, 8\]"),
        (12, 4, {"zero_hpz_partition_size": 6}, r"zero_hpz_partition_size is 6; .* one of \[1, 2, 4, 12\]"),
        (12, 3, {"mics_shard_size": 2}, r"mics_shard_size is 2; .* one of \[1, 3, 6, 12\]"),
        (8, 4, {"mics_shard_size": 16}, r"mics_shard_size is 16; .* one of \[1, 2, 4, 8\]"),
        (16, 8, {"mics_shard_size": 8, "zero_hpz_partition_size": 3}, r"partition_size is 3; .* \[1, 2, 4, 8\]"),
    ],
)
def test_sizes_that_do_not_chain_are_refused_with_those_that_do(
    world: int, local: int, zero: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        mode_of(world, local, zero)


def test_a_path_of_two_nodes() -> None:
    placement = whole(Chain((1, 2, 4)), 1, 2)
    assert placement.gather_path(4, 1) == (HopSpec(4, 2, (1, 3), "cross"), HopSpec(2, 1, (0, 1), "local"))
    single_hop = Placement(Mode(Chain((1, 2, 4)), 4, None, 4, single_hop=True), 1, 2)
    assert single_hop.gather_path(4, 1) == (HopSpec(4, 1, (0, 2, 1, 3), "cross"),)
    assert single_hop.reduce_path(1, 4) == placement.reduce_path(1, 4)


@given(chains(limit=64), st.data())
@settings(max_examples=60)
def test_slices_lie_inside_each_other(chain: Chain, data: st.DataObject) -> None:
    rank, numel = data.draw(st.integers(0, chain.world - 1)), 3 * chain.world
    placement = whole(chain, rank, 1)
    for outer, inner in pairs(chain):
        start, stop = placement.slice_of(numel, outer, inner)
        base = placement.slice_of(numel, inner)[0]
        assert 0 <= start < stop <= numel // inner
        assert (base + start, base + stop) == placement.slice_of(numel, outer)
