"""Streams, which run gathers and reductions beside the model's own computing, and events, the ends of their work.

One rule for every device: work runs in the order it was given, after everything the caller had issued before, and its
event tells when it is done. A CUDA stream does that by itself; on CPU a thread takes its place, and where nothing is
sent (one rank) the work simply runs at once. `CommStreams` holds one stream for each class of links.

[Note: memory on several streams] torch's allocator gives memory back to the stream it was allocated on as soon as no
Python object refers to it, whatever runs on a device by then. So gathered weights are allocated and freed in the order
of one stream, the comm stream where their gather begins (`Stream.allocate`, `Stream.free`): it reuses them only for its
own later work, and that waits for the model's stream, which has read them. Temporaries of a hop live on the comm stream
of that hop. What goes on to another comm stream, or is handed to the caller, is named there by `used_here`, and the
allocator then waits for that stream, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from zeropp._compat import profiler_enabled
from zeropp.comm.threads import PROCESS, Threads, require_same_process, when_dropped

__all__ = [
    "BUS",
    "DONE",
    "CommStreams",
    "CudaStream",
    "Event",
    "EventGroup",
    "InlineStream",
    "Launch",
    "LaunchedStream",
    "Stream",
    "ThreadEvent",
    "ThreadStream",
    "Work",
    "callers_stream",
    "copy",
    "issued_here",
    "make_comm_streams",
    "make_stream",
    "span",
    "used_here",
]


BUS = "bus"
"""The class of links between a device and its host's memory."""

# Protocols, and events of any device.


class Event(Protocol):
    """Completion of one piece of work."""

    def wait(self, timeout: float) -> bool:
        """Let the caller's later work see the result; False when the host waited ``timeout`` seconds in vain."""
        ...

    def done(self) -> bool:
        """Tell whether it has happened, and well; no host waits for this."""
        ...


class Stream(Protocol):
    """A queue of work."""

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue ``works``, in order, behind earlier ones, what the caller has issued, and what ends ``after``.

        Returns:
            Completion of the last.
        """
        ...

    def allocate(self, work: Callable[[], None]) -> None:
        """Allocate memory for work that will be queued."""
        ...

    def free(self, work: Callable[[], None]) -> None:
        """Free such memory, once what the caller has issued no longer reads it."""
        ...

    def abandon(self) -> None:
        """Wait for nothing from here on: the ranks have lost each other, and what is queued may never end."""
        ...

    def close(self) -> None:
        """Finish; nothing may be queued afterwards."""
        ...


class Done:
    """An event that has happened."""

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`."""
        return True

    def done(self) -> bool:
        """See :class:`Event`."""
        return True


DONE = Done()


class Launch:
    """The end of work that is being launched.

    Attributes:
        end: of the work, once it has been launched.
    """

    def __init__(self) -> None:
        self.end: Event | None = None

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`; nobody waits for the launch itself."""
        return self.end is not None and self.end.wait(timeout)

    def done(self) -> bool:
        """See :class:`Event`."""
        return self.end is not None and self.end.done()


class EventGroup:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    @staticmethod
    def from_events(events: Sequence[Event | None]) -> Event | None:
        """The events that there are, as one; None if there is none."""
        there = [event for event in events if event is not None]
        # A single one as it is: most units have one buffer.
        return EventGroup(there) if len(there) > 1 else (there[0] if there else None)

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`."""
        # One after another is as long as the last of them takes.
        until = time.monotonic() + timeout
        return all(event.wait(max(until - time.monotonic(), 0.0)) for event in self._events)

    def done(self) -> bool:
        """See :class:`Event`."""
        return all(event.done() for event in self._events)


# Comm streams: the streams of one kind of work.


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


class CommStreams:
    """A stream for each class of links: one unit's hop inside a node runs beside another's between nodes.

    And beside a third one's copy between the device and the host. A copy on the comm stream of a hop would wait for the
    hops before it: the host waits for the end of a copy, and the memory that it fills has been used by them.

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

    def run_work(self, work: Work) -> list[Event]:
        """Queue every part's way over each class of links, each after the one before; the end of each, in order."""
        # The first comm stream waits for what came before, each further one for the comm stream before it.
        ends = list[Event]()
        event = work.after
        # One ``next`` for each class of links takes a part as far as its next pause. None in place of StopIteration:
        # the last one runs to the end.
        steps: list[Callable[[], object]] = [partial(next, part, None) for part in work.parts]
        last = len(work.links) - 1
        for number, link in enumerate(work.links):
            if number == last and work.then is not None:
                # Behind the parts on the same comm stream, so that it sees them finished, without another event.
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


