"""CUDA streams, whose work the caller launches, or a thread; see [Note: memory on several streams]."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zeropp.comm.events import Event, Stream

__all__ = ["CudaStream", "LaunchedStream"]


class _CudaEvent:
    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout: float) -> bool:
        # The host goes on, so no time runs out here: see zeropp.comm.monitor.
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def done(self) -> bool:
        return bool(self._event.query())


class CudaStream:
    """A CUDA stream: see [Note: memory on several streams].

    The caller's stream is that of the model's device, which need not be the process's current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority, as in FSDP2: small kernels around a collective should not queue behind the model's large ones.
        self.stream = torch.cuda.Stream(device, priority=-1)
        # Its work may write to memory of the caller's stream, which is free again once an engine is dropped.
        self._finish = weakref.finalize(self, self.stream.synchronize)
        self._finish.atexit = False

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue ``works`` behind what the caller's stream has been given so far."""
        # What the caller has issued may write what this work reads: a packed message, weights that were stepped.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            if after is not None:
                after.wait(threading.TIMEOUT_MAX)  # this stream waits, not the host
            for work in works:
                work()
            # Recorded on this stream after the work, so it also stands for everything queued here before.
            event = torch.cuda.Event()
            event.record(self.stream)
        return _CudaEvent(event, self._device)

    def allocate(self, work: Callable[[], None]) -> None:
        """Allocate in this stream's order."""
        # Nothing is written yet, so there is nothing to wait for. See [Note: memory on several streams].
        with torch.cuda.stream(self.stream):
            work()

    def free(self, work: Callable[[], None]) -> None:
        """Free in this stream's order: its allocations are reused by its own later work only."""
        # Behind the caller's stream, so memory is reused only after the model's kernels have read it. Not by ``run``:
        # nobody asks for the end, and an event costs the host some microseconds.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            work()

    def abandon(self) -> None:
        """Neither :meth:`close` nor the end of this object waits."""
        self._finish.detach()

    def close(self) -> None:
        """Wait for everything queued."""
        if self._finish.alive:
            self.stream.synchronize()


class LaunchedStream:
    """A CUDA stream whose work is launched by a thread, since it may have to wait for the host.

    Otherwise as `CudaStream`; the host waits for the launch where it would only have queued a wait.
    """

    def __init__(self, thread: Stream, device: torch.device) -> None:
        self._device = device
        self._cuda = CudaStream(device)
        self._thread = thread

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue ``works`` behind what the caller's stream has been given so far."""
        # Both made here: the thread's launch is behind what the caller has issued by now, and not by then.
        issued, done = torch.cuda.Event(), torch.cuda.Event()
        issued.record(torch.cuda.current_stream(self._device))
        launched = self._thread.run(partial(self._launch, works, after, _CudaEvent(issued, self._device), done))
        return _LaunchedEvent(launched, _CudaEvent(done, self._device))

    def _launch(
        self, works: Sequence[Callable[[], object]], after: Event | None, issued: Event, done: torch.cuda.Event
    ) -> None:
        # A new thread begins with device 0 and its default stream as current ones. That stream is the model's, mostly:
        # the lane would wait for all it has been given by now, and it for what comes before this on other lanes.
        with torch.cuda.device(self._device), torch.cuda.stream(self._cuda.stream):
            if after is not None:
                after.wait(threading.TIMEOUT_MAX)  # the host may have to, and has nothing else to do here
            self._cuda.run(*works, partial(done.record, self._cuda.stream), after=issued)

    def allocate(self, work: Callable[[], None]) -> None:
        """Allocate in this stream's order."""
        self._cuda.allocate(work)

    def free(self, work: Callable[[], None]) -> None:
        """Free in this stream's order: whoever frees has waited for the launch of what filled the memory."""
        self._cuda.free(work)

    def abandon(self) -> None:
        """Neither :meth:`close` nor the end of this object waits."""
        self._thread.abandon()
        self._cuda.abandon()

    def close(self) -> None:
        """Wait for everything queued."""
        # In this order: what the thread still launches is to be waited for.
        self._thread.close()
        self._cuda.close()


class _LaunchedEvent:
    """The end of work that a thread launches."""

    __slots__ = ("_end", "_launched")

    def __init__(self, launched: Event, end: Event) -> None:
        self._launched = launched
        self._end = end

    def wait(self, timeout: float) -> bool:
        return self._launched.wait(timeout) and self._end.wait(timeout)

    def done(self) -> bool:
        return self._launched.done() and self._end.done()
