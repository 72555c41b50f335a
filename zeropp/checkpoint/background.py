"""Checkpoints that are written while training goes on: a copy in the host's memory, and a thread that writes it."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from zeropp.checkpoint.attempt import Attempt
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.parts import Part
from zeropp.checkpoint.tasks import Task
from zeropp.checkpoint.together import Meeting, together
from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import HOST, gather_pickled, gather_rows
from zeropp.engine.engine import Engine

__all__ = ["Background", "background_of", "backgrounds", "wait", "wait_for_cards", "wait_together"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
_ALIGNED = 64  # bytes; so that every dtype may lie at the beginning of a part
# Seconds at most for others' disks once training has failed: no longer than torchrun lets a rank take to end.
_AFTER_LOSS = 30.0


class _BackgroundMeeting(Meeting):
    """The writing threads of all ranks, in a group of their own: collectives of one group need one order."""

    def __init__(self, comm: Comm, warn_after: float | None, number: int) -> None:
        super().__init__(comm, comm.timeout.total_seconds(), warn_after)
        # While a thread writes it holds this: an engine that is dropped meanwhile takes its groups along only then.
        self._comm = comm
        self._group = None if self.alone else comm.host_group(f"checkpoint {number}")
        self._timeout = comm.timeout
        self.broken = False  # some rank has not come, and gloo takes no word from it any more

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Every rank's value."""
        if self._group is None:
            return [value] * self.world
        with self._lost(doing):
            return gather_pickled(value, self._group, self._timeout.total_seconds())

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """Every rank's number, unless training has lost a rank that still writes: its disk may take no end."""
        assert self._group is not None
        since, limit = self._comm.lost_at, min(_AFTER_LOSS, self._timeout.total_seconds())
        if since is not None and time.monotonic() - since > limit:
            raise CheckpointError(f"the ranks lost each other {limit:g} s ago, and {doing} is not done on all of them")
        with self._lost(doing):
            rows = gather_rows(torch.tensor([number], device=HOST), self._group, self._timeout)
        return rows.view(-1).tolist()

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise CheckpointError(f"some rank has failed, ended or not come to {doing}: {error}") from error


