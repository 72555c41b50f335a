"""``save``: write a complete checkpoint to a folder, synchronously or in the background.

A background save copies this rank's share to host memory, and a thread writes the copy while training goes on.

A checkpoint replaces an earlier one atomically. All ranks write and sync their files of tensors, whose names contain a
random token of the save. Then rank 0 writes ``metadata.json``, which lists these files, complete or not at all
(:func:`~zeropp.checkpoint.metadata.write_synced`). Only then rank 0 removes the files of the earlier checkpoint. A save
that is cut off leaves files that no ``metadata.json`` lists; the next save to the same folder removes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.access.state import require_values
from zeropp.checkpoint.boxes import CheckpointError, TensorBox
from zeropp.checkpoint.files import FILE_NBYTES, Written, require_file_nbytes, write_files
from zeropp.checkpoint.metadata import (
    FORMAT,
    METADATA,
    STRETCH,
    BoxEntry,
    Checksums,
    FileEntry,
    Metadata,
    TensorEntry,
    begins_as_ours,
    dtype_code,
    end_write,
    sync_folder,
    written_first,
)
from zeropp.checkpoint.rank_sync import (
    EngineSync,
    Progress,
    RankSync,
    Task,
    absolute,
    path_of_rank_0,
    result_or_error,
    run_between_passes,
)
from zeropp.checkpoint.save_plan import SavePlan, add_extra, contents, require_ours
from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import HOST, gather_pickled, gather_rows
from zeropp.comm.threads import at_exit
from zeropp.engine.engine import Engine, engine_of
from zeropp_kernels import __version__

__all__ = [
    "Background",
    "CheckpointWriter",
    "background_of",
    "backgrounds",
    "begin_save",
    "check_target",
    "clear",
    "has_files_of",
    "is_under_way",
    "is_unfinished",
    "others_in",
    "remove",
    "remove_attempt",
    "remove_others",
    "require_files",
    "save",
    "stem_of",
    "wait",
    "wait_for_cards",
    "wait_together",
]

_T = TypeVar("_T")


# The token of the save is optional, because checkpoints of earlier versions have file names without it.
_FILE = re.compile(r"rank-\d{5,}(-[0-9a-f]{8})?-\d{5,}\.safetensors")
_OF_NFS = re.compile(r"\.nfs[0-9a-f]+")  # files removed while open; NFS deletes them when they are closed


def stem_of(rank: int, token: str) -> str:
    """Return the beginning of the names of a rank's files; ``token`` is unique to the save."""
    return f"rank-{rank:05d}-{token}"


def is_unfinished(folder: Path) -> bool:
    """Return True if a path is a folder that contains nothing but files of saves that were cut off."""
    return folder.is_dir() and not (folder / METADATA).exists() and not others_in(folder)


def others_in(folder: Path) -> list[str]:
    """Return the sorted names of files that no save of zeropp wrote, such as a ``metadata.json`` of another program."""
    metadata = folder / METADATA
    first = written_first(folder / METADATA)
    # While metadata.json is overwritten in place it may be empty, so the first copy is checked, too.
    own = {first.name, METADATA} if begins_as_ours(metadata) or begins_as_ours(first) else {first.name}
    names = sorted(each.name for each in folder.iterdir())
    return [name for name in names if name not in own and not _FILE.fullmatch(name) and not _OF_NFS.fullmatch(name)]


def has_files_of(folder: Path, token: str) -> bool:
    """Return True if the folder's complete checkpoint was written by the save with the given token."""
    try:
        return any(f"-{token}-" in file.name for file in Metadata.read(folder).files)
    except CheckpointError:
        return False


def clear(folder: Path) -> None:
    """Remove the files that cut-off saves left in a folder. A complete checkpoint in the folder stays."""
    path = folder / METADATA
    first = written_first(folder / METADATA)
    named: set[str] = set()
    try:
        named = {file.name for file in Metadata.read(folder).files}
    except CheckpointError:
        if path.exists():
            # The checkpoint is damaged or has a later format. Keep it until a new one is complete.
            return
    else:
        end_write(path, Metadata.parse)
    first.unlink(missing_ok=True)
    remove_others(folder, keep=named)


def remove_others(folder: Path, *, keep: Collection[str] = (), of: str = "") -> None:
    """Remove files of tensors from a folder.

    Args:
        folder: folder of the files.
        keep: names of files to keep.
        of: token of the save whose files are removed; "" for the files of all saves.
    """
    for each in folder.iterdir():
        if _FILE.fullmatch(each.name) and each.name not in keep and of in each.name:
            each.unlink(missing_ok=True)


