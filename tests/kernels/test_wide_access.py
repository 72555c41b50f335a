"""Programs use 128-bit access except in tiles at an end and for values at an address that is no multiple of 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import agreement
from tests.kernels.cases import BITS, DEVICE, DTYPES
from tests.kernels.fast import device
from zeropp_kernels import block_table, message_layout

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="looks into Triton's interpreter")

TILE = 256 * 128  # elements of a tile under the interpreter


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list of the decisions for wide access (True) or narrow access, in the order of programs."""
    from zeropp_kernels.device import blocks, places, reduce

    found: list[bool] = []
    decide: Callable[..., Any] = blocks.wide

    def wide(*arguments: object) -> Any:
        answer = decide(*arguments)
        found.append(bool(answer.handle.data.item()))
        return answer

    for module in (blocks, places, reduce):
        monkeypatch.setattr(module, "wide", wide)
    return found


def room(numel: int, bits: int, count: int = 1) -> Tensor:
    return torch.zeros(message_layout(numel, bits).nbytes * count, dtype=torch.uint8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_last_tile_of_a_message_is_narrow(chosen: list[bool], dtype: torch.dtype, bits: int) -> None:
    numel = 2 * TILE + 8
    x = torch.randn(2 * numel + 1).to(dtype)
    messages = room(numel, bits, 2)
    device.quantize_(x[: 2 * numel], messages, 2, bits, False, None, 0.0, False)
    assert sum(chosen) == 4 and len(chosen) >= 6
    chosen.clear()
    device.dequantize_(messages, x[: 2 * numel], 2, bits, False)
    assert chosen.count(True) == 4 and chosen.count(False) == 2
    chosen.clear()
    device.quantize_(x[1:], messages, 2, bits, False, None, 0.0, False)
    assert chosen and not any(chosen)


def test_a_message_is_narrow_that_begins_at_an_odd_address(chosen: list[bool]) -> None:
    numel = TILE + 3
    device.quantize_(torch.randn(2 * numel), room(numel, 8, 2), 2, 8, False, None, 0.0, False)
    assert chosen.count(True) == 1 and chosen[0]


@pytest.mark.parametrize(
    # Each of two tiles, half as large as TILE, decides for the first message, the second message and the output. The
    # second message begins at a multiple of 16 bytes or not, and a tile at an end is never wide.
    ("numel", "wide"),
    [(TILE, [True] * 6), (TILE // 2 + 4, [True] * 3 + [False] * 3), (TILE // 2 + 3, [True, False, True] + [False] * 3)],
)
def test_plain_sums_are_wide_where_all_messages_are(chosen: list[bool], numel: int, wide: list[bool]) -> None:
    device.sum_(torch.randn(3 * numel), torch.empty(numel), 3, 1.0, False, None, None)
    assert chosen == wide


def test_delta_is_wide_but_at_the_end(chosen: list[bool]) -> None:
    numel = TILE + 8
    shard, held, message = torch.randn(numel), torch.randn(numel).bfloat16(), room(numel, 4)
    device.delta_encode_(shard, held, message, True)
    assert chosen == [True] * 3 + [False] * 3
    chosen.clear()
    device.delta_apply_(message, held, 1)
    assert chosen == [True] * 2 + [False] * 2


@pytest.mark.parametrize("offset", [0, 1])
def test_a_tensor_at_an_odd_address_makes_no_other_narrow(chosen: list[bool], offset: int) -> None:
    """Tiles 0 and 2 lie inside tensors 0 and 1. Tiles 1 and 3 contain ends of tensors, so they are narrow."""
    numels = [TILE + 5, 3 * TILE - 1000, 300]
    given = [torch.randn(numels[0]), torch.randn(numels[1] + 1)[offset:][: numels[1]], torch.randn(numels[2])]
    table = block_table(numels)
    flat = torch.empty(table.numel)
    places = (table.host, table.entries, table.owners)
    device.gather_(given, *places, flat, 1.0, None, None, False)
    tensors, buffer = chosen[0::2], chosen[1::2]
    assert tensors == [True, False, offset == 0, False] and buffer == [True] * 4
    chosen.clear()
    device.scatter_(flat, given, *places, 1.0, None, None)
    assert chosen[1::2] == tensors and chosen[0::2] == buffer


def test_pinned_memory_is_filled_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeropp_kernels.device import copy

    assert copy.is_pinned(torch.empty(1), torch.empty(1, device="meta"))
    assert not copy.is_pinned(torch.empty(1), torch.empty(1))
    launched: list[int] = []

    class Noting:
        def __init__(self, kernel: Any) -> None:
            self.kernel, self.__name__ = kernel, kernel.__name__

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid[0])
            return self.kernel[grid]

    monkeypatch.setattr(copy, "is_pinned", lambda *_: True)
    monkeypatch.setattr(copy, "_PINNED_PROGRAMS", 2)
    for name in ("gather_pinned_kernel", "scatter_pinned_kernel"):
        monkeypatch.setattr(copy, name, Noting(getattr(copy, name)))
    agreement.copies("large", torch.bfloat16, torch.float32)
    # Two programs copy the six tiles.
    assert launched and set(launched) == {2}
