"""``save``: write one complete checkpoint into a folder, at once or while training goes on.

A save in the background copies to host memory, and a thread writes the copy.

The checkpoint becomes visible at one instant: ``os.replace`` in :func:`~zeropp.checkpoint.metadata.write_synced`
gives ``metadata.json`` its name when the files of all ranks are on the disk. Files of tensors bear the name of the
attempt that wrote them, and ``metadata.json`` says which of them are the checkpoint. Files of the checkpoint before
are removed only after that. A job that ends in the middle, or a disk that fills, leaves files that no metadata
names; the next save to the same place removes them.
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


# Checkpoints of earlier versions have files without the name of an attempt.
_FILE = re.compile(r"rank-\d{5,}(-[0-9a-f]{8})?-\d{5,}\.safetensors")
_OF_NFS = re.compile(r"\.nfs[0-9a-f]+")  # files that are removed and still open: NFS takes them away itself


def stem_of(rank: int, token: str) -> str:
    """Beginning of the names of a rank's files; no other attempt has the token."""
    return f"rank-{rank:05d}-{token}"


def is_unfinished(folder: Path) -> bool:
    """Tell whether a path is a folder with nothing in it but files of attempts that were cut off."""
    return folder.is_dir() and not (folder / METADATA).exists() and not others_in(folder)


def others_in(folder: Path) -> list[str]:
    """Names of what is in a folder and is of no checkpoint: a ``metadata.json`` of something else, too; in order."""
    metadata = folder / METADATA
    first = written_first(folder / METADATA)
    # While it is written over it may be empty.
    own = {first.name, METADATA} if begins_as_ours(metadata) or begins_as_ours(first) else {first.name}
    names = sorted(each.name for each in folder.iterdir())
    return [name for name in names if name not in own and not _FILE.fullmatch(name) and not _OF_NFS.fullmatch(name)]


def has_files_of(folder: Path, token: str) -> bool:
    """Tell whether the checkpoint that is there is that of an attempt."""
    try:
        return any(f"-{token}-" in file.name for file in Metadata.read(folder).files)
    except CheckpointError:
        return False


def clear(folder: Path) -> None:
    """Remove from a folder the files that attempts that were cut off have left beside its checkpoint."""
    path = folder / METADATA
    first = written_first(folder / METADATA)
    named: set[str] = set()
    try:
        named = {file.name for file in Metadata.read(folder).files}
    except CheckpointError:
        if path.exists():
            # Damaged, or of a later version: it stays until there is another.
            return
    else:
        end_write(path, Metadata.parse)
    first.unlink(missing_ok=True)
    remove_others(folder, keep=named)


def remove_others(folder: Path, *, keep: Collection[str] = (), of: str = "") -> None:
    """Remove files of tensors.

    Args:
        folder: where they are.
        keep: names of those that stay.
        of: token of the attempt whose files go; those of any if it is empty.
    """
    for each in folder.iterdir():
        if _FILE.fullmatch(each.name) and each.name not in keep and of in each.name:
            each.unlink(missing_ok=True)


def remove_attempt(folder: Path, token: str) -> None:
    """Remove the files of an attempt that has failed, unless they are the checkpoint by now."""
    if has_files_of(folder, token):
        return
    remove_others(folder, of=token)
    if not (folder / METADATA).exists():
        # Beside a damaged metadata.json it may be the only whole copy.
        written_first(folder / METADATA).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Take a checkpoint away, and its folder unless something else is in it, which stays."""
    # First what makes it one, so that a half-deleted one is none.
    written_first(folder / METADATA).unlink(missing_ok=True)
    (folder / METADATA).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        remove_others(folder)
        folder.rmdir()


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Make sure that what was written is still there before it gets its name.

    Raises:
        CheckpointError: something is gone.
    """
    gone = sorted(set(names).difference(os.listdir(folder)))
    if gone:
        raise CheckpointError(f"{gone[:5]} of {str(folder)!r} are gone since they were written; something removed them")


_UNTOUCHED = "Nothing was saved, and what was there before is as it was"
_IN_PLACE = "It is in place and complete, but a crash of the machine may undo that, and old ones may be left"


