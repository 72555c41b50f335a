"""The monitor reports an event that has been first in its queue for longer than the limit, and no other event."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from zeropp.comm import watch
from zeropp.comm.watch import Monitor, make_monitor
from zeropp.fsdp2 import overlap


class Event:
    def __init__(self) -> None:
        self.over = False

    def wait(self, timeout: float) -> bool:
        return self.over

    def done(self) -> bool:
        return self.over


class Owner:
    """An object with a monitor, which records the monitor's reports."""

    def __init__(self, hang_timeout: float, device: str = "cpu") -> None:
        self.told: list[str] = []
        self.waited: list[bool] = []
        self.failed = False
        self.asked = 0
        self.monitor = Monitor(hang_timeout, self.tell, torch.device(device), self.ask)

    def tell(self, doing: str, /, *, waited: bool) -> None:
        self.told.append(doing)
        self.waited.append(waited)

    def ask(self) -> bool:
        self.asked += 1
        return self.failed


def monitors() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "zeropp monitor"}


def queue(owner: Owner, count: int) -> list[Event]:
    events = [Event() for _ in range(count)]
    for number, event in enumerate(events):
        owner.monitor.watch_event(event, f"piece {number}")
    return events


def test_a_long_queue_that_comes_on_is_no_hang() -> None:
    owner = Owner(10.0)
    start = time.monotonic()
    events = queue(owner, 5)
    for number, event in enumerate(events):
        owner.monitor.look(start + 9 * number + 8)
        event.over = True
        owner.monitor.look(start + 9 * number + 9)
    owner.monitor.look(start + 1000)  # no event is queued, so no time counts
    assert owner.told == []


def test_hops_of_fsdp2_are_watched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged before groups are aborted, and every later hop raises it."""
    logged: list[int] = []
    monkeypatch.setattr(watch, "BLIND", {"cpu"})
    monkeypatch.setattr(overlap, "abort_groups", lambda groups: logged.append(len(caplog.records)))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    waiting = overlap.Waiting(torch.device("cpu"), 0.2, [])
    waiting.require()
    waiting.watch_event(Event(), "the gather of layers.1")
    until = time.monotonic() + 10
    while not logged and time.monotonic() < until:
        time.sleep(0.02)
    assert logged == [1]
    text = "rank 3 has waited for the gather of layers.1 for 0.2 s"
    assert caplog.messages[0].startswith(text)
    with pytest.raises(RuntimeError, match=text):
        waiting.require()
    waiting.close()


def test_another_ranks_failure_ends_a_wait_early() -> None:
    """The monitor asks every five seconds if another rank has failed, the first time after five seconds."""
    owner = Owner(600.0)
    start = time.monotonic()
    queue(owner, 1)
    for second in range(5):
        owner.monitor.look(start + second)
    assert owner.asked == 0
    for second in range(5, 31):
        owner.monitor.look(start + second + 0.1)
    assert owner.asked == 6 and owner.told == []
    owner.failed = True
    owner.monitor.look(start + 36)
    owner.monitor.look(start + 700)
    assert owner.told == ["piece 0"] and owner.waited == [False]


@pytest.mark.parametrize("finished", [0, 2, 4])
def test_an_event_that_is_first_for_too_long_is_reported_once(finished: int) -> None:
    owner = Owner(10.0)
    start = time.monotonic()
    events = queue(owner, 5)
    for event in events[:finished]:
        event.over = True
    owner.monitor.look(start + 5)
    last = start + 5 if finished else start + 1
    owner.monitor.look(last + 9)
    assert owner.told == []
    events[4].over = finished < 4  # a later event that is done first is no progress
    owner.monitor.look(last + 11)
    owner.monitor.look(last + 100)
    assert owner.told == [f"piece {finished}"]


def test_its_thread_looks_and_ends() -> None:
    before, owner = monitors(), Owner(0.2)
    queue(owner, 1)
    (thread,) = monitors() - before
    assert thread.daemon
    limit = time.monotonic() + 10
    while not owner.told and time.monotonic() < limit:
        time.sleep(0.01)
    assert owner.told == ["piece 0"]
    thread.join(10)
    assert not thread.is_alive()


def test_a_dropped_owner_ends_the_thread() -> None:
    before, owner = monitors(), Owner(0.5)
    queue(owner, 1)
    (thread,) = monitors() - before
    del owner
    thread.join(10)
    assert not thread.is_alive()


def test_only_devices_that_no_host_waits_for_need_one() -> None:
    owner = Owner(1.0)
    assert make_monitor(torch.device("cpu"), 1.0, owner.tell) is None
    assert make_monitor(torch.device("cuda"), 1.0, owner.tell) is not None


def test_its_thread_is_on_the_card_whose_events_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own current device, first GPU 0, and querying an event makes a context on that device."""
    current, seen = threading.local(), list[object]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    owner, asked = Owner(0.2, "cuda:1"), threading.Event()

    class Asked(Event):
        def done(self) -> bool:
            seen.append(getattr(current, "device", None))
            asked.set()
            return True

    owner.monitor.watch_event(Asked(), "a piece")
    assert asked.wait(10)
    owner.monitor.close()
    assert seen[0] == torch.device("cuda", 1)
