"""Checkpoints that are written while training goes on: a copy in the host's memory, and a thread that writes it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from zeropp.checkpoint.attempt import Attempt
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.parts import Part
from zeropp.comm.hops import Comm
from zeropp.comm.members import gather_objects
from zeropp.engine.engine import Engine

__all__ = ["Background", "background_of", "backgrounds", "wait"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
_ALIGNED = 64  # bytes; so that every dtype may lie at the beginning of a part
_PATIENCE = 1800.0  # seconds that a rank's disk may be slower than another's, at least


class _Apart:
    """Where the writing threads of all ranks meet: a group of their own, since collectives of one have one order."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world = comm.rank, comm.world
        self._group = comm.host_group("checkpoint") if comm.world > 1 and comm.backend != "fake" else None
        self._seconds = max(comm.timeout.total_seconds(), _PATIENCE)

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Every rank's value."""
        if self._group is None:
            return [value] * self.world
        try:
            return gather_objects(value, self._group, self._seconds)
        except RuntimeError as error:
            raise CheckpointError(f"some rank has failed, ended or not come to {doing}: {error}") from error


class Background:
    """The checkpoint of one engine that is being written, if any, and the memory for the next."""

    def __init__(self, comm: Comm) -> None:
        self._meeting = _Apart(comm)
        self._memory: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._path = ""

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until it is written.

        Raises:
            CheckpointError: it could not be; once, and on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
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
            except BaseException as error:
                self._error = error

        # No daemon: a program that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=write, name="zeropp checkpoint")
        self._thread.start()

    def _copied(self, parts: Sequence[Part]) -> list[Part]:
        sizes = [-(-part.values.nbytes // _ALIGNED) * _ALIGNED for part in parts]
        memory, on_card = self._room(sum(sizes), parts), False
        found, begin = [], 0
        for part, size in zip(parts, sizes, strict=True):
            room = memory[begin : begin + part.values.nbytes].view(part.values.dtype).view(part.box.sizes)
            room.copy_(part.values, non_blocking=True)
            on_card |= part.values.is_cuda
            found.append(replace(part, values=room))
            begin += size
        if on_card:
            torch.cuda.current_stream().synchronize()
        return found

    def _room(self, nbytes: int, parts: Sequence[Part]) -> Tensor:
        """Memory that is kept for the next time: fresh pages cost many times what the copy does."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=any(p.values.is_cuda for p in parts))
        return self._memory


backgrounds: weakref.WeakKeyDictionary[Engine, Background] = weakref.WeakKeyDictionary()


def background_of(engine: Engine) -> Background:
    """That of an engine. Collective when first asked for."""
    if engine not in backgrounds:
        backgrounds[engine] = made = Background(engine.comm)
        # Its group goes with the engine, and a checkpoint that is nearly written should not.
        engine.on_close(made.finish)
    return backgrounds[engine]


def wait() -> None:
    """Wait until every checkpoint that was begun with ``asynchronous=True`` is written.

    Raises:
        CheckpointError: one could not be; on every rank of its model.
    """
    for each in list(backgrounds.values()):
        each.wait()
