"""Stalls: a wait of the device is reported once the device has passed it, with its own unit and kind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from zeropp.comm.timers import StreamStalls


class Device:
    """A device whose clock counts milliseconds.

    Attributes:
        now: present time.
        queued: time at which the stream will have done all queued work; recorded events happen at this time.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.queued = 0.0


class FakeEvent:
    device: Device

    def __init__(self, *, enable_timing: bool = False) -> None:
        assert enable_timing, "an event without timing has no elapsed_time"

    def record(self, stream: object) -> None:
        assert stream == "the model's"
        self.at = self.device.queued

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "torch raises an error for events that have not happened"
        return end.at - self.at


def test_a_stream_s_waits_are_told_when_they_are_over() -> None:
    device = FakeEvent.device = Device()
    told: list[tuple[str, str, float]] = []
    stalls = StreamStalls(torch.device("cuda", 0), lambda *each: told.append(each))
    with (
        mock.patch.object(torch.cuda, "Event", FakeEvent),
        mock.patch.object(torch.cuda, "current_stream", lambda _: "the model's"),
    ):
        first = stalls.timer("a", "gather")
        first.begin()
        device.queued += 5  # the stream will wait for 5 ms
        first.end()
        device.queued += 100  # work of the model
        second = stalls.timer("b", "reduce")
        second.begin()
        device.queued += 7
        second.end()
        assert told == [], "the device has not passed the waits yet"
        device.now = 5
        stalls.collect()
        assert told == [("a", "gather", pytest.approx(0.005))]
        device.now = 200
        third = stalls.timer("c", "gather")
        third.begin()
        third.end()
        assert told[1:] == [("b", "reduce", pytest.approx(0.007)), ("c", "gather", 0.0)]
