"""Streams, which run gathers and reductions beside the model's own computation, and events, which mark finished work.

All streams follow one rule on every device: work runs in the order in which it was queued, after everything that the
caller issued before, and an event reports when the work is done. A CUDA stream has this behaviour by itself. On CPU a
thread takes the place of the CUDA stream. Where nothing is sent (one rank), the work runs at once in the caller's
thread. `CommStreams` has one stream for each class of links.

[Note: memory on several streams] torch's caching allocator makes memory available again, to the stream that allocated
it, as soon as no Python object refers to the memory, even if kernels on another stream still use it. Therefore gathered
weights are allocated and freed on one stream, the comm stream where their gather begins (`Stream.allocate`,
`Stream.free`). The allocator then reuses their memory only for later work of that comm stream, and that work waits for
the model's stream, which reads the weights. Temporary tensors of a hop are allocated on the comm stream of the hop. A
tensor that another comm stream or the caller uses afterwards is passed to `used_here` on that stream, so that the
allocator waits for that stream, too, before it reuses the memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from zeropp._compat import profiler_enabled, set_grad_enabled
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
    "Stage",
    "Stream",
    "ThreadEvent",
    "ThreadStream",
    "Work",
    "callers_stream",
    "copy",
    "in_turn",
    "issued_here",
    "make_comm_streams",
    "make_stream",
    "span",
    "stages_of",
    "used_here",
]


BUS = "bus"
"""Name of the class of links between a device and host memory."""

# Protocols, and events that work on every device.


class Event(Protocol):
    """The completion of one piece of work."""

    def wait(self, timeout: float) -> bool:
        """Make the caller's later work wait for this event.

        On a GPU usually only the caller's stream waits, and the host goes on. Otherwise the host waits.

        Args:
            timeout: seconds that the host waits at most.

        Returns:
            False if the host waited for ``timeout`` seconds and the work was not done; True otherwise.
        """
        ...

    def done(self) -> bool:
        """Return True if the work has finished without an error. Does not block the host."""
        ...


class Stream(Protocol):
    """A queue of work on a device or a thread."""

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue functions, in order, behind earlier work of this stream and behind work that the caller has issued.

        Args:
            *works: functions without arguments; on a GPU each function launches kernels.
            after: event that the first function waits for; None for no further wait.

        Returns:
            The event of the last function's completion.
        """
        ...

    def allocate(self, work: Callable[[], None]) -> None:
        """Call a function that allocates memory for work that will be queued on this stream."""
        ...

    def free(self, work: Callable[[], None]) -> None:
        """Call a function that frees such memory, once the caller's issued work no longer reads the memory."""
        ...

    def abandon(self) -> None:
        """Make :meth:`close` and finalizers not wait for queued work.

        Called when the ranks have lost each other, because queued work may then never end.
        """
        ...

    def close(self) -> None:
        """Wait for the queued work. Nothing may be queued afterwards."""
        ...


class Done:
    """An event that has already happened."""

    def wait(self, timeout: float) -> bool:
        """Return True at once, because the event has already happened."""
        return True

    def done(self) -> bool:
        """Return True, because the event has already happened."""
        return True


DONE = Done()


class Launch:
    """The end of work that the host is still launching. The launch itself may hang, so the monitor watches it, too.

    Attributes:
        end: event of the end of the work; None until the launch has returned.
    """

    def __init__(self) -> None:
        self.end: Event | None = None

    def wait(self, timeout: float) -> bool:
        """Wait for the work, at most ``timeout`` seconds. Return False if the launch has not returned yet."""
        return self.end is not None and self.end.wait(timeout)

    def done(self) -> bool:
        """Return True if the launch has returned and the work has finished."""
        return self.end is not None and self.end.done()


