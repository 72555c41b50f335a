"""Out of zeropp: files of whole tensors that transformers and torch read, from a running model or a checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeropp.access.state import gather_computed, gather_main, require_values
from zeropp.checkpoint.boxes import MODEL, CheckpointError
from zeropp.checkpoint.conversions import Outgoing
from zeropp.checkpoint.files import FILE_NBYTES, WholeFiles, completes, is_ours, require_file_nbytes
from zeropp.checkpoint.metadata import DTYPES, Metadata, sync_folder
from zeropp.checkpoint.rank_sync import ErrorContext, Progress, common_path, run_between_passes
from zeropp.checkpoint.save_plan import model_names
from zeropp.checkpoint.saving import require_files
from zeropp.checkpoint.tensor_reader import TensorReader, Verify
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine, engine_of
from zeropp.engine.preconditions import NOTHING

__all__ = ["consolidate", "export", "gather_16bit", "save_16bit_model"]

Layout = Literal["hf", "single"]
_CONFIGS = ("config.json", "generation_config.json")
_UNFINISHED = ".saving-"
"""Beginning of the names of folders in an export's folder that its files are written to."""


def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    layout: Layout | Literal["torch"] = "hf",
    file_nbytes: int = FILE_NBYTES,
    progress: bool = True,
) -> None:
    """Write whole weights and buffers to files. Collective: every rank calls it, between passes.

    The files are safetensors. The ranks share them out; each has one unit in memory at a time. Names are those of the
    plain model's ``state_dict()``, tied ones under the first; those of a transformers model are what transformers
    itself would save, also where it splits or joins weights for that. Its configuration is written beside, so that
    ``from_pretrained`` reads the directory.

    Args:
        path: a directory, made, or its files replaced if it is an earlier export; rank 0's, with a warning, where ranks
            differ.
        model: wrapped by a ZeroOptimizer.
        dtype: of floating weights; None for the dtype that the model computes in.
        layout: "hf" for several files with an index where one would be larger than ``file_nbytes``; "single" for one;
            "torch" for one of ``torch.save`` in place of safetensors: the file ``path`` with the ``state_dict()``,
            which the first rank has whole in its memory.
        file_nbytes: largest size of a file in bytes.
        progress: show a bar on the first rank once it has taken two seconds, if tqdm is installed.

    Raises:
        OSError, CheckpointError: it cannot be written; on every rank, with how things are now.
    """
    engine = _begin_export(model, "checkpoint.export()", f"checkpoint.export(..., dtype={dtype}, layout={layout!r})")
    # A link would be replaced itself.
    target = Path(os.path.realpath(common_path(engine, path, "checkpoint.export()")))
    if layout == "torch":
        _write_state(engine, target, _gathered(engine, model, dtype, trained_only=False))
    else:
        _write_folder(engine, model, target, dtype, layout, file_nbytes, progress)


def _write_folder(
    engine: Engine,
    model: nn.Module,
    target: Path,
    dtype: torch.dtype | None,
    layout: Layout,
    file_nbytes: int,
    progress: bool,
) -> None:
    """:func:`export`, of safetensors files, where ranks have agreed to it."""
    doing = f"exporting to {str(target)!r}"
    named, _ = model_names(model)
    kinds = _kinds(engine, named, dtype)
    token = engine.agreement.exchange_objects(secrets.token_hex(4), doing)[0]  # one folder for all ranks
    place = _ExportFolder(target, token)
    first = engine.comm.rank == 0
    left = place.left
    shown = Progress(f"exporting to {target.name}", progress and first)

    def prepare() -> tuple[WholeFiles, Outgoing]:
        outgoing = Outgoing(model, kinds)
        if first:
            place.make()
            _save_configs(model, place.folder)
            place.check_files()
        return WholeFiles(place.folder, outgoing.kinds, _limit(layout, file_nbytes), shown), outgoing

    try:
        files, outgoing = run_between_passes(engine, doing, prepare, left, at_disk=shown)
        run_between_passes(engine, doing, _write_tensors(engine, named, files, outgoing), left, at_disk=shown)
        finish = (lambda: place.name_files(files)) if first else lambda: None
        run_between_passes(engine, doing, finish, left, at_disk=shown)
    except BaseException:
        if first:
            place.discard()
        raise
    finally:
        shown.close()


