"""Recorder of the parts of an offloaded step: copies over the bus and steps on the host.

On a GPU the recorder only measures. On a CPU, where host and device are the same memory, it can also slow copies and
steps down to stated rates, so that a training has the timeline of a GPU with these rates.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from zeropp.comm.streams import DONE, Event
from zeropp.offload import tier_choice
from zeropp.offload.storage_tiers import HostMemory, MemoryTensor
from zeropp.optimizer import host_step, sub_groups
from zeropp.params import gradient, wire_copy
from zeropp.params.wire_copy import WireCopy
from zeropp.wire import paths

__all__ = ["DOWN", "STEP", "UP", "Rates", "Spans", "apart", "sleep_until"]

DOWN, STEP, UP = "copy down", "step on host", "copy up"
Span = tuple[str, float, float]


@dataclass(frozen=True)
class Rates:
    """Rates that copies and steps are slowed down to; 0 leaves them as they are.

    Attributes:
        bus: bytes per second over the bus, in each direction.
        step: elements per second that the host's cores step together.
    """

    bus: float = 0.0
    step: float = 0.0


class Link:
    """One direction of the bus, which moves one copy at a time."""

    def __init__(self, rate: float) -> None:
        self._rate, self._turn = rate, threading.Lock()

    def move(self, copy: Callable[[], Event], nbytes: int) -> tuple[Event, float]:
        """Run a copy, and return its event and the time when the copy had its turn."""
        with self._turn:
            begin = time.perf_counter()
            event = copy()
            if self._rate:
                sleep_until(begin + nbytes / self._rate)
        return event, begin


def sleep_until(when: float) -> None:
    """Sleep without using a core, until ``time.perf_counter()`` returns ``when``."""
    if (left := when - time.perf_counter()) > 0:
        time.sleep(left)


class _Noted:
    """An event whose first wait records the end of a span."""

    def __init__(self, event: Event, ended: Callable[[], None]) -> None:
        self._event, self._ended = event, ended

    def wait(self, timeout: float) -> bool:
        found = self._event.wait(timeout)
        self._ended()
        return found

    def done(self) -> bool:
        return self._event.done()


@dataclass
class Spans:
    """The recorded spans, and the rates.

    Attributes:
        rates: rates of copies and steps.
        found: (kind, begin, end) of each span in seconds of ``time.perf_counter()``.
    """

    rates: Rates = Rates()  # immutable
    found: list[Span] = field(default_factory=list)

    def note(self, kind: str, begin: float) -> None:
        """Record a span that ends now."""
        self.found.append((kind, begin, time.perf_counter()))

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the body as a span."""
        begin = time.perf_counter()
        yield
        self.note(kind, begin)

    def seconds(self, kind: str, begin: float, end: float) -> float:
        """Return the total length of the spans of a kind that begin in [begin, end)."""
        return sum(stop - start for what, start, stop in self.found if what == kind and begin <= start < end)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs in the body, in all threads."""
        links = {DOWN: Link(self.rates.bus), UP: Link(self.rates.bus)}
        write, send, step, put = MemoryTensor.write, wire_copy.copy, sub_groups.step_slices, paths._put
        begin_gather = WireCopy.begin_gather
        host = set[int]()  # addresses of gather sources in host memory

        def moved(kind: str, copy: Callable[[], Event], nbytes: int) -> Event:
            event, begin = links[kind].move(copy, nbytes)
            return _Noted(event, lambda: self.note(kind, begin))

        def noted_gather(source: WireCopy, after: Event | None) -> Any:
            if source.row is not None and source.row.place == "host":
                host.add(source.row.tensor.data_ptr())
            return begin_gather(source, after)

        def noted_write(row: MemoryTensor, start: int, values: Tensor) -> Event:
            return moved(DOWN if row.place == "host" else UP, lambda: write(row, start, values), values.nbytes)

        def noted_staged(staged: Tensor, values: Tensor) -> Event:
            return moved(DOWN, lambda: send(staged, values), values.nbytes)

        def noted_send(into: Tensor, values: Tensor) -> Event:
            return moved(UP, lambda: send(into, values), values.nbytes)

        def noted_put(target: Tensor, own: Any) -> None:
            def copied() -> Event:
                put(target, own)
                return DONE

            # Sources are told apart by their addresses, because both memories may be the CPU's.
            if isinstance(own, Tensor) and own.data_ptr() in host:
                moved(UP, copied, own.nbytes).wait(threading.TIMEOUT_MAX)
            else:
                put(target, own)

        def noted_step(cores: Any, rule: Any, steps: Sequence[Any], copies: Sequence[Any] = ()) -> None:
            with self.span(STEP):
                begin = time.perf_counter()
                step(cores, rule, steps, copies)
                if self.rates.step:
                    sleep_until(begin + sum(each.param.numel() for each in steps) / self.rates.step)

        with (
            mock.patch.object(MemoryTensor, "write", noted_write),
            mock.patch.object(wire_copy, "copy", noted_send),
            mock.patch.object(gradient, "copy", noted_staged),
            mock.patch.object(WireCopy, "begin_gather", noted_gather),
            mock.patch.object(paths, "_put", noted_put),
            mock.patch.object(host_step, "step_slices", noted_step),
            mock.patch.object(sub_groups, "step_slices", noted_step),
        ):
            yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Keep host and device apart in the block, as with a GPU, although both are the memory of the CPU."""
    at_hand = property(lambda row: row.place == "host")
    with (
        mock.patch.object(tier_choice, "host_memory", lambda _: HostMemory()),
        mock.patch.object(MemoryTensor, "at_hand", at_hand),
    ):
        yield