class EventGroup:
    """Several events that are waited for together."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    @staticmethod
    def from_events(events: Sequence[Event | None]) -> Event | None:
        """Return one event for all events of a sequence, ignoring None entries; None if there is no event."""
        there = [event for event in events if event is not None]
        # A single event is returned itself, without a wrapper, because most units have one buffer.
        return EventGroup(there) if len(there) > 1 else (there[0] if there else None)

    def wait(self, timeout: float) -> bool:
        """Wait for all events, at most ``timeout`` seconds in all. Return False when the time is over."""
        # Waiting for the events one after another takes as long as waiting for the last event.
        until = time.monotonic() + timeout
        return all(event.wait(max(until - time.monotonic(), 0.0)) for event in self._events)

    def done(self) -> bool:
        """Return True if all events have happened."""
        return all(event.done() for event in self._events)


# Comm streams: the streams of one kind of traffic.


Stage = Callable[[], object]
"""The part of some work that issues its collectives for one class of links."""


class Work:
    """Work that passes through several classes of links: "local" (inside a node), "cross" (between nodes) and `BUS`.

    The same work may be queued many times, one run after another.

    Args:
        links: the classes of links, in the order in which the work uses them.
        parts: stages of each part, one per class of links. There is usually one part per flat buffer. All parts finish
            one class of links before any part starts the next class.
        then: function called after the last class of links; None for no call.

    Attributes:
        steps: pairs of a class of links and the functions to call there, in order.
        read: end of the last run over its first class of links; by then the work has read its input.
    """

    __slots__ = ("read", "steps")

    def __init__(
        self, links: Sequence[str], parts: Sequence[Sequence[Stage]], then: Callable[[], object] | None = None
    ) -> None:
        calls = [list(stages) for stages in zip(*parts, strict=True)]
        if then is not None:
            # Queued behind the parts on the same comm stream, so it sees their results without another event.
            calls[-1].append(then)
        self.steps = tuple(zip(links, map(tuple, calls), strict=True))
        self.read: Event = DONE


def in_turn(stages: Sequence[Stage]) -> Iterator[None]:
    """Run stages one after another, and yield before each one but the first."""
    for number, stage in enumerate(stages):
        if number:
            yield
        stage()


def stages_of(part: Iterator[None], links: Sequence[str]) -> list[Stage]:
    """Return the stages of a generator that yields before each further class of links."""
    # Each ``next`` runs the generator up to its next ``yield``. The last ``next`` runs to the end of the generator; its
    # default None avoids StopIteration.
    return [partial(next, part, None)] * len(links)


class CommStreams(dict[str, Stream]):
    """One stream for each class of links. The first look-up of a class creates its stream.

    One unit's hop inside a node overlaps another unit's hop between nodes. Copies between device and host memory have a
    stream of their own (`BUS`). The host waits for the end of such a copy. If the copy ran on the comm stream of a hop,
    the host would also wait for all earlier hops on that stream.

    Every rank queues the same work in the same order, so all ranks issue the collectives of each process group in the
    same order, too.

    Args:
        make: function that returns a new stream for a class of links.
    """

    def __init__(self, make: Callable[[str], Stream]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, link: str) -> Stream:
        stream = self[link] = self._make(link)
        return stream

    def run_work(self, work: Work, after: Event | None = None) -> Event:
        """Queue a piece of work on the streams of its classes of links, each stream waiting for the one before.

        Args:
            work: the parts to run and the classes of links that they use.
            after: event that the first collective waits for; None for no wait.

        Returns:
            The event of the end of the work.
        """
        link, calls = work.steps[0]
        end = work.read = self[link].run(*calls, after=after)
        for link, calls in work.steps[1:]:
            end = self[link].run(*calls, after=end)
        return end

    def abandon(self) -> None:
        """Make all streams stop waiting for their queued work; see :meth:`Stream.abandon`."""
        # Iterate over a copy, because another thread may add a stream to the dictionary meanwhile.
        for stream in list(self.values()):
            stream.abandon()

    def close(self) -> None:
        """Wait for the queued work of all streams. Nothing may be queued afterwards."""
        for stream in self.values():
            stream.close()


def make_comm_streams(
    kind: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool = False
) -> CommStreams:
    """Create the comm streams for one kind of traffic.

    Args:
        kind: kind of traffic, such as "gather"; it begins the names of threads.
        device: device of the model.
        sends: True if the work waits for other ranks.
        overlap: True to run the work beside the caller's work.
        hosted: True if the work may wait for the host; see :func:`make_stream`.
    """
    name = partial("{} {}".format, kind)
    return CommStreams(lambda link: make_stream(name(link), device, sends=sends, overlap=overlap, hosted=hosted))


def make_stream(name: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool = False) -> Stream:
    """Create the stream that suits a device and a kind of work.

    Args:
        name: name of the stream's thread, if it has one.
        device: device of the model.
        sends: True if the work waits for other ranks. On CPU a thread is worthwhile only for such work and for
            ``hosted`` work.
        hosted: True if the work waits for the host: for weights that the host steps, or for data that the host reads
            from files or host memory.
        overlap: True to run the work beside the caller's work; False to run the work in the caller's order.
    """
    if not overlap:
        return InlineStream()
    if device.type == "cuda":
        return LaunchedStream(ThreadStream(name), device) if hosted else CudaStream(device)
    return ThreadStream(name) if sends or hosted else InlineStream()


# Streams on CPU.


class InlineStream:
    """A stream that runs work at once, in the caller's thread."""

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Wait for ``after``, then run ``works`` in the caller's thread."""
        if after is not None:
            after.wait(threading.TIMEOUT_MAX)
        graded = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            for work in works:
                work()
        finally:
            set_grad_enabled(graded)
        return DONE

    def allocate(self, work: Callable[[], None]) -> None:
        """Call ``work`` at once."""
        work()

    def free(self, work: Callable[[], None]) -> None:
        """Call ``work`` at once."""
        work()

    def abandon(self) -> None:
        """Do nothing, because no work is ever queued."""

    def close(self) -> None:
        """Do nothing, because no work is ever queued."""