def _write_tensors(
    engine: Engine, named: dict[str, Tensor], files: WholeFiles, outgoing: Outgoing
) -> Callable[[], None]:
    """Gather one unit after the other, with all ranks, and write this rank's files; returns what closes them.

    That is left to the caller since it waits for the disk, and raises what went wrong on the way.
    """
    own = range(engine.comm.rank, len(files.names), engine.comm.world)
    files.expect(own)
    error: Exception | None = None

    def is_own(made: str) -> bool:
        return files.file_of(made) in own

    def write(name: str, values: Tensor) -> None:
        nonlocal error
        if error is None and outgoing.wanted(name, is_own):
            try:
                for made, converted in outgoing.give(name, values):
                    if is_own(made):
                        files.write(made, converted)
            except Exception as caught:
                # Told at the end: gathering is collective, and the others go on with it.
                error = caught

    try:
        spread = set()
        for buffer in engine.buffers:
            for name, values in zip(buffer.names, gather_main(engine, buffer), strict=True):
                spread.add(name)
                write(name, values)
        for name, tensor in named.items():
            if name not in spread:
                write(name, tensor)
    except BaseException:
        # Others gather on without this rank; a deleted file that stays open would keep its room on the disk.
        files.close_unfinished()
        raise

    def close() -> None:
        if error is not None:
            files.close_unfinished()
            raise error
        files.close(own)

    return close


