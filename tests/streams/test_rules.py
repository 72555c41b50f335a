"""Each rule of the simulator, shown by a small program that has a race and by one that has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.streams.card import CARD, pretended_card

Program = Callable[[torch.cuda.Stream, Tensor], object]


def side_waits(side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())


def on_side(side: torch.cuda.Stream, x: Tensor, *, waits: bool = True) -> None:
    if waits:
        side_waits(side)
    with torch.cuda.stream(side):
        x.add_(1)


def ordered(side: torch.cuda.Stream, x: Tensor) -> None:
    on_side(side, x)
    torch.cuda.current_stream().wait_stream(side)
    x.sum()


def not_begun_after(side: torch.cuda.Stream, x: Tensor) -> None:
    on_side(side, x, waits=False)


def not_waited_for(side: torch.cuda.Stream, x: Tensor) -> None:
    on_side(side, x)
    x.sum()


def other_bytes(side: torch.cuda.Stream, x: Tensor) -> None:
    on_side(side, x[:2])
    x[2:].mul_(2)


def both_read(side: torch.cuda.Stream, x: Tensor) -> None:
    side_waits(side)
    with torch.cuda.stream(side):
        x.sum()
    x.sum()


def waited_for_too_early(side: torch.cuda.Stream, x: Tensor) -> None:
    event = torch.cuda.Event()
    side_waits(side)
    event.record(side)
    on_side(side, x)
    torch.cuda.current_stream().wait_event(event)
    x.sum()


def waited_for_by_the_host(side: torch.cuda.Stream, x: Tensor) -> None:
    on_side(side, x)
    side.synchronize()
    x.sum()


def dropped(side: torch.cuda.Stream, x: Tensor) -> None:
    mine = x * 2
    on_side(side, mine)


def dropped_and_named(side: torch.cuda.Stream, x: Tensor) -> None:
    mine = x * 2
    on_side(side, mine)
    mine.record_stream(side)


def shrunk(side: torch.cuda.Stream, x: Tensor) -> None:
    mine = x * 2
    on_side(side, mine)
    mine.untyped_storage().resize_(0)


def read_before_it_has_come(side: torch.cuda.Stream, x: Tensor) -> None:
    x.to("cpu", non_blocking=True).tolist()


def read_when_it_has_come(side: torch.cuda.Stream, x: Tensor) -> None:
    host = x.to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    host.tolist()
    x.to("cpu").tolist()
    x.tolist()


def written_while_it_is_sent(side: torch.cuda.Stream, x: Tensor) -> None:
    staged = torch.ones(4, pin_memory=True)
    x.copy_(staged, non_blocking=True)
    staged.zero_()


def races(program: Program) -> list[str]:
    with pretended_card(1) as card:
        side, x = torch.cuda.Stream(), torch.ones(4, device=CARD)
        program(side, x)
        side.synchronize()  # so that the accesses to ``x`` end before ``x`` is freed
        return list(card.clocks.races)


@pytest.mark.parametrize(
    "program", [ordered, other_bytes, both_read, waited_for_by_the_host, dropped_and_named, read_when_it_has_come]
)
def test_ordered_programs_have_no_race(program: Program) -> None:
    assert races(program) == []


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (not_begun_after, "does not wait for write"),
        (not_waited_for, "does not wait for write"),
        (waited_for_too_early, "does not wait for write"),
        (dropped, "may be reused before write"),
        (shrunk, "may be reused before write"),
        (read_before_it_has_come, "tolist"),
        (written_while_it_is_sent, "does not wait for read"),
    ],
)
def test_unordered_programs_have_a_race(program: Program, words: str) -> None:
    found = races(program)
    assert found and all(words in race for race in found), found
