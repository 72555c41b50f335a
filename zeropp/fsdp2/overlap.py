"""Comm streams that overlap the hops of different units, and the work handle that FSDP2 waits for.

[Note: FSDP2's order] For a gather, FSDP2 waits before it copies the result out: for the work that the hook returns, or
for an event on the calling stream after the hook. For a reduction, FSDP2 has only such an event, and the next backward
computation waits for it. So if a hook makes the calling stream wait, FSDP2's next unit waits, too:

- A gather starts after the stream on which FSDP2 fills the input (the stream that called ``allocate``). The calling
  stream would be too late, because it waits for the previous gather.
- The wait for a reduction is in FSDP2's all-reduce hook, which runs on its own stream after that event. With replicas
  (HSDP), FSDP2's all-reduce runs before that hook, so the wait is in the reduce-scatter hook itself.
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
from zeropp.comm.streams import DONE, CommStreams, Event, Launch, Work, stages_of
from zeropp.comm.watch import make_monitor

__all__ = ["Arrival", "ReductionLimit", "Waiting", "queue", "wait_for"]

_log = logging.getLogger("zeropp")

_END = object()
# Number of reductions in flight: one that uses the links, and the next one, so that the links do not idle.
_IN_FLIGHT = 2


class Waiting:
    """A monitor of the hops of one mesh on a GPU, which reports an error if a hop does not end.

    On CPU, each hop ends with its group's timeout, so nothing is monitored.

    Args:
        device: device of the model.
        hang_timeout: seconds after which waiting for other ranks is an error.
        groups: process groups of the hops; they are aborted after the timeout.
    """

    def __init__(self, device: torch.device, hang_timeout: float, groups: list[dist.ProcessGroup]) -> None:
        self._hang_timeout = hang_timeout
        self._groups = groups
        self._rank = dist.get_rank()
        self._lost: str | None = None
        self._monitor = make_monitor(device, hang_timeout, self._give_up)

    def watch_event(self, event: Event, what: str) -> None:
        """Watch hops that end with ``event``; ``what`` names them in the error after the words "waiting for"."""
        if self._monitor is not None:
            self._monitor.watch_event(event, what)

    def require(self) -> None:
        """Raise an error if a hop has timed out.

        Raises:
            RuntimeError: a hop has not ended within ``hang_timeout``.
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
        # Log the error as well, because the main thread may hang in a kernel launch and never raise it.
        _log.error("%s", self._lost)
        abort_groups(self._groups)


def queue(comm_streams: CommStreams, links: Sequence[str], part: Iterator[None], what: str, waiting: Waiting) -> Event:
    """Queue a unit's hops, each on the comm stream of its class of links. Return the event of the last hop.

    Args:
        comm_streams: one comm stream per class of links.
        links: classes of links, in order.
        part: generator that runs the hops, and yields before each further class of links.
        what: description of the hops for error messages.
        waiting: monitor of the hops.
    """
    waiting.require()
    # Watch from the launch on, because NCCL connects the ranks during its first launch, which may hang.
    launch = Launch()
    event = None
    resumed = _resumed(part, what, torch.is_inference_mode_enabled())
    waiting.watch_event(launch, what)
    try:
        event = comm_streams.run_work(Work(links, [stages_of(resumed, links)]))
    finally:
        # After an error no event exists, so mark the launch as done.
        launch.end = event or DONE
    return event


def wait_for(event: Event) -> None:
    """Make the calling stream (on CPU, the calling thread) wait for an event.

    Raises:
        RuntimeError: a rank has failed or is absent; the message names the unit whose hop failed.
        Exception: another error of a hop of this or an earlier unit. No more hops can be sent after it.
    """
    # No timeout here: on CPU each hop ends with its group's timeout, and a failed hop ends all hops behind it.
    event.wait(threading.TIMEOUT_MAX)


class Arrival(dist.Work):
    """The work handle of a gather in flight, which FSDP2 waits for."""

    def __init__(self, event: Event, waiting: Waiting) -> None:
        super().__init__()
        self._event = event
        self._waiting = waiting

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the gather as :func:`wait_for` does. ``timeout`` is not used: each hop has a time limit."""
        wait_for(self._event)
        self._waiting.require()
        return True

    def is_completed(self) -> bool:
        """Return True if the gather has ended without an error."""
        return self._event.done()


class ReductionLimit:
    """A limit of two reductions in flight per mesh, so that computation does not run far ahead of a slow network.

    On CPU the host waits, so the limit also bounds the memory of messages. On a GPU only streams wait. The host goes on
    and may allocate further messages, so their memory is not bounded.

    Args:
        comm_streams: comm streams of reductions.
        waiting: monitor of the hops.
    """

    def __init__(self, comm_streams: CommStreams, waiting: Waiting) -> None:
        self.comm_streams = comm_streams
        self._waiting = waiting
        self._under_way: deque[Event] = deque()

    def make_room(self) -> None:
        """Make the calling stream (on CPU, the calling thread) wait until fewer than two reductions are in flight."""
        # On a GPU, FSDP2's next backward computation waits for the calling stream, so computation waits, too.
        while len(self._under_way) >= _IN_FLIGHT:
            wait_for(self._under_way.popleft())
        self._waiting.require()

    def queue(self, links: Sequence[str], part: Iterator[None], what: str) -> Event:
        """Queue a reduction as :func:`queue` does, and count it as in flight."""
        event = queue(self.comm_streams, links, part, what, self._waiting)
        self._under_way.append(event)
        return event


def _resumed(part: Iterator[None], what: str, inference: bool) -> Iterator[None]:
    """Run ``part`` step by step in the caller's inference mode, with ``what`` in the messages of its errors."""
    while True:
        # Inference mode is per thread, and tensors created in it may be written only inside it.
        mode = torch.inference_mode() if inference else contextlib.nullcontext()
        # Leave the mode before each yield, because another comm stream's thread may resume the generator.
        with mode, naming_absence(what):
            if next(part, _END) is _END:
                return
        yield