def remove_attempt(folder: Path, token: str) -> None:
    """Remove the files of a failed save, unless its ``metadata.json`` is already in place."""
    if has_files_of(folder, token):
        return
    remove_others(folder, of=token)
    if not (folder / METADATA).exists():
        # If metadata.json exists but is damaged, the first copy may be the only complete one, so it is kept then.
        written_first(folder / METADATA).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint, and its folder unless the folder contains other files."""
    # Delete the metadata first, so that a half-deleted checkpoint does not count as complete.
    written_first(folder / METADATA).unlink(missing_ok=True)
    (folder / METADATA).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        remove_others(folder)
        folder.rmdir()


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Check that files exist, before the file that makes them a checkpoint or an export gets its name.

    Raises:
        CheckpointError: a file is missing.
    """
    gone = sorted(set(names).difference(os.listdir(folder)))
    if gone:
        raise CheckpointError(f"{gone[:5]} of {str(folder)!r} are gone since they were written; something removed them")


_UNTOUCHED = "Nothing was saved, and what was there before is as it was"
_IN_PLACE = (
    "It is in place and complete, but a crash of the machine may undo that, and files of the one before may be left"
)


@dataclass(eq=False)
class CheckpointWriter:
    """One rank's work in writing a checkpoint.

    Attributes:
        path: folder of the checkpoint, with symbolic links resolved.
        token: random token of this save, the same on every rank.
        contents: this rank's share; not modified.
        checks: checksum algorithm.
        limit: maximum size of a file in bytes, without its header.
        progress: this rank's progress.
        completed: called on rank 0 when the checkpoint is in place; None for nothing.
    """

    path: Path
    token: str
    contents: SavePlan
    checks: Checksums
    limit: int
    progress: Progress
    completed: Callable[[], None] | None = None
    # Text for errors that says which state the save leaves behind. It changes on rank 0 only.
    _left: str = field(default=_UNTOUCHED, init=False)
    _made: bool = field(default=False, init=False)
    _discarded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Resolve links, so that is_under_way() recognizes a folder by any path. Each rank resolves its own path,
        # because nodes may have different links.
        self.path = Path(os.path.realpath(self.path))

    def write_checkpoint(self, sync: RankSync) -> None:
        """Write the checkpoint. Collective.

        Raises:
            CheckpointError: a rank failed; raised on every rank, with the cause.
            RuntimeError: a rank was lost.
        """
        first = sync.rank == 0
        try:
            self._together(sync, "making a folder for a checkpoint", self._make if first else _nothing)
            stem = stem_of(sync.rank, self.token)
            parts = self.contents.parts
            own = self.contents.own
            written = self._together(
                sync,
                "writing a checkpoint",
                lambda: (write_files(self.path, stem, parts, self.checks, self.limit, self.progress), own),
            )
            self._together(
                sync,
                "completing a checkpoint",
                (lambda: self._finish(self._metadata(written))) if first else _nothing,
            )
        except BaseException:
            # _together() has already called _discard() if all ranks received the error.
            if first and not self._discarded:
                self._discard()
            raise
        finally:
            _under_way.discard(self)
            self.progress.close()

    def _together(self, sync: RankSync, doing: str, work: Callable[[], _T]) -> list[_T]:
        """Do local work on all ranks and return the result of every rank; raise on all ranks if one failed."""
        try:
            result, error, told = sync.do(work, doing, self.progress)
            answers = sync.exchange((result, told, self._left), doing)
        except RuntimeError as lost:
            if self._left == _UNTOUCHED:
                raise
            raise CheckpointError(f"{lost}. {self._left}") from lost
        failed = {rank: told for rank, (_, told, _) in enumerate(answers) if told is not None}
        if failed:
            # Removing a large checkpoint may take long, so it runs in sync.do(). If a rank is lost meanwhile, the next
            # collective call reports that.
            with contextlib.suppress(RuntimeError):
                sync.do(self._discard if sync.rank == 0 else _nothing, "removing what was written", self.progress)
            if error is not None and not isinstance(error, Exception):
                raise error
            _, _, left = answers[0]  # rank 0's text: only rank 0 puts the checkpoint in place
            raise CheckpointError(
                f"{doing} at {str(self.path)!r} failed on rank{'s'[: len(failed) - 1]} {', '.join(map(str, failed))}: "
                f"{next(iter(failed.values()))}. {left}; saving again is possible"
            ) from error
        return [result for result, _, _ in answers]  # type: ignore[misc]

    def _make(self) -> None:
        """Create the folder, or remove the files that cut-off saves left in it."""
        if is_under_way(self.path):
            raise CheckpointError(
                "another checkpoint is being written there by this process; wait() for it first, or give each model a "
                "path of its own"
            )
        _under_way.add(self)
        check_target(self.path)
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        clear(self.path)

    def _discard(self) -> None:
        """Remove the files of this save after a failure."""
        self._discarded = True
        if self not in _under_way:
            return  # another save of this process is writing to the folder
        with contextlib.suppress(OSError):
            remove_attempt(self.path, self.token)
            if self._made:
                self.path.rmdir()  # fails, as intended, if the complete checkpoint is in the folder

    def _metadata(self, ranks: Iterable[tuple[Written, dict[str, Any]]]) -> Metadata:
        written, own = zip(*ranks, strict=True)
        contents = self.contents
        files, tensors = _merged(written, contents)
        return Metadata(
            format=FORMAT,
            zeropp=__version__,
            torch=torch.__version__,
            world=len(own),
            algorithm=self.checks.name,
            stretch=STRETCH,
            files=tuple(files),
            tensors=tensors,
            aliases=contents.aliases,
            coded=contents.coded,
            values=contents.values,
            ranks=tuple(own),
        )

    def _finish(self, metadata: Metadata) -> None:
        """Put the checkpoint in place, on rank 0, and remove the files of the earlier checkpoint."""
        require_files(self.path, (file.name for file in metadata.files))
        try:
            # Sync the names of the files to disk before the metadata that lists them.
            sync_folder(self.path)
            sync_folder(self.path.parent)
            metadata.write(self.path)
        except BaseException:
            # metadata.json may be in place although the write failed, for example in the last sync.
            if has_files_of(self.path, self.token):
                self._left = _IN_PLACE
            raise
        self._left = _IN_PLACE
        remove_others(self.path, keep={file.name for file in metadata.files})
        self._complete()

    def _complete(self) -> None:
        if self.completed is not None:
            self.completed()
        self._left = "It is complete all the same"