@dataclass(eq=False)
class CheckpointWriter:
    """One rank's part in writing a checkpoint.

    Attributes:
        path: the checkpoint's folder; what symbolic links on the way lead to.
        token: of this attempt alone, the same on every rank.
        contents: of this rank; only read.
        checks: algorithm of checksums.
        limit: largest size of a file.
        progress: of this rank.
        completed: called on the first rank when the checkpoint is in place.
    """

    path: Path
    token: str
    contents: SavePlan
    checks: Checksums
    limit: int
    progress: Progress
    completed: Callable[[], None] | None = None
    # How things are, for errors; only the first rank's comes to change.
    _left: str = field(default=_UNTOUCHED, init=False)
    _made: bool = field(default=False, init=False)
    _discarded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Two links to one folder are one path for is_under_way(). Of each rank: nodes may have other links.
        self.path = Path(os.path.realpath(self.path))

    def write_checkpoint(self, sync: RankSync) -> None:
        """Write it; every rank calls this.

        Raises:
            CheckpointError: some rank could not; on every rank, with its cause.
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
            # Unless all ranks know of the error, and it was done in their rounds.
            if first and not self._discarded:
                self._discard()
            raise
        finally:
            _under_way.discard(self)
            self.progress.close()

    def _together(self, sync: RankSync, doing: str, work: Callable[[], _T]) -> list[_T]:
        """Every rank's result, or an error on every rank if one has failed."""
        try:
            result, error, told = sync.do(work, doing, self.progress)
            answers = sync.exchange((result, told, self._left), doing)
        except RuntimeError as lost:
            if self._left == _UNTOUCHED:
                raise
            raise CheckpointError(f"{lost}. {self._left}") from lost
        failed = {rank: told for rank, (_, told, _) in enumerate(answers) if told is not None}
        if failed:
            # A large one may take long to remove, and a lost rank is the next call's concern.
            with contextlib.suppress(RuntimeError):
                sync.do(self._discard if sync.rank == 0 else _nothing, "removing what was written", self.progress)
            if error is not None and not isinstance(error, Exception):
                raise error
            _, _, left = answers[0]  # the first rank's, which alone puts it in place
            raise CheckpointError(
                f"{doing} at {str(self.path)!r} failed on rank{'s'[: len(failed) - 1]} {', '.join(map(str, failed))}: "
                f"{next(iter(failed.values()))}. {left}; saving again is possible"
            ) from error
        return [result for result, _, _ in answers]  # type: ignore[misc]

    def _make(self) -> None:
        """Make the folder, or remove what attempts that were cut off have left in it."""
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
        self._discarded = True
        if self not in _under_way:
            return  # the place is another's
        with contextlib.suppress(OSError):
            remove_attempt(self.path, self.token)
            if self._made:
                self.path.rmdir()  # which fails, as it should, where the checkpoint is in it

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
        require_files(self.path, (file.name for file in metadata.files))
        try:
            # The names of the files are on the disk before the metadata that names them.
            sync_folder(self.path)
            sync_folder(self.path.parent)
            metadata.write(self.path)
        except BaseException:
            # It may have its name all the same, and not be synced.
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


# Of this process, on first ranks.
_under_way: set[CheckpointWriter] = set()


def is_under_way(path: Path) -> bool:
    """Tell whether this process writes a checkpoint to a path, which has no symbolic links."""
    return any(each.path == path for each in list(_under_way))  # other threads add to it


def _nothing() -> None:
    pass


