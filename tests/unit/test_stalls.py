"""Stalls: times of waits that the host only queues are told once the device has passed them, each with its own unit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from zeropp.comm.hops import HostStalls, StreamStalls, make_stalls


class Device:
    """A clock in milliseconds: what is recorded now is passed at the time the stream will have then."""

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
        assert self.query() and end.query(), "torch raises for events that are not over"
        return end.at - self.at


def test_a_stream_s_waits_are_told_when_they_are_over() -> None:
    device = FakeEvent.device = Device()
    told: list[tuple[str, str, float]] = []
    stalls = StreamStalls(torch.device("cuda", 0), lambda *each: told.append(each))
    with (
        mock.patch.object(torch.cuda, "Event", FakeEvent),
        mock.patch.object(torch.cuda, "current_stream", lambda _: "the model's"),
    ):
        with stalls.timing("a", "gather"):
            device.queued += 5  # the stream will stand still so long
        device.queued += 100  # the model's own work
        with stalls.timing("b", "reduce"):
            device.queued += 7
        assert told == [], "the device has not come so far"
        device.now = 5
        stalls.collect()
        assert told == [("a", "gather", pytest.approx(0.005))]
        device.now = 200
        with stalls.timing("c", "gather"):
            pass
        assert told[1:] == [("b", "reduce", pytest.approx(0.007)), ("c", "gather", 0.0)]


def test_a_wait_that_fails_is_not_told() -> None:
    told: list[object] = []
    stalls = HostStalls(lambda *each: told.append(each))
    with pytest.raises(RuntimeError, match="in vain"), stalls.timing("a", "gather"):
        raise RuntimeError("in vain")
    assert told == []


def test_the_device_says_whose_clock_it_is() -> None:
    for name, kind in (("cpu", HostStalls), ("cuda", StreamStalls)):
        assert isinstance(make_stalls(torch.device(name), lambda *_: None), kind)
