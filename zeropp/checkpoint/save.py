"""``save``: write one complete checkpoint into a folder, at once or while training goes on.

A save in the background copies to host memory, and a thread writes the copy.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.access.state import engine_of, require_values
from zeropp.checkpoint.boxes import CheckpointError, Part
from zeropp.checkpoint.commit import Attempt
from zeropp.checkpoint.contents import Contents, add_extra, contents
from zeropp.checkpoint.files import FILE_NBYTES, require_file_nbytes
from zeropp.checkpoint.metadata import Checksums
from zeropp.checkpoint.together import EngineMeeting, Meeting, Progress, Task, absolute, path_of_rank_0, together, tried
from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import HOST, gather_pickled, gather_rows
from zeropp.engine.engine import Engine
from zeropp.optimizer.rank_state import layout_id
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = [
    "Background",
    "background_of",
    "backgrounds",
    "begin",
    "require_ours",
    "save",
    "unfreeze",
    "wait",
    "wait_for_cards",
    "wait_together",
]


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


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    asynchronous: bool = False,
    busy: Literal["wait", "refuse"] = "wait",
    file_nbytes: int = FILE_NBYTES,
    exclude_frozen_parameters: bool = False,
    progress: bool = True,
) -> None:
    """Make ``path`` one complete checkpoint. Collective: every rank calls it, between optimizer steps.

    Each rank writes its own part, and nothing twice. What ``path`` has before stays until all of the new is on the
    disk; a save that fails, or is cut off, leaves it as it is.

    Args:
        path: a directory that all ranks see; made, or replaced if it is a checkpoint. Where ranks give different ones
            it is rank 0's, with a warning.
        model: wrapped by a ZeroOptimizer.
        optimizer: that one; without it weights alone are saved.
        extra: by name, values of JSON, tensors or numpy arrays, or objects with ``state_dict`` and
            ``load_state_dict``: schedulers, samplers, scalers. Ranks may have different ones.
        asynchronous: return when all is copied to the host's memory, and write while training goes on;
            :func:`wait` and the next save raise what goes wrong. Costs one copy of this rank's part in memory.
        busy: while another is being written, wait for it or raise.
        file_nbytes: largest size of a file in bytes, its header aside; at least 65536.
        exclude_frozen_parameters: leave out parameters that are not trained, as around adapters; a model that has them
            frozen, too, keeps its own when it loads this.
        progress: show a bar on the first rank once it has taken two seconds, if tqdm is installed.

    Raises:
        CheckpointError: it cannot be saved; on every rank, and nothing has changed.
        RuntimeError: called inside a pass, or ranks are at different calls.
        TypeError: the optimizer is none that zeropp has wrapped.
    """
    begin(
        path, model, optimizer, extra, asynchronous=asynchronous, busy=busy, file_nbytes=file_nbytes,
        trained_only=exclude_frozen_parameters, progress=progress,
    )  # fmt: skip


def begin(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    *,
    asynchronous: bool,
    busy: str,
    file_nbytes: int,
    trained_only: bool,
    progress: bool,
    completed: Callable[[], None] | None = None,
    in_window: bool = False,
) -> Path:
    """:func:`save`, and ``completed`` is called on the first rank when the checkpoint is in place; returns its path.

    ``in_window`` saves between two steps, too, without the gradients that have come since the first of them.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.save()")
    how = f"asynchronous={asynchronous}, exclude_frozen_parameters={trained_only}"
    engine.agreement.require_same_call(f"checkpoint.save(..., {how})")
    background = background_of(engine) if asynchronous else None
    _wait_for_others(engine, busy)
    # What is cached of older weights is renewed first: it may be a part of what is saved.
    engine.finish_load()
    engine.refresh.start_put_off()
    engine.refresh.wait()
    require_values(engine)
    own = Checksums.best().name, background is not None and background.broken, absolute(path)
    told = engine.agreement.exchange_objects(own, "agreeing on checksums and the path of a checkpoint")
    names, broken, paths = zip(*told, strict=True)
    target = path_of_rank_0(engine, paths, "checkpoint.save()")
    if background is not None and any(broken):
        background.meet_anew()
    checks, meeting = Checksums.common(names), EngineMeeting(engine)
    collect = partial(contents, engine, model, extra=extra or {}, checks=checks, trained_only=trained_only)
    refused = 0 if in_window else engine.window.count
    found, token = _prepare(engine, optimizer, collect, target, file_nbytes, refused)
    shown = Progress(f"saving {target.name}", progress and meeting.rank == 0)
    attempt = Attempt(target, token, found, checks, file_nbytes, shown, completed)
    if background is None:
        # Threads copy from cards, on streams of their own.
        wait_for_cards(found.parts)
        attempt.run(meeting)
    else:
        doing, left = f"copying what is to be saved at {str(target)!r}", "nothing was saved"
        background.start(together(engine, doing, lambda: background.copied(attempt), left))
    return target