class ThreadEvent:
    """The completion of work on a thread, built on a plain lock, which costs less than a condition for one waiter."""

    __slots__ = ("_error", "_lock", "_made_in")

    def __init__(self) -> None:
        self._made_in = PROCESS.forks
        self._lock = threading.Lock()
        # The lock is held until the work is done. A lock may be released by a thread other than the one that acquired
        # it.
        self._lock.acquire()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        # In a forked child, work that was finished before the fork stays finished; unfinished work will never finish
        # there.
        if not self._lock.acquire(blocking=False):
            if self._made_in != PROCESS.forks:
                require_same_process(self._made_in)
            if not self._lock.acquire(timeout=timeout):
                return False
        # Several threads may wait for one event, so release the lock for the next waiter.
        self._lock.release()
        if self._error is not None:
            raise self._error
        return True

    def done(self) -> bool:
        # A waiter also holds the lock for a moment, so ``done`` may report False briefly after the work has finished.
        # That is harmless; ``done`` never reports True too early.
        return not self._lock.locked() and self._error is None


_Task = tuple[Sequence[Callable[[], object]], Event | None, ThreadEvent]


class ThreadStream:
    """A thread that works through a queue. After a failure, all later tasks in the queue fail with the same error."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # The thread refers to the queue and not to the stream, so that the stream can be collected as garbage, which
        # ends the thread.
        self._threads = Threads(partial(self._tasks.put, None))
        self._threads.start(name, _serve, self._tasks)

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue ``works`` on the thread. On CPU all work that the caller issued before is already finished.

        Raises:
            ForkedError: in a forked child, which does not have this thread.
        """
        if self._threads.made_in != PROCESS.forks:
            self._threads.require_here()
        event = ThreadEvent()
        self._tasks.put((works, after, event))
        return event

    def allocate(self, work: Callable[[], None]) -> None:
        """Call ``work`` at once, in the caller's thread.

        glibc has separate memory arenas for threads and returns memory freed in another thread's arena to the system.
        If the stream's thread allocated the memory, every gather would cause page faults for its buffer again.
        """
        work()

    def free(self, work: Callable[[], None]) -> None:
        """Call ``work`` at once.

        The caller has waited for the work that filled the memory, and on CPU all readers of the memory are done.
        """
        work()

    def abandon(self) -> None:
        """Ask the thread to end after its queued tasks, and return without waiting for it.

        A collective that hangs in the thread ends at the timeout of its process group.
        """
        self._threads.stop()

    def close(self) -> None:
        """Ask the thread to end after the queued work, and wait for it for at most 5 seconds."""
        self._threads.stop()
        # Work that hangs in a collective cannot be interrupted. After the time limit of ``join`` the thread keeps
        # running.
        self._threads.join()


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    # Grad mode is thread-local, so the caller's ``no_grad`` has no effect in this thread.
    torch.set_grad_enabled(False)
    failed: BaseException | None = None
    work: Callable[[], object] | None = None
    while (task := tasks.get()) is not None:
        works, after, event = task
        # After a failure this thread runs nothing more. The other ranks are still in the collective that failed here,
        # and this rank's next collective would be matched with it.
        if failed is None:
            try:
                if after is not None:
                    # This wait has no limit, because the caller that waits for this task's event has a time limit and
                    # raises the error.
                    after.wait(threading.TIMEOUT_MAX)
                for work in works:
                    work()
            except BaseException as error:
                # The error is passed to the waiters through the event, because nobody would see an exception that ends
                # this thread.
                failed = error
                _forget_locals(error)
        event.finish(failed)
        # Without this ``del``, the local variables of an idle thread would keep the tensors of the last task alive
        # until the next task.
        del task, works, after, event
        work = None


