"""Checkpoints that are written while training goes on: a copy in the host's memory, and a thread that writes it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from zeropp.checkpoint.attempt import Attempt
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.parts import Part
from zeropp.checkpoint.rounds import Rounds
from zeropp.checkpoint.tasks import Task
from zeropp.checkpoint.together import Tried, tried
from zeropp.comm.groups import HOST, gather_rows
from zeropp.comm.hops import Comm
from zeropp.comm.members import gather_objects
from zeropp.engine.engine import Engine

__all__ = ["Background", "background_of", "backgrounds", "wait"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
_ALIGNED = 64  # bytes; so that every dtype may lie at the beginning of a part
# Seconds at most for others' disks once training has failed: no longer than torchrun lets a rank take to end.
_AFTER_LOSS = 30.0


class _Apart:
    """Where the writing threads of all ranks meet: a group of their own, since collectives of one have one order."""

    def __init__(self, comm: Comm, warn_after: float | None) -> None:
        # While a thread writes it holds this: an engine that is dropped meanwhile takes its groups along only then.
        self._comm = comm
        self.rank, self.world = comm.rank, comm.world
        self._group = comm.host_group("checkpoint") if comm.world > 1 and comm.backend != "fake" else None
        self._timeout, self._warn_after = comm.timeout, warn_after

    def do(self, work: Callable[[], _T], doing: str) -> Tried[_T]:
        """What work comes to, when every rank's is done, in rounds in which ranks tell that they are still there.

        A disk may be as slow as it likes, and a rank that is lost is noticed within ``hang_timeout``: the process ends
        when this does. Where training has lost a rank that still writes, its disk is not waited for without limit.
        """
        if self._group is None:
            return tried(work)
        # It is the work that has a thread: a disk that takes no end must not keep this one, which tells of it.
        task = Task(lambda: tried(work), "zeropp checkpoint work")

        def wait(seconds: float) -> None:
            task.wait(seconds)
            self._give_up_late(doing)

        seconds = self._timeout.total_seconds()
        Rounds(self.rank, doing, partial(self._numbers, doing), seconds, self._warn_after).run(lambda: task.done, wait)
        return task.result()

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Every rank's value."""
        if self._group is None:
            return [value] * self.world
        with _lost(doing):
            return gather_objects(value, self._group, self._timeout.total_seconds())

    def _give_up_late(self, doing: str) -> None:
        since, limit = self._comm.lost_at, min(_AFTER_LOSS, self._timeout.total_seconds())
        if since is not None and time.monotonic() - since > limit:
            raise CheckpointError(
                f"the ranks lost each other {limit:g} s ago, and {doing} is not done on all of them; one before it is "
                "as it was"
            )

    def _numbers(self, doing: str, number: int) -> list[int]:
        assert self._group is not None
        with _lost(doing):
            rows = gather_rows(torch.tensor([number], device=HOST), self._group, self._timeout)
        return rows.view(-1).tolist()


@contextmanager
def _lost(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"some rank has failed, ended or not come to {doing}: {error}") from error


class Background:
    """The checkpoint of one engine that is being written, if any, and the memory for the next."""

    def __init__(self, comm: Comm, warn_after: float | None) -> None:
        self._meeting = _Apart(comm, warn_after)
        self._memory: Tensor | None = None
        self._task: Task[None] | None = None
        self._path = ""

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._task is not None and not self._task.done

    def wait(self) -> None:
        """Until it is written.

        Raises:
            CheckpointError: it could not be; once, and on every rank.
        """
        if self._task is None:
            return
        self._task.wait()
        task, self._task = self._task, None
        _unfinished.pop(self, None)
        try:
            task.result()
        except BaseException as error:
            raise CheckpointError(f"the checkpoint {self._path!r} was not written: {error}") from error

    def finish(self) -> None:
        """As :meth:`wait`, where nobody can be told but by the log."""
        try:
            self.wait()
        except CheckpointError as error:
            _log.error("%s", error)

    def start(self, attempt: Attempt) -> None:
        """Copy what is to be written, and return while it is; the one before must have been waited for."""
        contents = replace(attempt.contents, parts=self._copied(attempt.contents.parts))
        attempt = replace(attempt, contents=contents)
        self._path = str(attempt.path)

        def write() -> None:
            try:
                attempt.run(self._meeting)
                _unfinished.pop(self, None)
            except BaseException as error:
                if not threading.main_thread().is_alive():  # it is not going to ask
                    _log.error("the checkpoint %r was not written: %s", str(attempt.path), error)
                raise

        _unfinished[self] = None
        self._task = Task(write, "zeropp checkpoint")

    def _copied(self, parts: Sequence[Part]) -> list[Part]:
        sizes = [-(-part.values.nbytes // _ALIGNED) * _ALIGNED for part in parts]
        memory = self._room(sum(sizes), parts)
        found, begin = [], 0
        for part, size in zip(parts, sizes, strict=True):
            room = memory[begin : begin + part.values.nbytes].view(part.values.dtype).view(part.box.sizes)
            room.copy_(part.values, non_blocking=True)
            found.append(replace(part, values=room))
            begin += size
        # Each on the stream of its device, which need not be the one that is current.
        for device in dict.fromkeys(part.values.device for part in parts if part.values.is_cuda):
            torch.cuda.current_stream(device).synchronize()
        return found

    def _room(self, nbytes: int, parts: Sequence[Part]) -> Tensor:
        """Memory that is kept for the next time: fresh pages cost many times what the copy does."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory, pinned = None, any(part.values.is_cuda for part in parts)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=pinned)
        return self._memory


backgrounds: weakref.WeakKeyDictionary[Engine, Background] = weakref.WeakKeyDictionary()
# In order. What is written for an engine that is dropped goes on, and an error of it waits here for whoever asks.
_unfinished: dict[Background, None] = {}


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
    errors: list[CheckpointError] = []
    # Those that are done, too: their threads may not have ended yet.
    for each in dict.fromkeys([*backgrounds.values(), *_unfinished]):
        try:
            each.wait()
        except CheckpointError as error:
            # After the others have been waited for.
            errors.append(error)
    if errors:
        raise errors[0]
