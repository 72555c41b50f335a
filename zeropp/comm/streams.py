"""Streams: where gathers and reductions run beside the model's own computing.

One rule for every device: work runs in the order it was given, after everything the caller had issued before, and its
event tells when it is done. A CUDA stream does that by itself; on CPU a thread takes its place, and where nothing is
sent (one rank) the work simply runs at once.

[Note: memory on several streams] torch's allocator gives memory back to the stream it was allocated on as soon as no
Python object refers to it, whatever runs on a device by then. So gathered weights are allocated and freed in the order
of one stream, the lane where their gather begins (`Stream.allocate`, `Stream.free`): it reuses them only for its own
later work, and that waits for the model's stream, which has read them. Temporaries of a hop live on the lane of that
hop. What goes on to another lane, or is handed to the caller, is named there by `used_here`, and the allocator then
waits for that stream, too.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from zeropp.comm.cuda_streams import CudaStream, LaunchedStream
from zeropp.comm.events import DONE, Event, Stream
from zeropp.comm.threads import Threads, generation, require_same_process

__all__ = [
    "BUS", "InlineStream", "Lanes", "ThreadEvent", "ThreadStream", "Work", "callers_stream", "make_lanes",
    "make_stream", "used_here",
]  # fmt: skip


BUS = "bus"
"""The class of links between a device and its host's memory."""


class InlineStream:
    """Runs work at once, in the caller."""

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Run ``works`` now."""
        if after is not None:
            after.wait(threading.TIMEOUT_MAX)
        with torch.no_grad():
            for work in works:
                work()
        return DONE

    def allocate(self, work: Callable[[], None]) -> None:
        """Allocate now."""
        work()

    def free(self, work: Callable[[], None]) -> None:
        """Free now."""
        work()

    def abandon(self) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Nothing to finish."""


class ThreadEvent:
    """Completion of work on a thread, on a bare lock: cheaper than a condition for one waiter."""

    __slots__ = ("_error", "_generation", "_lock")

    def __init__(self) -> None:
        self._generation = generation()
        self._lock = threading.Lock()
        # Held until the work is done. A lock may be released by another thread than took it.
        self._lock.acquire()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        # What is done is done in a forked child, too; what is not never will be.
        if not self._lock.acquire(blocking=False):
            require_same_process(self._generation)
            if not self._lock.acquire(timeout=timeout):
                return False
        # Let the next waiter through: several may wait for one event.
        self._lock.release()
        if self._error is not None:
            raise self._error
        return True

    def done(self) -> bool:
        # A waiter holds the lock for a moment, too: then the answer comes late, which does no harm; never too early.
        return not self._lock.locked() and self._error is None


_Task = tuple[Sequence[Callable[[], object]], Event | None, ThreadEvent]


class ThreadStream:
    """A thread that works through a queue; after a failure the rest of the queue fails with the same error."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # The thread holds the queue, not the stream, so that a dropped stream ends it.
        self._threads = Threads(partial(self._tasks.put, None))
        self._threads.start(name, _serve, self._tasks)

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue ``works``; on CPU the caller's earlier work is already done.

        Raises:
            ForkedError: in a forked child, which has no such thread.
        """
        self._threads.require_here()
        event = ThreadEvent()
        self._tasks.put((works, after, event))
        return event

    def allocate(self, work: Callable[[], None]) -> None:
        """Allocate now, in the caller: what glibc frees in another thread's arena goes back to the system.

        Every gather would take page faults for its memory anew.
        """
        work()

    def free(self, work: Callable[[], None]) -> None:
        """Free now: the caller has waited for the work that filled the memory, and on CPU its readers are done."""
        work()

    def abandon(self) -> None:
        """The thread finishes what it is doing, which the groups' timeouts limit, and ends."""
        self._threads.stop()

    def close(self) -> None:
        """Let the thread end after what is queued, and wait for it a while: work that hangs must not hang this."""
        self._threads.stop()
        # Work that hangs in a collective cannot be interrupted: the thread is left behind.
        self._threads.join()


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    # Grad mode belongs to a thread, so the caller's no_grad does not reach this one.
    torch.set_grad_enabled(False)
    failed: BaseException | None = None
    work: Callable[[], object] | None = None
    while (task := tasks.get()) is not None:
        works, after, event = task
        # The other ranks are still at the work that failed here: a later collective would meet their earlier one.
        if failed is None:
            try:
                if after is not None:
                    # Without a limit: whoever waits for this work has a shorter patience, and raises the error.
                    after.wait(threading.TIMEOUT_MAX)
                for work in works:
                    work()
            except BaseException as error:
                # Handed to whoever waits: an exception that ended this thread would be seen by nobody.
                failed = error
                _forget_locals(error)
        event.finish(failed)
        # An idle thread must not keep the last work's tensors, which its locals would until the next task.
        del task, works, after, event
        work = None