def _forget_locals(error: BaseException | None) -> None:
    """Clear the local variables in an error's traceback frames and in those of its causes.

    Line numbers stay. The local variables would keep the engine alive, and the engine would keep this thread alive.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# Streams on a CUDA device. The caller or a thread launches their work. See [Note: memory on several streams].


class CudaStream:
    """A CUDA stream whose work is launched by the caller; see [Note: memory on several streams].

    "The caller's stream" is the current stream of ``device``, even if another device is current in this process.

    Args:
        device: CUDA device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        # An index, because torch takes several times as long to look up the current stream of a torch.device.
        self._index = device.index
        # The stream has high priority, as in FSDP2, so that the small kernels around a collective are not queued behind
        # the model's large kernels.
        self.stream = torch.cuda.Stream(device, priority=-1)
        # Queued work may write to memory that was allocated on the caller's stream. That memory becomes free when the
        # engine is dropped, so wait for the queued work first.
        self._finish = when_dropped(self, self.stream.synchronize)
        # Recorded again at each call: a stream waits for the last recording before its wait, and later ones do not
        # matter. `run` and `free` have one each, because a `LaunchedStream` calls them from two threads.
        self._issued = torch.cuda.Event()
        self._read = torch.cuda.Event()

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Launch ``works`` on this stream, behind all work that the caller's stream has been given so far."""
        caller = torch.cuda.current_stream(self._index)
        # The caller's earlier kernels may write tensors that this work reads, such as a packed message or stepped
        # weights.
        self._issued.record(caller)
        self.stream.wait_event(self._issued)
        self._call(works, caller, after=after)
        # The event is recorded on this stream after the work, so it also covers all work queued on this stream before.
        event = torch.cuda.Event()
        event.record(self.stream)
        return _CudaEvent(event, self._index)

    def allocate(self, work: Callable[[], None]) -> None:
        """Call ``work`` with this stream as the current stream, so that its allocations belong to this stream."""
        # Allocating writes nothing to the memory, so no wait is needed. See [Note: memory on several streams].
        self._call((work,), torch.cuda.current_stream(self._index))

    def free(self, work: Callable[[], None]) -> None:
        """Call ``work``, which frees memory, on this stream, after this stream waits for the caller's stream."""
        # The allocator reuses the memory only for later work of this stream. This stream waits for the caller's stream,
        # so that work starts after the model's kernels have read the memory. ``run`` is not used here because nobody
        # needs an event for the end, and recording an event costs the host some microseconds.
        caller = torch.cuda.current_stream(self._index)
        self._read.record(caller)
        self.stream.wait_event(self._read)
        self._call((work,), caller)

    def _call(
        self, works: Sequence[Callable[[], object]], caller: torch.cuda.Stream, after: Event | None = None
    ) -> None:
        """Call functions without gradients, with this stream as the current one, after this stream waits for ``after``.

        Args:
            works: the functions.
            caller: the current stream of the device, which becomes current again.
            after: event to wait for; None for no wait.
        """
        # Not ``with torch.cuda.stream``, which costs the host several times as much as these calls.
        graded = torch.is_grad_enabled()
        current = torch.cuda.current_device()
        set_grad_enabled(False)
        torch.cuda.set_stream(self.stream)  # makes the stream's device the current device, too
        try:
            if after is not None:
                after.wait(threading.TIMEOUT_MAX)  # this stream waits for the event; the host goes on
            for work in works:
                work()
        finally:
            torch.cuda.set_stream(caller)
            if current != self._index:
                torch.cuda.set_device(current)
            set_grad_enabled(graded)

    def abandon(self) -> None:
        """Make :meth:`close` and the finalizer of this object not wait for the stream."""
        self._finish.detach()

    def close(self) -> None:
        """Block the host until all work queued on this stream has finished, unless :meth:`abandon` was called."""
        if self._finish.alive:
            self.stream.synchronize()


class _CudaEvent:
    __slots__ = ("_event", "_index")

    def __init__(self, event: torch.cuda.Event, index: int) -> None:
        self._event = event
        self._index = index

    def wait(self, timeout: float) -> bool:
        # Only the stream waits, so ``timeout`` is not used here. If the event never comes, the monitor in
        # zeropp.comm.watch notices.
        torch.cuda.current_stream(self._index).wait_event(self._event)
        return True

    def done(self) -> bool:
        # A query initializes CUDA on the current device, which need not be the model's device.
        if torch.cuda.current_device() == self._index:
            return bool(self._event.query())
        with torch.cuda.device(self._index):
            return bool(self._event.query())


