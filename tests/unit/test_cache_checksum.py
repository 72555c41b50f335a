"""Checksums of cached weights differ exactly if any rank's copy differs from the others' in any bit."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from zeropp.optimizer import step_sync
from zeropp.optimizer.step_sync import CacheChecksum

WORLD = 4
WORDS = 64  # 64-bit words in a block of 256 16-bit elements


def words(blocks: int, seed: int) -> Tensor:
    """Return cached weights as 64-bit words [blocks * WORDS] that are all different."""
    return torch.randperm(blocks * WORDS, generator=torch.Generator().manual_seed(seed)) * 0x123456789ABCDF


def checksum_of(rank: int, caches: Iterable[tuple[Tensor, int]]) -> CacheChecksum:
    """Return the checksum of a rank that caches buffers.

    Args:
        rank: the rank.
        caches: for each buffer its words on this rank and its level: 1 for full weights, L for one of L slices, and 0
            if the rank caches nothing.
    """
    chain = SimpleNamespace(slice_index=lambda rank, level: rank % level)
    buffers = [
        SimpleNamespace(
            base=None if level == 0 else each.view(torch.bfloat16),
            placement=SimpleNamespace(mode=SimpleNamespace(cached=level), chain=chain),
        )
        for each, level in caches
    ]
    comm = SimpleNamespace(rank=rank, world=WORLD)
    engine: Any = SimpleNamespace(buffers=buffers, device=torch.device("cpu"), comm=comm)
    return CacheChecksum(engine)


def differ(ranks: list[list[tuple[Tensor, int]]]) -> bool:
    """Return the common result of all ranks; ``ranks`` lists the cached buffers of each rank."""
    checksums = [checksum_of(rank, caches) for rank, caches in enumerate(ranks)]
    summed = torch.stack([each.sums() for each in checksums]).sum(0).tolist()
    (found,) = {each.differ(summed) for each in checksums}
    return found


def same() -> list[list[tuple[Tensor, int]]]:
    """Return matching caches of all ranks: two full buffers, two that a pair of ranks shares, and one not cached."""
    return [
        [
            (words(1, 1), 1), (words(2, 10 + rank % 2), 2), (words(1, 20), 0), (words(1, 3), 1),
            (words(1, 30 + rank % 2), 2),
        ]
        for rank in range(WORLD)
    ]  # fmt: skip


def test_holders_of_the_same_weights_do_not_differ() -> None:
    assert not differ(same())


@pytest.mark.parametrize("buffer", [0, 1, 3, 4])
@pytest.mark.parametrize("rank", range(WORLD))
def test_one_bit_on_one_rank_shows(rank: int, buffer: int) -> None:
    for bit in (0, 17, 40, 63):
        for place in (0, 1, 31, WORDS - 1):
            ranks = same()
            ranks[rank][buffer][0][place] ^= 1 << bit if bit < 63 else -(1 << 63)
            assert differ(ranks), (bit, place)


@pytest.mark.parametrize("pair", [(0, 3), (1, 4)])
def test_buffers_that_have_changed_places_show(pair: tuple[int, int]) -> None:
    ranks = same()
    here, there = (ranks[2][buffer][0][:WORDS] for buffer in pair)
    saved = here.clone()
    here.copy_(there)
    there.copy_(saved)
    assert differ(ranks)


@pytest.mark.parametrize("tile", [1, 8, 48, WORDS, 3 * WORDS, 2**18])
def test_a_checksum_does_not_depend_on_the_tiles(tile: int) -> None:
    values = words(3, 5)
    wanted = sum(int(word) * (2 * place + 1) for place, word in enumerate(values.tolist())) % 2**64
    with mock.patch.object(step_sync, "_CHECKSUM_TILE", tile):
        found = int(step_sync._checksum(values.view(torch.bfloat16)))
    assert found % 2**64 == wanted


def test_every_so_many_steps_where_something_is_kept() -> None:
    checksum, nothing = checksum_of(0, [(words(1, 1), 1)]), checksum_of(0, [(words(1, 1), 0)])
    checksum.every = nothing.every = 3
    found = []
    for _ in range(7):
        found.append(checksum.due)
        assert not nothing.due
        for each in (checksum, nothing):
            each.count_step()
    assert found == [False, False, True, False, False, True, False]
    assert checksum_of(0, []).every == 100