# Saves in progress in this process, for models of which this process is rank 0.
_under_way: set[CheckpointWriter] = set()


def is_under_way(path: Path) -> bool:
    """Return True if this process is writing a checkpoint to ``path``, which must not contain symbolic links."""
    return any(each.path == path for each in list(_under_way))  # a copy, because other threads change the set


def _nothing() -> None:
    pass


def check_target(path: Path) -> None:
    """Check that a save would overwrite nothing but a checkpoint of zeropp.

    Raises:
        CheckpointError: the path is a file, or a folder with other files.
    """
    if not path.exists():
        return
    others = others_in(path) if path.is_dir() else [path.name]
    if not others:
        return
    if METADATA in others or not (path / METADATA).exists():
        raise CheckpointError(
            f"{str(path)!r} is there, and is no checkpoint of zeropp; it is left as it is: it has {others[:5]}. Choose "
            "another path"
        )
    raise CheckpointError(
        f"the checkpoint {str(path)!r} has other files in it: {others[:5]}; it is left as it is. Move them, or "
        "choose another path"
    )


def _merged(written: Iterable[Written], contents: SavePlan) -> tuple[list[FileEntry], dict[str, TensorEntry]]:
    """Merge the files and tensors of all ranks into entries of the metadata."""
    files: list[FileEntry] = []
    found: dict[str, tuple[str, tuple[int, ...], list[BoxEntry]]] = {}
    # List all tensors of the model first: an empty tensor has no boxes, but a load must find it.
    for name, (dtype, shape) in contents.shapes.items():
        found[name] = dtype_code(dtype, name), shape, []
    for each in written:
        for name, (code, shape, boxes) in each.tensors.items():
            entry = found.setdefault(name, (code, shape, []))
            if entry[:2] != (code, shape):
                raise CheckpointError(
                    f"ranks have {name!r} with different dtypes or shapes, {entry[:2]} and {(code, shape)}; build the "
                    "same model on every rank"
                )
            entry[2].extend(box.model_copy(update={"file": len(files) + box.file}) for box in boxes)
        files += each.files
    tensors = {n: TensorEntry(dtype=code, shape=shape, boxes=tuple(boxes)) for n, (code, shape, boxes) in found.items()}
    for name, tensor in tensors.items():
        there = sum(box.box.numel for box in tensor.boxes)
        if there != tensor.numel:
            raise CheckpointError(
                f"ranks have {there} of {tensor.numel} elements of {name!r}, and the checkpoint would be incomplete"
            )
    return files, tensors