class LaunchedStream:
    """A CUDA stream whose work is launched by a thread, because the work may have to wait for the host.

    Otherwise this class behaves like `CudaStream`, except that waiting for one of its events blocks the host until the
    thread has launched the work.

    Args:
        thread: stream whose thread launches the work.
        device: CUDA device of the model.
    """

    def __init__(self, thread: Stream, device: torch.device) -> None:
        self._index = device.index
        self._cuda = CudaStream(device)
        self._thread = thread

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Let the thread launch ``works`` behind all work that the caller's stream has been given so far."""
        # Record the ``issued`` event here and not in the thread: the work must wait for what the caller has issued by
        # now, and not for what the caller issues before the thread launches it.
        issued = torch.cuda.Event()
        done = torch.cuda.Event()
        issued.record(torch.cuda.current_stream(self._index))
        launched = self._thread.run(partial(self._launch, works, after, _CudaEvent(issued, self._index), done))
        return _LaunchedEvent(launched, _CudaEvent(done, self._index))

    def _launch(
        self, works: Sequence[Callable[[], object]], after: Event | None, issued: Event, done: torch.cuda.Event
    ) -> None:
        # Make the comm stream the current stream of this thread, which launches nothing else. A new thread starts with
        # device 0 and its default stream, usually the model's stream. Then ``CudaStream.run`` would make the comm
        # stream wait for all work that the model's stream has by the time of the launch, including that stream's waits
        # for other comm streams.
        torch.cuda.set_stream(self._cuda.stream)
        if after is not None:
            after.wait(threading.TIMEOUT_MAX)  # may block this thread, which has nothing else to do
        self._cuda.run(*works, partial(done.record, self._cuda.stream), after=issued)

    def allocate(self, work: Callable[[], None]) -> None:
        """Call ``work`` with the CUDA stream as the current stream; see :meth:`CudaStream.allocate`."""
        self._cuda.allocate(work)

    def free(self, work: Callable[[], None]) -> None:
        """Call ``work`` as :meth:`CudaStream.free` does.

        The caller has waited for the launch of the work that filled the memory, so that work is already on the CUDA
        stream.
        """
        self._cuda.free(work)

    def abandon(self) -> None:
        """Make :meth:`close` and the finalizers of the thread and of the CUDA stream not wait for queued work."""
        self._thread.abandon()
        self._cuda.abandon()

    def close(self) -> None:
        """Wait for the thread to launch all queued work, then block the host until the work has finished."""
        # The thread is closed first, because the CUDA stream must also wait for the work that the thread still
        # launches.
        self._thread.close()
        self._cuda.close()


class _LaunchedEvent:
    """The end of work that a thread launches: first the launch is waited for, then the work itself."""

    __slots__ = ("_end", "_launched")

    def __init__(self, launched: Event, end: Event) -> None:
        self._launched = launched
        self._end = end

    def wait(self, timeout: float) -> bool:
        return self._launched.wait(timeout) and self._end.wait(timeout)

    def done(self) -> bool:
        return self._launched.done() and self._end.done()


def callers_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes the caller's present CUDA stream current again when it is entered later.

    Args:
        device: device of the stream. On CPU the context manager does nothing.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))


def used_here(tensor: Tensor) -> None:
    """Tell the allocator that a tensor allocated on another stream is also used on the current stream.

    Without this call, the allocator may reuse the memory as soon as Python frees the tensor, while kernels on the
    current stream still read or write it. On CPU this function does nothing.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


# Copies between host memory and device memory that the host does not have to wait for.


def copy(into: Tensor, values: Tensor) -> Event:
    """Copy a tensor between host and device on the device's current stream, and return the event of the copy's end.

    With page-locked host memory the host goes on during the copy. With other host memory the host waits in this call.

    Args:
        into: tensor to write to.
        values: tensor to read from. It must not change until the event has happened.

    Returns:
        The event of the end of the copy. Its ``wait`` blocks the host.
    """
    card = into if into.is_cuda else values
    into.copy_(values, non_blocking=card.is_cuda)
    return issued_here(card.device)


def issued_here(device: torch.device) -> Event:
    """Return an event for the end of all work that a device's current stream has so far; ``wait`` blocks the host."""
    if device.type != "cuda":
        return DONE
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _Ended(event)


class _Ended:
    """An event whose ``wait`` blocks the host instead of a stream, because the host uses the memory next."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: float) -> bool:
        """Block the host until the event has happened; ``timeout`` is ignored."""
        # No time limit is needed: the work before the event is mostly a copy, which takes seconds at most.
        self._event.synchronize()
        return True

    def done(self) -> bool:
        """Return True if the event has happened."""
        return bool(self._event.query())


_NOTHING = contextlib.nullcontext()


def span(what: str, unit: str) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range ``zeropp::<what> <unit>``, or an empty context manager if no profiler is recording."""
    return torch.profiler.record_function(f"zeropp::{what} {unit}") if profiler_enabled() else _NOTHING
