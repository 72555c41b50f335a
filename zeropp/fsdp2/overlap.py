"""Comm streams on which the hops of different units run side by side, and the handle that FSDP2 waits for.

[Note: FSDP2's order] FSDP2 waits for a gather where it copies the result out, by the work that a hook returns or by
an event that it records on the calling stream behind the hook. For a reduction it has only that event, and lets the
next backward computation wait for it. So what a hook makes the calling stream wait for, FSDP2's next unit waits for:

- A gather begins behind the stream that FSDP2 has filled its input on, where ``allocate`` was called, and not behind
  the calling stream, which waits for the gather before.
- A reduction is waited for in FSDP2's all-reduce hook, which has a stream of its own, behind that event. With replicas
  (HSDP) their all-reduce comes before that hook, and the reduction is waited for where it is called.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp.comm.collective import naming_absence
from zeropp.comm.process_groups import abort_groups
from zeropp.comm.streams import DONE, CommStreams, Event, Launch, Work
from zeropp.comm.watch import make_monitor

__all__ = ["Arrival", "ReductionLimit", "Waiting", "queue", "wait_for"]

_log = logging.getLogger("zeropp")

_END = object()
_IN_FLIGHT = 2  # one that the links work on, and the next, so that they need not wait for it


class Waiting:
    """The hops of one mesh that a card has been given, and the error when they do not end.

    On CPU each hop ends with its group's timeout, and nothing is watched.

    Args:
        device: of the model.
        hang_timeout: seconds after which waiting for other ranks is an error.
        groups: the process groups that carry the hops; they are aborted then.
    """

    def __init__(self, device: torch.device, hang_timeout: float, groups: list[dist.ProcessGroup]) -> None:
        self._hang_timeout = hang_timeout
        self._groups = groups
        self._rank = dist.get_rank()
        self._lost: str | None = None
        self._monitor = make_monitor(device, hang_timeout, self._give_up)

    def watch_event(self, event: Event, what: str) -> None:
        """Hops were queued that end with ``event``; ``what`` follows "waiting for"."""
        if self._monitor is not None:
            self._monitor.watch_event(event, what)

    def require(self) -> None:
        """Raise the error if the ranks have lost each other.

        Raises:
            RuntimeError: some hop has not ended within ``hang_timeout``.
        """
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def close(self) -> None:
        """Stop watching."""
        if self._monitor is not None:
            self._monitor.close()

    def _give_up(self, doing: str, /, *, waited: bool) -> None:
        self._lost = (
            f"rank {self._rank} has waited for {doing} for {self._hang_timeout:g} s: another rank has failed or "
            "ended, is late, or runs other modules. The process groups of zeropp.fsdp2 are aborted; go on from a "
            "checkpoint. If a rank was only late, give zeropp.fsdp2.apply a longer hang_timeout"
        )
        # The main thread may be in a launch, and never come to raise it.
        _log.error("%s", self._lost)
        abort_groups(self._groups)


def queue(comm_streams: CommStreams, links: Sequence[str], part: Iterator[None], what: str, waiting: Waiting) -> Event:
    """Queue a unit's hops, each on the comm stream of its class of links.

    Args:
        comm_streams: one for each class.
        links: the classes, in order.
        part: pauses before each further class.
        what: the hops do, for the error.
        waiting: watches them.
    """
    waiting.require()
    # From the launch on: NCCL's first collective connects in it.
    launch = Launch()
    event = None
    waiting.watch_event(launch, what)
    try:
        event = comm_streams.run_work(Work(links, [_resumed(part, what, torch.is_inference_mode_enabled())]))[-1]
    finally:
        # After an error there is nothing to wait for.
        launch.end = event or DONE
    return event


def wait_for(event: Event) -> None:
    """Let the caller's stream, or on CPU the caller, wait for an event.

    Raises:
        RuntimeError: a rank has ended or not come; with the unit whose hop ended so.
        Exception: whatever else a hop has raised, here or for an earlier unit, after which none can be sent.
    """
    # Without a limit: on CPU each hop ends with its group's timeout, and one that fails ends all behind it.
    event.wait(threading.TIMEOUT_MAX)


class Arrival(dist.Work):
    """A gather under way, as FSDP2 waits for it."""

    def __init__(self, event: Event, waiting: Waiting) -> None:
        super().__init__()
        self._event = event
        self._waiting = waiting

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """See :func:`wait_for`. The timeout is that of the process groups, whatever is given."""
        wait_for(self._event)
        self._waiting.require()
        return True

    def is_completed(self) -> bool:
        """Tell whether the gather has ended, and without an error."""
        return self._event.done()


class ReductionLimit:
    """The reductions of one mesh that are under way: two at most, so that messages do not pile up.

    Args:
        comm_streams: of reductions.
        waiting: watches them.
    """

    def __init__(self, comm_streams: CommStreams, waiting: Waiting) -> None:
        self.comm_streams = comm_streams
        self._waiting = waiting
        self._under_way: deque[Event] = deque()

    def make_room(self) -> None:
        """Let the caller's stream wait until another one may be under way."""
        # FSDP2 lets the next unit's backward wait for this stream, so the host cannot run ahead of it either.
        while len(self._under_way) >= _IN_FLIGHT:
            wait_for(self._under_way.popleft())
        self._waiting.require()

    def queue(self, links: Sequence[str], part: Iterator[None], what: str) -> Event:
        """See :func:`queue`."""
        event = queue(self.comm_streams, links, part, what, self._waiting)
        self._under_way.append(event)
        return event


def _resumed(part: Iterator[None], what: str, inference: bool) -> Iterator[None]:
    """The same pauses; each stretch in the caller's inference mode, and its errors naming what was done."""
    while True:
        # The mode belongs to a thread, and only inside it may a tensor that was made in it be written.
        mode = torch.inference_mode() if inference else contextlib.nullcontext()
        # Left before the pause: another comm stream, on a thread of its own, goes on behind it.
        with mode, naming_absence(what):
            if next(part, _END) is _END:
                return
        yield