def _wait_for_others(engine: Engine, busy: str) -> None:
    """The one that is being written comes first; its error is this call's."""
    if busy not in ("wait", "refuse"):
        raise ValueError(f'busy is {busy!r}; expected "wait" or "refuse"')
    background = backgrounds.get(engine)
    own = background is not None and background.busy
    if busy == "refuse" and any(engine.agreement.exchange_objects(own, "looking for a save under way")):
        raise CheckpointError('a checkpoint is still being written; wait() for it, or save with busy="wait"')
    wait_together(engine, "this one was not begun")


def _prepare(
    engine: Engine,
    optimizer: Optimizer | None,
    collect: Callable[..., Contents],
    target: Path,
    limit: int,
    waiting: int,
) -> tuple[Contents, str]:
    """This rank's contents, and the attempt's token; fails on all ranks if it fails on any.

    ``waiting`` micro-batches have gradients that would be lost.
    """

    def prepare() -> Contents:
        require_file_nbytes(limit, least=1 << 16)
        if waiting:
            raise CheckpointError(
                f"gradients of {waiting} micro-batches wait for a step and would be lost; save after "
                "step(), or discard them with zero_grad(now=True)"
            )
        owner = require_ours(engine, optimizer)
        found = collect(optimizer=owner)
        found.own["layout"] = layout_id(engine)
        found.values["config"] = owner.config.model_dump(mode="json") if owner is not None else {}
        return found

    collected, error, told = tried(prepare)
    # A rank that has failed still takes part in the exchange, to say so.
    found = collected or Contents()
    own = (told, found.digest, secrets.token_hex(4))
    accounts = engine.agreement.exchange_objects(own, f"preparing the checkpoint {str(target)!r}")
    if error is not None:
        raise error
    failed = {rank: told for rank, (told, _, _) in enumerate(accounts) if told is not None}
    if failed:
        rank, cause = next(iter(failed.items()))
        raise CheckpointError(f"the checkpoint {str(target)!r} was not begun: rank {rank} has {cause}")
    _, digest, token = accounts[0]
    add_extra(found, engine.comm.rank, digest)
    return found, token


def require_ours(engine: Engine, optimizer: Optimizer | None) -> ZeroOptimizer | None:
    """The optimizer of an engine, as what it is.

    Raises:
        TypeError: it is none that zeropp has wrapped.
        ValueError: it is another model's.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; expected the ZeroOptimizer around it, or None for weights only"
        )
    if optimizer.engine is not engine:
        raise ValueError("the optimizer and the model do not belong together; give the ZeroOptimizer of this model")
    return optimizer


def unfreeze(engine: Engine, optimizer: Optimizer | None) -> None:
    """Let parameters that are trained from now on have states, and averages, before these are loaded."""
    if isinstance(optimizer, ZeroOptimizer) and optimizer.engine is engine:
        optimizer.apply_requires_grad()