_log = logging.getLogger("zeropp")
_ALIGNED = 64  # alignment in bytes of each box in the host copy; enough for every dtype
# Maximum seconds to wait for other ranks' writes after training has lost a rank. torchrun kills a rank that takes
# longer than this to end.
_AFTER_LOSS = 30.0


class _BackgroundSync(RankSync):
    """A :class:`RankSync` between the writing threads of all ranks.

    It has its own process group, because collectives of training in the same group could interleave in another order.
    """

    def __init__(self, comm: Comm, warn_after: float | None, number: int) -> None:
        super().__init__(comm, comm.timeout.total_seconds(), warn_after)
        # A writing thread refers to this object, and so keeps ``comm`` and its groups alive if the engine is dropped.
        self._comm = comm
        self._group = None if self.alone else comm.host_group(f"checkpoint {number}")
        self._timeout = comm.timeout
        self.broken = False  # True once a collective has failed: gloo cannot use the group any more

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Return the value of every rank, in rank order. Collective."""
        if self._group is None:
            return [value] * self.world
        with self._lost(doing):
            return gather_pickled(value, self._group, self._timeout.total_seconds())

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """Return the integer of every rank, in rank order. Collective.

        Raise some seconds (``_AFTER_LOSS``) after training has lost a rank, because that rank's write may never end.
        """
        assert self._group is not None
        since = self._comm.lost_at
        limit = min(_AFTER_LOSS, self._timeout.total_seconds())
        if since is not None and time.monotonic() - since > limit:
            raise CheckpointError(f"the ranks lost each other {limit:g} s ago, and {doing} is not done on all of them")
        with self._lost(doing):
            rows = gather_rows(torch.tensor([number], device=HOST), self._group, self._timeout)
        return rows.view(-1).tolist()

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        """Mark the group as broken if a collective inside fails, and raise CheckpointError."""
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise CheckpointError(f"some rank has failed, ended or not come to {doing}: {error}") from error


class Background:
    """The background save of one engine, if there is one, and the host memory for copies, which is reused."""

    def __init__(self, comm: Comm, warn_after: float | None) -> None:
        self._meetings = 0
        self._comm = weakref.ref(comm)
        self._warn_after = warn_after
        self._memory: Tensor | None = None
        self._task: Task[None] | None = None
        self._path = ""
        self.recreate_group()

    def recreate_group(self) -> None:
        """Create a process group for the writing threads, and free the broken one, if there is one. Collective."""
        comm = self._comm()
        assert comm is not None  # the engine is in use
        comm.free_host_group(f"checkpoint {self._meetings}")
        self._meetings += 1
        self._sync = _BackgroundSync(comm, self._warn_after, self._meetings)

    @property
    def broken(self) -> bool:
        """True if a collective of the writing threads has failed on this rank."""
        return self._sync.broken

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._task is not None and not self._task.done

    def wait_for_save(self) -> None:
        """Wait until the background save is complete.

        Raises:
            CheckpointError: the save failed. Every rank raises it, in its first call after the failure only.
        """
        if (task := self._task) is None:
            return
        task.wait()
        if self._task is not task:
            # A signal handler or another thread has waited for this save meanwhile and received its error.
            return
        self._task = None
        _unfinished.pop(self, None)
        try:
            task.result()
        except BaseException as error:
            raise CheckpointError(f"the checkpoint {self._path!r}, saved asynchronously, failed: {error}") from error

    def finish_save(self) -> None:
        """Wait for the save; log its error instead of raising, and keep the error for :func:`wait`."""
        try:
            self.wait_for_save()
        except CheckpointError as error:
            _log.error("%s", error)
            _logged.append(str(error))

    def copied(self, writer: CheckpointWriter) -> CheckpointWriter:
        """Return the writer with its boxes copied to host memory; a save that uses the memory must be over."""
        return replace(writer, contents=replace(writer.contents, parts=self._copied(writer.contents.parts)))

    def start(self, writer: CheckpointWriter) -> None:
        """Start a thread that writes the copied checkpoint."""
        self._path = str(writer.path)
        sync = self._sync

        def write() -> None:
            writer.write_checkpoint(sync)
            _unfinished.pop(self, None)

        # Register the save before the thread starts, because the thread removes the entry at its end.
        _unfinished[self] = None
        self._task = Task(write, "zeropp checkpoint")
        try:
            self._task.start()
        except RuntimeError:
            # The system cannot start another thread.
            self.forget_save()
            raise

    def forget_save(self) -> None:
        """Drop the save, because no thread writes it."""
        self._task = None
        _unfinished.pop(self, None)

    def _copied(self, parts: Sequence[TensorBox]) -> list[TensorBox]:
        """Copy boxes to host memory and wait for the copies."""
        sizes = [-(-part.values.nbytes // _ALIGNED) * _ALIGNED for part in parts]
        memory = self._room(sum(sizes), parts)
        found = []
        begin = 0
        for part, size in zip(parts, sizes, strict=True):
            room = memory[begin : begin + part.values.nbytes].view(part.values.dtype).view(part.box.sizes)
            room.copy_(part.values, non_blocking=True)
            found.append(replace(part, values=room))
            begin += size
        wait_for_cards(parts)
        return found

    def _room(self, nbytes: int, parts: Sequence[TensorBox]) -> Tensor:
        """Return host memory for the copies; kept for later saves, since touching new pages is slower than copying."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None
            pinned = any(part.values.is_cuda for part in parts)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=pinned)
        return self._memory