def make_comm_streams(
    kind: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool = False
) -> CommStreams:
    """Comm streams for one kind of work; see :func:`make_stream`."""
    name = partial("{} {}".format, kind)
    return CommStreams(lambda link: make_stream(name(link), device, sends=sends, overlap=overlap, hosted=hosted))


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


# Streams on a CPU.


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

    __slots__ = ("_error", "_lock", "_made_in")

    def __init__(self) -> None:
        self._made_in = PROCESS.forks
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
            if self._made_in != PROCESS.forks:
                require_same_process(self._made_in)
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
        if self._threads.made_in != PROCESS.forks:
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


# Streams on a CUDA device, whose work the caller launches, or a thread; see [Note: memory on several streams].


class CudaStream:
    """A CUDA stream: see [Note: memory on several streams].

    The caller's stream is that of the model's device, which need not be the process's current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority, as in FSDP2: small kernels around a collective should not queue behind the model's large ones.
        self.stream = torch.cuda.Stream(device, priority=-1)
        # Its work may write to memory of the caller's stream, which is free again once an engine is dropped.
        self._finish = when_dropped(self, self.stream.synchronize)

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


class _CudaEvent:
    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout: float) -> bool:
        # The host goes on, so no time runs out here: see zeropp.comm.watch.
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def done(self) -> bool:
        return bool(self._event.query())


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
        issued = torch.cuda.Event()
        done = torch.cuda.Event()
        issued.record(torch.cuda.current_stream(self._device))
        launched = self._thread.run(partial(self._launch, works, after, _CudaEvent(issued, self._device), done))
        return _LaunchedEvent(launched, _CudaEvent(done, self._device))

    def _launch(
        self, works: Sequence[Callable[[], object]], after: Event | None, issued: Event, done: torch.cuda.Event
    ) -> None:
        # A new thread begins with device 0 and its default stream as current ones. That stream is the model's, mostly:
        # the comm stream would wait for all it has been given by now, and it for what comes before this on other comm
        # streams.
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


# Copies between the memories of the host and of a device, which the host need not wait for.


def copy(into: Tensor, values: Tensor) -> Event:
    """Copy, on the current stream of whichever is a card's; ``values`` must stay as they are until the event.

    What the host does after waiting for the event finds the copy made. Page-locked memory of the host lets it go on
    meanwhile; other memory has it wait here.
    """
    card = into if into.is_cuda else values
    into.copy_(values, non_blocking=card.is_cuda)
    return issued_here(card.device)


def issued_here(device: torch.device) -> Event:
    """The end of what a device's current stream has been given, for the host to wait for."""
    if device.type != "cuda":
        return DONE
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _Ended(event)


class _Ended:
    """The host waits, and no stream: it is the one that uses the memory next."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`."""
        # A copy is a matter of seconds at most; nothing else that the device does comes before it on its stream.
        self._event.synchronize()
        return True

    def done(self) -> bool:
        """See :class:`Event`."""
        return bool(self._event.query())


_NOTHING = contextlib.nullcontext()


def span(what: str, unit: str) -> contextlib.AbstractContextManager[object]:
    """A range ``zeropp::<what> <unit>`` in a profile; it costs nothing while none is being recorded."""
    return torch.profiler.record_function(f"zeropp::{what} {unit}") if profiler_enabled() else _NOTHING
