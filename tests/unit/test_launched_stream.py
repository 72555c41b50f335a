"""Streams whose work a thread launches: the waits of each stream, recorded by a stand-in for ``torch.cuda``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from zeropp.comm.streams import LaunchedStream, ThreadStream, make_stream

DEVICE = torch.device("cuda", 3)


@dataclass
class Card:
    """A stand-in for ``torch.cuda`` that records the work of each stream in the order of the host's calls.

    Attributes:
        given: by stream, its work: "work", or a wait as (name of the other stream, number of entries it had then).
        devices: indices of the devices that were current when work was launched.
    """

    given: dict[str, list[Any]] = field(default_factory=lambda: {"default": []})
    devices: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.here, self.default = threading.local(), _Stream(self, "default")

    def current(self, *_: object) -> _Stream:
        found: _Stream = getattr(self.here, "stream", self.default)
        return found

    def set_stream(self, stream: _Stream) -> None:
        self.here.stream, self.here.index = stream, DEVICE.index  # all streams are on one device

    def current_device(self) -> int:
        index: int = getattr(self.here, "index", 0)
        return index

    def set_device(self, index: int) -> None:
        self.here.index = index

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.here.stream = self.current(), stream
        try:
            yield
        finally:
            self.here.stream = before

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.here.index = getattr(self.here, "index", 0), device.index
        try:
            yield
        finally:
            self.here.index = before

    def work(self) -> None:
        self.current().given().append("work")
        self.devices.add(getattr(self.here, "index", 0))


class _Event:
    def __init__(self) -> None:
        self.place: tuple[str, int] | None = None

    def record(self, stream: _Stream) -> None:
        self.place = stream.name, len(stream.given())


class _Stream:
    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name
        card.given.setdefault(name, [])

    def given(self) -> list[Any]:
        return self.card.given[self.name]

    def wait_event(self, event: _Event) -> None:
        assert event.place is not None, "an event was waited for before it was recorded, which waits for nothing"
        if event.place[0] != self.name:  # a stream's own earlier work is done before anyway
            self.given().append(event.place)

    def wait_stream(self, other: _Stream) -> None:
        if other is not self:
            self.given().append((other.name, len(other.given())))

    def synchronize(self) -> None:
        """Return at once, because no work is pending."""


@pytest.fixture
def card() -> Iterator[Card]:
    made = Card()

    def stream(*_: object, **__: object) -> _Stream:
        return _Stream(made, f"comm stream {len(made.given)}")

    with mock.patch.multiple(
        torch.cuda, Event=_Event, Stream=stream, current_stream=made.current, set_stream=made.set_stream,
        stream=made.stream, device=made.device, current_device=made.current_device, set_device=made.set_device,
    ):  # fmt: skip
        yield made


@pytest.fixture
def comm_streams(card: Card) -> Iterator[list[LaunchedStream]]:
    made = [LaunchedStream(ThreadStream(name), DEVICE) for name in ("first", "second")]
    yield made
    for each in made:
        each.close()


def test_a_launch_waits_only_for_work_issued_before_it(card: Card, comm_streams: list[LaunchedStream]) -> None:
    held, host = threading.Event(), ThreadStream("host")
    stepped = host.run(lambda: held.wait(5))
    card.work()
    event = comm_streams[0].run(card.work, after=stepped)
    for _ in range(3):
        card.work()  # issued by the caller before the thread launches the work
    assert card.given["comm stream 1"] == []
    held.set()
    assert event.wait(5)
    assert card.given["comm stream 1"] == [("default", 1), "work"]
    assert card.given["default"] == ["work"] * 4 + [("comm stream 1", 2)]
    assert card.devices == {0, 3}, "the caller's device and the comm stream's device"
    host.close()


def test_a_stream_waits_for_the_stream_before_it_and_the_model_does_not(
    card: Card, comm_streams: list[LaunchedStream]
) -> None:
    first = comm_streams[0].run(card.work)
    second = comm_streams[1].run(card.work, after=first)
    assert second.wait(5)
    assert ("comm stream 1", 2) in card.given["comm stream 2"][: card.given["comm stream 2"].index("work")]
    assert card.given["default"] == [("comm stream 2", len(card.given["comm stream 2"]))]


def test_the_host_s_step_copies_on_a_stream_of_its_own(card: Card) -> None:
    stream = make_stream("step", DEVICE, sends=False, overlap=True, hosted=True)
    assert stream.run(card.work).wait(5)
    assert card.given["comm stream 1"] == [("default", 0), "work"] and card.devices == {3}
    stream.close()