def wait_for_cards(parts: Iterable[TensorBox]) -> None:
    """Synchronize the current CUDA stream of each device with boxes, so that their values or copies are complete."""
    # A box may be on another device than the current one.
    for device in dict.fromkeys(part.values.device for part in parts if part.values.is_cuda):
        torch.cuda.current_stream(device).synchronize()


backgrounds: weakref.WeakKeyDictionary[Engine, Background] = weakref.WeakKeyDictionary()
# Background saves that run, or that failed and were not waited for, oldest first. If the engine of a save is dropped,
# this reference keeps the save for wait().
_unfinished: dict[Background, None] = {}
# Errors that finish_save() has logged and wait() has not raised yet.
_logged: list[str] = []


def background_of(engine: Engine) -> Background:
    """Return the :class:`Background` of an engine. The first call for an engine is collective: it creates a group."""
    if engine not in backgrounds:
        backgrounds[engine] = made = Background(engine.comm, engine.agreement.warn_after)
        # Closing the engine destroys the group, so wait for the save first.
        engine.on_close(made.finish_save)
    return backgrounds[engine]


def wait() -> None:
    """Wait until every checkpoint that was begun with ``asynchronous=True`` is complete.

    Raises:
        CheckpointError: a save failed; raised on every rank of its model.
    """
    told = list(_logged)
    cause = None
    # ``backgrounds`` also has saves that are complete, and so not in _unfinished, but whose threads have not ended yet.
    for each in dict.fromkeys([*backgrounds.values(), *_unfinished]):
        try:
            each.wait_for_save()
        except CheckpointError as error:
            # Raise it after all other saves have been waited for.
            told.append(str(error))
            cause = cause or error.__cause__
    del _logged[:]
    if told:
        raise CheckpointError("; ".join(told)) from cause


def wait_together(engine: Engine, left: str) -> None:
    """Wait for the background save of an engine, if there is one; raise its error on every rank. Collective.

    Some ranks may have received the error already, in :func:`wait`. Without the exchange here those ranks would go on
    while the others raise.

    Args:
        engine: engine of the model.
        left: text for errors that says which state an error leaves behind.

    Raises:
        CheckpointError: the save failed.
    """
    background = backgrounds.get(engine)
    if background is not None:
        run_between_passes(engine, "waiting for the checkpoint before", background.wait_for_save, left)


def _forget_all() -> None:
    """Drop the parent's saves in a forked process, which does not have their threads."""
    for each in {*backgrounds.values(), *_unfinished}:
        each.forget_save()
    del _logged[:]


def _tell() -> None:
    """Log errors of saves that were never waited for, at the end of the program; all writing threads have ended."""
    for each in list(_unfinished):
        each.finish_save()