class Background:
    """The checkpoint of one engine that is being written, if any, and the memory for the next."""

    def __init__(self, comm: Comm, warn_after: float | None) -> None:
        self._meetings = 0
        self._comm, self._warn_after = weakref.ref(comm), warn_after
        self._memory: Tensor | None = None
        self._task: Task[None] | None = None
        self._path = ""
        self.meet_anew()

    def meet_anew(self) -> None:
        """Make another group, since some rank could not be heard in this one. Collective."""
        comm = self._comm()
        assert comm is not None  # of an engine that is being used
        comm.free_host_group(f"checkpoint {self._meetings}")
        self._meetings += 1
        self._meeting = _BackgroundMeeting(comm, self._warn_after, self._meetings)

    @property
    def broken(self) -> bool:
        """True if this rank has missed another one."""
        return self._meeting.broken

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._task is not None and not self._task.done

    def wait(self) -> None:
        """Until it is written.

        Raises:
            CheckpointError: it could not be; once, and on every rank.
        """
        if (task := self._task) is None:
            return
        task.wait()
        if self._task is not task:
            # A signal's handler, or another thread, has waited for it meanwhile, and was told.
            return
        self._task = None
        _unfinished.pop(self, None)
        try:
            task.result()
        except BaseException as error:
            raise CheckpointError(f"the checkpoint {self._path!r}, saved asynchronously, failed: {error}") from error

    def finish(self) -> None:
        """As :meth:`wait`, where nobody can be told but by the log, until somebody asks."""
        try:
            self.wait()
        except CheckpointError as error:
            _log.error("%s", error)
            _logged.append(str(error))

    def copied(self, attempt: Attempt) -> Attempt:
        """The same of values that training does not change; the one before must have been waited for."""
        return replace(attempt, contents=replace(attempt.contents, parts=self._copied(attempt.contents.parts)))

    def start(self, attempt: Attempt) -> None:
        """Write what was copied, and return meanwhile."""
        self._path, meeting = str(attempt.path), self._meeting

        def write() -> None:
            attempt.run(meeting)
            _unfinished.pop(self, None)

        # Before it begins, since it may end at once.
        _unfinished[self] = None
        self._task = Task(write, "zeropp checkpoint")
        try:
            self._task.start()
        except RuntimeError:
            # The system has no thread for it.
            self.forget()
            raise

    def forget(self) -> None:
        """There is nobody who writes it."""
        self._task = None
        _unfinished.pop(self, None)

    def _copied(self, parts: Sequence[Part]) -> list[Part]:
        sizes = [-(-part.values.nbytes // _ALIGNED) * _ALIGNED for part in parts]
        memory = self._room(sum(sizes), parts)
        found, begin = [], 0
        for part, size in zip(parts, sizes, strict=True):
            room = memory[begin : begin + part.values.nbytes].view(part.values.dtype).view(part.box.sizes)
            room.copy_(part.values, non_blocking=True)
            found.append(replace(part, values=room))
            begin += size
        wait_for_cards(parts)
        return found

    def _room(self, nbytes: int, parts: Sequence[Part]) -> Tensor:
        """Memory that is kept for the next time: fresh pages cost many times what the copy does."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory, pinned = None, any(part.values.is_cuda for part in parts)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=pinned)
        return self._memory


def wait_for_cards(parts: Iterable[Part]) -> None:
    """Wait for what was queued on cards: their values are there, or copied, when this returns."""
    # Each on the stream of its device, which need not be the one that is current.
    for device in dict.fromkeys(part.values.device for part in parts if part.values.is_cuda):
        torch.cuda.current_stream(device).synchronize()


backgrounds: weakref.WeakKeyDictionary[Engine, Background] = weakref.WeakKeyDictionary()
# In order. What is written for an engine that is dropped goes on, and an error of it waits here for whoever asks.
_unfinished: dict[Background, None] = {}
# Errors of those whose engine was closed, which nobody has asked for.
_logged: list[str] = []


def background_of(engine: Engine) -> Background:
    """That of an engine. Collective when first asked for."""
    if engine not in backgrounds:
        backgrounds[engine] = made = Background(engine.comm, engine.agreement.warn_after)
        # Its group goes with the engine, and a checkpoint that is nearly written should not.
        engine.on_close(made.finish)
    return backgrounds[engine]


def wait() -> None:
    """Wait until every checkpoint that was begun with ``asynchronous=True`` is written.

    Raises:
        CheckpointError: one could not be; on every rank of its model.
    """
    told, cause = list(_logged), None
    # Those that are done, too: their threads may not have ended yet.
    for each in dict.fromkeys([*backgrounds.values(), *_unfinished]):
        try:
            each.wait()
        except CheckpointError as error:
            # After the others have been waited for.
            told.append(str(error))
            cause = cause or error.__cause__
    del _logged[:]
    if told:
        raise CheckpointError("; ".join(told)) from cause


def wait_together(engine: Engine, left: str) -> None:
    """Wait for the checkpoint of an engine that is being written, if any; its error is every rank's. Collective.

    Ranks may have asked for it one by one, and some have been told already: those alone would go on.

    Args:
        engine: of the model.
        left: how things are after an error.

    Raises:
        CheckpointError: it could not be written.
    """
    background = backgrounds.get(engine)
    if background is not None:
        together(engine, "waiting for the checkpoint before", background.wait, left)


def _forget_all() -> None:
    """In a process that was forked: those who write are in the other one."""
    for each in {*backgrounds.values(), *_unfinished}:
        each.forget()
    del _logged[:]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _tell() -> None:
    """At the end of a program whatever nobody has asked for; threads that write have ended by then."""
    for each in list(_unfinished):
        each.finish()