def check_target(path: Path) -> None:
    """Refuse to write over what is no checkpoint, or has more in it.

    Raises:
        CheckpointError: something else is there.
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
        f"the checkpoint {str(path)!r} has more in it: {others[:5]}; it is left as it is. Move that elsewhere, or "
        "choose another path"
    )


def _merged(written: Iterable[Written], contents: SavePlan) -> tuple[list[FileEntry], dict[str, TensorEntry]]:
    files: list[FileEntry] = []
    found: dict[str, tuple[str, tuple[int, ...], list[BoxEntry]]] = {}
    # A tensor without elements is among no rank's boxes, and has to be named all the same.
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
_ALIGNED = 64  # bytes; so that every dtype may lie at the beginning of a part
# Seconds at most for others' disks once training has failed: no longer than torchrun lets a rank take to end.
_AFTER_LOSS = 30.0


class _BackgroundSync(RankSync):
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
        since = self._comm.lost_at
        limit = min(_AFTER_LOSS, self._timeout.total_seconds())
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
        self._comm = weakref.ref(comm)
        self._warn_after = warn_after
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
        self._sync = _BackgroundSync(comm, self._warn_after, self._meetings)

    @property
    def broken(self) -> bool:
        """True if this rank has missed another one."""
        return self._sync.broken

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._task is not None and not self._task.done

    def wait_for_save(self) -> None:
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

    def finish_save(self) -> None:
        """As :meth:`wait_for_save`, where nobody can be told but by the log, until somebody asks."""
        try:
            self.wait_for_save()
        except CheckpointError as error:
            _log.error("%s", error)
            _logged.append(str(error))

    def copied(self, writer: CheckpointWriter) -> CheckpointWriter:
        """The same of values that training does not change; the one before must have been waited for."""
        return replace(writer, contents=replace(writer.contents, parts=self._copied(writer.contents.parts)))

    def start(self, writer: CheckpointWriter) -> None:
        """Write what was copied, and return meanwhile."""
        self._path = str(writer.path)
        sync = self._sync

        def write() -> None:
            writer.write_checkpoint(sync)
            _unfinished.pop(self, None)

        # Before it begins, since it may end at once.
        _unfinished[self] = None
        self._task = Task(write, "zeropp checkpoint")
        try:
            self._task.start()
        except RuntimeError:
            # The system has no thread for it.
            self.forget_save()
            raise

    def forget_save(self) -> None:
        """There is nobody who writes it."""
        self._task = None
        _unfinished.pop(self, None)

    def _copied(self, parts: Sequence[TensorBox]) -> list[TensorBox]:
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
        """Memory that is kept for the next time: fresh pages cost many times what the copy does."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None
            pinned = any(part.values.is_cuda for part in parts)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=pinned)
        return self._memory


def wait_for_cards(parts: Iterable[TensorBox]) -> None:
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
        engine.on_close(made.finish_save)
    return backgrounds[engine]


def wait() -> None:
    """Wait until every checkpoint that was begun with ``asynchronous=True`` is written.

    Raises:
        CheckpointError: one could not be; on every rank of its model.
    """
    told = list(_logged)
    cause = None
    # Those that are done, too: their threads may not have ended yet.
    for each in dict.fromkeys([*backgrounds.values(), *_unfinished]):
        try:
            each.wait_for_save()
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
        run_between_passes(engine, "waiting for the checkpoint before", background.wait_for_save, left)


def _forget_all() -> None:
    """Forget what the parent of this process writes."""
    for each in {*backgrounds.values(), *_unfinished}:
        each.forget_save()
    del _logged[:]


def _tell() -> None:
    """Log the errors that nobody has asked for; threads that write have ended by then."""
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
    engine.start_delayed_refresh()
    engine.wait_for_refresh()
    require_values(engine)
    own = Checksums.best().name, background is not None and background.broken, absolute(path)
    told = engine.agreement.exchange_objects(own, "agreeing on checksums and the path of a checkpoint")
    names, broken, paths = zip(*told, strict=True)
    target = path_of_rank_0(engine, paths, "checkpoint.save()")
    if background is not None and any(broken):
        background.meet_anew()
    checks = Checksums.common(names)
    sync = EngineSync(engine)
    collect = partial(contents, engine, model, extra=extra or {}, checks=checks, trained_only=trained_only)
    refused = 0 if in_window else engine.accumulation.count
    found, token = _prepare(engine, optimizer, collect, target, file_nbytes, refused)
    shown = Progress(f"saving {target.name}", progress and sync.rank == 0)
    writer = CheckpointWriter(target, token, found, checks, file_nbytes, shown, completed)
    if background is None:
        # Threads copy from cards, on streams of their own.
        wait_for_cards(found.parts)
        writer.write_checkpoint(sync)
    else:
        doing, left = f"copying what is to be saved at {str(target)!r}", "nothing was saved"
        background.start(run_between_passes(engine, doing, lambda: background.copied(writer), left))
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
    collect: Callable[..., SavePlan],
    target: Path,
    limit: int,
    waiting: int,
) -> tuple[SavePlan, str]:
    """This rank's contents, and the attempt's token; fails on all ranks if it fails on any.

    ``waiting`` micro-batches have gradients that would be lost.
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
    # A rank that has failed still takes part in the exchange, to say so.
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