def _forget_locals(error: BaseException | None) -> None:
    """Keep an error's lines, and nothing that they worked with: the engine, which would keep this thread, for ever."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def make_stream(name: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool = False) -> Stream:
    """The stream for a device.

    Args:
        name: for its thread.
        device: where the model lives.
        sends: its work waits for other ranks; on CPU nothing else is worth a thread.
        hosted: its work waits for the host: for weights that it steps, or brings from elsewhere.
        overlap: run beside the caller's work; otherwise everything runs in the caller's order.
    """
    if not overlap:
        return InlineStream()
    if device.type == "cuda":
        return LaunchedStream(ThreadStream(name), device) if hosted else CudaStream(device)
    return ThreadStream(name) if sends or hosted else InlineStream()


@dataclass(frozen=True)
class Work:
    """Work that goes over one class of links after another: "local" inside a node, "cross" between nodes, and `BUS`.

    Attributes:
        links: the classes, in order.
        parts: generators that pause before each further class of links; all of them finish one before any goes on.
        then: done at the end.
        after: begins when this is done.
    """

    links: Sequence[str]
    parts: Sequence[Iterator[None]]
    then: Callable[[], object] | None = None
    after: Event | None = None


class Lanes:
    """A stream for each class of links: one unit's hop inside a node runs beside another's between nodes.

    And beside a third one's copy between the device and the host. A copy on the lane of a hop would wait for the hops
    before it: the host waits for the end of a copy, and the memory that it fills has been used by them.

    Every rank gives the same work in the same order, so the collectives of each process group keep one order, too.

    Args:
        make: a new stream for a class of links.
    """

    def __init__(self, make: Callable[[str], Stream]) -> None:
        self._make = make
        self._streams: dict[str, Stream] = {}

    def stream(self, link: str) -> Stream:
        """The stream of one class of links."""
        if link not in self._streams:
            self._streams[link] = self._make(link)
        return self._streams[link]

    def run(self, work: Work) -> list[Event]:
        """Queue every part's way over each class of links, each after the one before; the end of each, in order."""
        # The first lane waits for what came before, each further one for the lane before it.
        ends, event = list[Event](), work.after
        # One ``next`` for each class of links takes a part as far as its next pause. None in place of StopIteration:
        # the last one runs to the end.
        steps: list[Callable[[], object]] = [partial(next, part, None) for part in work.parts]
        last = len(work.links) - 1
        for number, link in enumerate(work.links):
            if number == last and work.then is not None:
                # Behind the parts on the same lane, so that it sees them finished, without another event.
                steps = [*steps, work.then]
            event = self.stream(link).run(*steps, after=event)
            ends.append(event)
        return ends

    def abandon(self) -> None:
        """Wait for none of them from here on."""
        # A copy: this may run beside a thread that makes a further one.
        for stream in list(self._streams.values()):
            stream.abandon()

    def close(self) -> None:
        """Finish all of them."""
        for stream in self._streams.values():
            stream.close()


def make_lanes(kind: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool = False) -> Lanes:
    """Lanes for one kind of work; see :func:`make_stream`."""
    name = partial("{} {}".format, kind)
    return Lanes(lambda link: make_stream(name(link), device, sends=sends, overlap=overlap, hosted=hosted))


def callers_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The stream that the caller issues on now, to be entered later; on CPU there is none to enter."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))


def used_here(tensor: Tensor) -> None:
    """Say that memory which was allocated on another stream is in use on this one, too.

    Temporaries are freed when the last work on them has been queued, which on a GPU is before it has run.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
