"""Rows are read ahead through a few buffers, and a failed read returns its buffers."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zeropp.comm.streams import ThreadEvent
from zeropp.offload.read_ahead import ReadAhead, Ring
from zeropp.offload.swap import SwapError

PART = 16  # elements of a staging buffer
VALUES = torch.arange(10.0 * PART + 3)


class Row(SimpleNamespace):
    """A row in memory; reading the parts in ``refused`` raises, and reading those in ``bad`` fails in the event."""

    def read(self, start: int, into: Tensor) -> ThreadEvent:
        event, number = ThreadEvent(), start // PART
        if number in self.refused:
            raise SwapError.make(errno.EBADF, "file", "closed")
        into.copy_(self.tensor[start : start + into.numel()])
        event.finish(SwapError.make(errno.EIO, f"part {number}", "cannot read") if number in self.bad else None)
        return event


@pytest.fixture
def reader() -> Iterator[ReadAhead]:
    found = ReadAhead(Ring(2, PART * 4))
    yield found
    found.close()


def read(reader: ReadAhead, bad: tuple[int, ...] = (), refused: tuple[int, ...] = ()) -> Tensor:
    row: Any = Row(tensor=VALUES, bad=bad, refused=refused)
    target = torch.full_like(VALUES, -1)
    reader.begin_read(row, None).copy_to(target)
    return target


def test_a_row_of_more_parts_than_buffers(reader: ReadAhead) -> None:
    assert torch.equal(read(reader), VALUES)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("bad", "refused", "said"),
    [((0,), (), "part 0"), ((4, 7), (), "part 4"), ((), (5,), "closed"), ((2,), (9,), "part 2")],
)
def test_a_failed_read_raises_and_the_next_read_succeeds(
    bad: tuple[int, ...], refused: tuple[int, ...], said: str, reader: ReadAhead
) -> None:
    for _ in range(3):
        with pytest.raises(SwapError, match=said):
            read(reader, bad, refused)
        assert torch.equal(read(reader), VALUES)