class _ExportFolder:
    """The folder of an export, and a folder in it that files are written to.

    The export becomes visible at one instant, as a checkpoint does: when the file that :func:`completes` it, which a
    reader asks for first, gets its name. Nothing of an export before is there by then.

    Args:
        target: the folder of the export.
        token: of this export alone.

    Attributes:
        folder: to write to.
        left: how things are, for errors.
    """

    def __init__(self, target: Path, token: str) -> None:
        self._target = target
        self._made = False
        self._goes_on = False
        self.folder = target / f"{_UNFINISHED}{token}"
        self.left = ErrorContext("nothing was written, and what was there before is as it was")

    def make(self) -> None:
        """Make the folder to write to, and remove those of exports that were cut off.

        Raises:
            CheckpointError: the target is a file.
        """
        if self._target.exists():
            if not self._target.is_dir():
                raise _foreign(self._target, [self._target.name])
            for cut_off in self._target.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(cut_off, ignore_errors=True)
                self._goes_on = True
        else:
            self._target.mkdir(parents=True)
            self._made = True
        self.folder.mkdir()

    def check_files(self) -> list[str]:
        """Names of the files of an earlier export; those of what is about to take their place are known by then.

        Raises:
            CheckpointError: something else is there.
        """
        names = sorted(set(os.listdir(self._target)) - {self.folder.name})
        files = [name for name in names if is_ours(self._target / name)]
        # Transformers may save more than configurations with them, and an export that was cut off leave those alone.
        known = {*files, *_CONFIGS, *os.listdir(self.folder)} if files or self._goes_on else set()
        others = [name for name in names if name not in known]
        if others:
            raise _foreign(self._target, others)
        return names

    def name_files(self, files: WholeFiles) -> None:
        """Give the files their names, in the place of those of an earlier export."""
        require_files(self.folder, files.names)
        files.write_index()
        # Again: something may have come in while files were written.
        before = self.check_files()
        if before:
            self.left.text = "the export that was there is not complete any more; export again"
        for name in _in_order(before)[::-1]:
            (self._target / name).unlink()
        sync_folder(self._target)
        for name in _in_order(os.listdir(self.folder)):
            if completes(name):
                sync_folder(self._target)
            os.replace(self.folder / name, self._target / name)
        self.left.text = "it is complete all the same"
        sync_folder(self._target)
        self.folder.rmdir()

    def discard(self) -> None:
        """Remove what was written, unless it has its names already."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made:
            with contextlib.suppress(OSError):
                self._target.rmdir()


def _in_order(names: Iterable[str]) -> list[str]:
    """Names of files of an export, that which makes it complete behind the others."""
    return sorted(names, key=lambda name: (completes(name), name))


def _save_configs(model: nn.Module, folder: Path) -> None:
    each: Any
    for each in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        # Of transformers: what else has a configuration may save it in another way, or somewhere else.
        if type(each).__module__.startswith("transformers.") and hasattr(each, "save_pretrained"):
            each.save_pretrained(folder)


def save_16bit_model(
    save_dir: str | os.PathLike[str],
    model: nn.Module,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """:func:`export` with ``layout="torch"``, by the name and arguments of DeepSpeed's engine.

    Args:
        save_dir: a directory, made if it is not there.
        model: wrapped by a ZeroOptimizer.
        save_filename: of the file, which is replaced.
        exclude_frozen_parameters: leave out parameters that are not trained.

    Returns:
        Whether it was written: in stage 3 only with ``stage3_gather_16bit_weights_on_model_save``, as in DeepSpeed.

    Raises:
        OSError, CheckpointError: it cannot be written; on every rank, and a file that was there stays.
    """
    call = "checkpoint.save_16bit_model()"
    engine = _begin_export(model, call, f"checkpoint.save_16bit_model(..., {exclude_frozen_parameters=})")
    path = common_path(engine, save_dir, call) / save_filename
    if not engine.mode.stays_whole and not engine.options.gathers_16_bit_on_save:
        if engine.comm.rank == 0:
            warn_user(
                f"{str(path)!r} was not written, since stage3_gather_16bit_weights_on_model_save is false; set it to "
                "true, or use zeropp.checkpoint.export"
            )
        return False
    _write_state(engine, path, _gathered(engine, model, None, exclude_frozen_parameters))
    return True


def gather_16bit(model: nn.Module, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
    """Whole weights and buffers on the first rank's CPU, in the dtypes that are computed with; None on other ranks.

    Collective, between passes.

    Args:
        model: wrapped by a ZeroOptimizer.
        exclude_frozen_parameters: leave out parameters that are not trained.
    """
    doing = "gathering 16-bit weights"
    return _gathered(
        _begin_export(model, doing, f"{doing}, {exclude_frozen_parameters=}"), model, None, exclude_frozen_parameters
    )


def _begin_export(model: nn.Module, call: str, same: str) -> Engine:
    """The engine of a model whose whole weights are about to be gathered, once ranks have agreed to it.

    Args:
        model: wrapped by a ZeroOptimizer.
        call: for errors.
        same: text that has to be the same on every rank.
    """
    engine = engine_of(model)
    engine.require_idle(call, averaged=True, needs=NOTHING)
    engine.agreement.require_same_call(same)
    require_values(engine)
    return engine


def _gathered(
    engine: Engine, model: nn.Module, dtype: torch.dtype | None, trained_only: bool
) -> dict[str, Tensor] | None:
    """The plain model's state on the first rank's CPU, and None on other ranks."""
    first = engine.comm.rank == 0
    state = dict[str, Tensor]()
    named, aliases = model_names(model)
    kinds = _kinds(engine, named, dtype)
    # In the dtype that is computed with fewer bytes travel.
    gather = gather_computed if dtype is None else gather_main
    for buffer in engine.buffers:
        # Gathering is collective, whoever keeps the values.
        for name, values in zip(buffer.names, gather(engine, buffer), strict=True):
            if first:
                state[name] = values.to("cpu", kinds[name][0], copy=True)
    if not first:
        return None
    frozen = {name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    left_out = frozen if trained_only else set()
    # Copies of the rest, too, which training goes on to write to.
    state |= {n: t.detach().to("cpu", kinds[n][0], copy=True) for n, t in named.items() if n not in state}
    whole = {name: state[name] for name in named} | {alias: state[name] for alias, name in aliases.items()}
    return {name: tensor for name, tensor in whole.items() if aliases.get(name, name) not in left_out}


def _write_state(engine: Engine, path: Path, state: dict[str, Tensor] | None) -> None:
    """Write the first rank's state to a file of ``torch.save``, beside it first; the other ranks have None."""
    left = ErrorContext("what was there before is as it was")

    def write() -> None:
        if state is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.writing")
        try:
            with open(beside, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            left.text = "it is complete all the same"
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)

    run_between_passes(engine, f"writing {str(path)!r}", write, left, at_disk=Progress())


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    layout: Layout = "single",
    file_nbytes: int = FILE_NBYTES,
    verify: Verify = "all",
    progress: bool = True,
) -> None:
    """Make whole safetensors files of a checkpoint's weights: on any machine, without ranks, one tensor in memory.

    Names are those of the plain model's ``state_dict()``. Tied tensors are written once for each name, so that a plain
    model loads the files strictly.

    Args:
        checkpoint: a directory that :func:`zeropp.checkpoint.save` wrote.
        out: a directory, made, or its files replaced if it is an earlier export.
        dtype: of floating weights; None for what is there: main weights in float32.
        layout: as in :func:`export`.
        file_nbytes: largest size of a file in bytes.
        verify: as in :func:`zeropp.checkpoint.load`.
        progress: show a bar once it has taken two seconds, if tqdm is installed.

    Raises:
        CheckpointError: it is no complete checkpoint, is damaged, or the files cannot be written.
    """
    folder = Path(checkpoint).absolute()
    target = Path(os.path.realpath(out))
    metadata = Metadata.read(folder)
    source = TensorReader(folder, metadata, verify)
    shapes = {
        n.removeprefix(MODEL): (DTYPES[t.dtype], t.shape) for n, t in metadata.tensors.items() if n.startswith(MODEL)
    }
    shapes |= {name: (DTYPES[entry.dtype], entry.shape) for name, entry in metadata.coded.items()}
    place = _ExportFolder(target, secrets.token_hex(4))
    shown = Progress(f"writing {target.name}", progress)
    try:
        place.make()
        place.check_files()
        kinds = {name: (_cast(own, dtype), shape) for name, (own, shape) in shapes.items()}
        kinds |= {alias: kinds[first] for alias, first in metadata.aliases.items() if first in kinds}
        files = WholeFiles(place.folder, kinds, _limit(layout, file_nbytes), shown)
        files.expect(range(len(files.names)))
        for name in kinds:
            files.write(name, source.weight(metadata.aliases.get(name, name)))
        files.close(range(len(files.names)))
        source.verify_rest(0, 1)
        place.name_files(files)
    except BaseException as error:
        place.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"{str(target)!r} cannot be written: {error} ({place.left.text})") from error
        raise
    finally:
        shown.close()


def _kinds(
    engine: Engine, named: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape that each tensor is to have."""
    own = {name: buffer.compute_dtype for buffer in engine.buffers for name in buffer.names}
    return {name: (_as(each, own.get(name, each.dtype), dtype), tuple(each.shape)) for name, each in named.items()}


def _as(tensor: Tensor, own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    # Buffers keep theirs: positions and counts are not weights.
    return _cast(own, dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype


def _cast(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is {dtype!r}; expected a floating torch.dtype, such as torch.bfloat16, or None")
    return dtype if dtype is not None and own.is_floating_point else own


def _limit(layout: str, file_nbytes: int) -> int | None:
    if layout not in ("hf", "single"):
        raise ValueError(f'layout is {layout!r}; expected "hf" or "single", or in export() "torch"')
    require_file_nbytes(file_nbytes)
    return file_nbytes if layout == "hf" else None


def _foreign(target: Path, others: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{str(target)!r} is there, and is no export of zeropp or has more in it: {others[:5]}; it is left as it is. "
        "Choose another path"
    )