at_exit(_tell, forget=_forget_all)


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
    """Save a complete checkpoint to a folder. Collective: every rank calls it, between optimizer steps.

    Each rank writes its own shards, and each element is written once. An earlier checkpoint at ``path`` stays until the
    new one is complete on disk. A save that fails or is cut off before that leaves the earlier one unchanged.

    Args:
        path: folder visible to all ranks; created, or replaced if it is a checkpoint. If ranks give different paths,
            rank 0's path is used, with a warning.
        model: model wrapped by a ZeroOptimizer.
        optimizer: the ZeroOptimizer of ``model``; None saves weights only.
        extra: JSON values, tensors, numpy arrays or objects with ``state_dict`` and ``load_state_dict`` (schedulers,
            samplers, scalers), by name. Ranks may give different states.
        asynchronous: return after copying this rank's share to host memory, and write it while training goes on. The
            copy takes as much host memory as the share. :func:`wait` and the next save raise errors of the write.
        busy: if another save of this model is in progress, "wait" waits for it and "refuse" raises.
        file_nbytes: maximum size of a file in bytes, without its header; at least 65536.
        exclude_frozen_parameters: leave out frozen parameters, for example around adapters. A model in which they are
            frozen can load the checkpoint and keeps its own values of them.
        progress: show a bar on rank 0 after two seconds, if tqdm is installed.

    Raises:
        CheckpointError: the save failed; raised on every rank. The message says which state the failure leaves.
        RuntimeError: the call is inside a pass, ranks are at different calls, or a rank is lost.
        TypeError: ``optimizer`` is not a ZeroOptimizer.
        ValueError: ``path`` is empty, ``busy`` or ``file_nbytes`` is invalid, or ``optimizer`` is of another model.
    """
    begin_save(
        path,
        model,
        optimizer,
        extra,
        asynchronous=asynchronous,
        busy=busy,
        file_nbytes=file_nbytes,
        trained_only=exclude_frozen_parameters,
        progress=progress,
    )


def begin_save(
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
    """Save like :func:`save`, with two more options, and return the checkpoint's path.

    ``completed`` is called on rank 0 when the checkpoint is in place. With ``in_window``, a save inside an accumulation
    window is allowed; the gradients accumulated so far are not saved.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.save()")
    how = f"asynchronous={asynchronous}, exclude_frozen_parameters={trained_only}"
    engine.agreement.require_same_call(f"checkpoint.save(..., {how})")
    background = background_of(engine) if asynchronous else None
    _wait_for_others(engine, busy)
    # Refresh cached weights first: they may be saved, too (bases of differences).
    engine.finish_load()
    engine.start_delayed_refresh()
    engine.wait_for_refresh()
    require_values(engine)
    own = Checksums.best().name, background is not None and background.broken, absolute(path)
    told = engine.agreement.exchange_objects(own, "agreeing on checksums and the path of a checkpoint")
    names, broken, paths = zip(*told, strict=True)
    target = path_of_rank_0(engine, paths, "checkpoint.save()")
    if background is not None and any(broken):
        background.recreate_group()
    checks = Checksums.common(names)
    sync = EngineSync(engine)
    collect = partial(contents, engine, model, extra=extra or {}, checks=checks, trained_only=trained_only)
    refused = 0 if in_window else engine.accumulation.count
    found, token = _prepare(engine, optimizer, collect, target, file_nbytes, refused)
    shown = Progress(f"saving {target.name}", progress and sync.rank == 0)
    writer = CheckpointWriter(target, token, found, checks, file_nbytes, shown, completed)
    if background is None:
        # Writing threads copy from the GPU on their own streams, so pending work on the present streams must be over.
        wait_for_cards(found.parts)
        writer.write_checkpoint(sync)
    else:
        doing, left = f"copying what is to be saved at {str(target)!r}", "nothing was saved"
        background.start(run_between_passes(engine, doing, lambda: background.copied(writer), left))
    return target


def _wait_for_others(engine: Engine, busy: str) -> None:
    """Wait for an earlier background save and raise its error; with ``busy="refuse"``, raise if one is in progress."""
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
    collect: Callable[..., SavePlan],
    target: Path,
    limit: int,
    waiting: int,
) -> tuple[SavePlan, str]:
    """Collect this rank's share and agree on the token of the save; raise on all ranks if one rank failed.

    ``waiting`` is the number of micro-batches whose gradients would be lost; any such gradients are an error.
    """

    def prepare() -> SavePlan:
        require_file_nbytes(limit, least=1 << 16)
        if waiting:
            raise CheckpointError(
                f"gradients of {waiting} micro-batches wait for a step and would be lost; save after "
                "step(), or discard them with zero_grad(now=True)"
            )
        owner = require_ours(engine, optimizer)
        found = collect(optimizer=owner)
        found.own["layout"] = engine.layout_id()
        found.values["config"] = owner.config.model_dump(mode="json") if owner is not None else {}
        return found

    collected, error, told = result_or_error(prepare)
    # A rank that failed still takes part in the exchange: otherwise the other ranks would wait for it.
    found = collected or SavePlan()
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
