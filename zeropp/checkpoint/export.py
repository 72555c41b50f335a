"""Write files of whole tensors for transformers and torch, from a model in memory or from a checkpoint."""

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
"""Prefix of the name of the temporary folder, inside the export's folder, that files are first written to."""


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

    Ranks gather one unit at a time, and each rank writes a part of the safetensors files. Names are those of the plain
    model's ``state_dict()``; in safetensors files, a tied tensor has only its first name. A transformers model is
    written with the names and shapes that transformers itself would save, and with its configuration, so that
    ``from_pretrained`` reads the folder.

    Args:
        path: folder to write to; created, or replaced if it is an earlier export. With ``layout="torch"``, a file. If
            ranks give different paths, rank 0's path is used, with a warning.
        model: model wrapped by a ZeroOptimizer.
        dtype: dtype of floating-point weights in the files; None for the dtype that the model computes in.
        layout: "hf" writes several files with an index if one file would be larger than ``file_nbytes``. "single"
            writes one file. "torch" writes the ``state_dict()`` to the file ``path`` with ``torch.save``; rank 0 then
            holds the whole model in CPU memory.
        file_nbytes: maximum size of a file in bytes, without its header; used by "hf".
        progress: show a bar on rank 0 after two seconds, if tqdm is installed.

    Raises:
        OSError, CheckpointError: the files cannot be written; raised on every rank. The message of a CheckpointError
            says which state the failure leaves.
    """
    engine = _begin_export(model, "checkpoint.export()", f"checkpoint.export(..., dtype={dtype}, layout={layout!r})")
    # Resolve links, because os.replace would replace a symbolic link instead of its target.
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
    """Write safetensors files for :func:`export`, after ranks have agreed on the call and the path. Collective."""
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
    """Gather unit by unit and write this rank's files. Collective.

    Returns:
        Function that syncs and closes the files, and raises an error that occurred while writing. The caller runs it
        with a heartbeat, because syncing may take long.
    """
    own = range(engine.comm.rank, len(files.names), engine.comm.world)
    files.expect(own)
    error: Exception | None = None

    def is_own(made: str) -> bool:
        """Return True if this rank writes the file with the given tensor."""
        return files.file_of(made) in own

    def write(name: str, values: Tensor) -> None:
        nonlocal error
        if error is None and outgoing.wanted(name, is_own):
            try:
                for made, converted in outgoing.give(name, values):
                    if is_own(made):
                        files.write(made, converted)
            except Exception as caught:
                # Raise it at the end. Gathers are collective, so this rank must take part in the remaining ones.
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
        # Close the files, because the space of a deleted file is not freed while the file is open.
        files.close_unfinished()
        raise

    def close() -> None:
        if error is not None:
            files.close_unfinished()
            raise error
        files.close(own)

    return close


class _ExportFolder:
    """The folder of an export, and a temporary folder inside it for files that are not complete yet.

    Complete files are moved from the temporary folder to the export's folder. The file that readers open first (see
    :func:`completes`) is moved last, so readers never see an incomplete export. The files of an earlier export are
    removed before that.

    Args:
        target: folder of the export.
        token: random token of this export, the same on every rank.

    Attributes:
        folder: temporary folder.
        left: text for errors that says which state an error leaves behind.
    """

    def __init__(self, target: Path, token: str) -> None:
        self._target = target
        self._made = False
        self._goes_on = False
        self.folder = target / f"{_UNFINISHED}{token}"
        self.left = ErrorContext("nothing was written, and what was there before is as it was")

    def make(self) -> None:
        """Create the temporary folder, and remove temporary folders of exports that were cut off.

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
        """Return the names of an earlier export's files in the folder.

        Files in the temporary folder must have been created before, as configuration files are recognized by them.

        Raises:
            CheckpointError: the folder contains files that no export wrote.
        """
        names = sorted(set(os.listdir(self._target)) - {self.folder.name})
        files = [name for name in names if is_ours(self._target / name)]
        # transformers may save further files with the configuration; names that this export has as well are accepted.
        # A cut-off export may have left configuration files without any weights.
        known = {*files, *_CONFIGS, *os.listdir(self.folder)} if files or self._goes_on else set()
        others = [name for name in names if name not in known]
        if others:
            raise _foreign(self._target, others)
        return names

    def name_files(self, files: WholeFiles) -> None:
        """Remove the files of an earlier export, and move the new files from the temporary folder to their place."""
        require_files(self.folder, files.names)
        files.write_index()
        # Check again, because another program may have added files to the folder meanwhile.
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
        """Remove the temporary folder, and the export's folder if this export created it and it is empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made:
            with contextlib.suppress(OSError):
                self._target.rmdir()


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of an export's files; the file that readers open first comes last."""
    return sorted(names, key=lambda name: (completes(name), name))


def _save_configs(model: nn.Module, folder: Path) -> None:
    """Save the configurations of a transformers model to a folder."""
    each: Any
    for each in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        # Only transformers' own classes: save_pretrained() of another class may do something else.
        if type(each).__module__.startswith("transformers.") and hasattr(each, "save_pretrained"):
            each.save_pretrained(folder)


def save_16bit_model(
    save_dir: str | os.PathLike[str],
    model: nn.Module,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the whole 16-bit weights to one ``torch.save`` file, with the arguments of DeepSpeed's method. Collective.

    Args:
        save_dir: folder of the file; created if it does not exist.
        model: model wrapped by a ZeroOptimizer.
        save_filename: name of the file; an existing file is replaced.
        exclude_frozen_parameters: leave out frozen parameters.

    Returns:
        True if the file was written. In stage 3, False unless ``stage3_gather_16bit_weights_on_model_save`` is set, as
        in DeepSpeed.

    Raises:
        OSError, CheckpointError: the file cannot be written; raised on every rank. An existing file stays.
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
    """Gather whole weights and buffers to rank 0's CPU, in the dtypes that the model computes in.

    Collective: every rank calls it, between passes.

    Args:
        model: model wrapped by a ZeroOptimizer.
        exclude_frozen_parameters: leave out frozen parameters.

    Returns:
        The plain model's state dict on rank 0, None on other ranks.
    """
    doing = "gathering 16-bit weights"
    return _gathered(
        _begin_export(model, doing, f"{doing}, {exclude_frozen_parameters=}"), model, None, exclude_frozen_parameters
    )


def _begin_export(model: nn.Module, call: str, same: str) -> Engine:
    """Check that all ranks make the same call and may gather whole weights. Return the model's engine. Collective.

    Args:
        model: model wrapped by a ZeroOptimizer.
        call: name of the call, for errors.
        same: description of the call with its arguments, which must be equal on every rank.
    """
    engine = engine_of(model)
    engine.require_idle(call, averaged=True, needs=NOTHING)
    engine.agreement.require_same_call(same)
    require_values(engine)
    return engine


def _gathered(
    engine: Engine, model: nn.Module, dtype: torch.dtype | None, trained_only: bool
) -> dict[str, Tensor] | None:
    """Gather the plain model's state dict to rank 0's CPU; None on other ranks. Collective.

    Args:
        engine: engine of the model.
        model: the wrapped model.
        dtype: dtype of floating-point weights; None for the dtype that the model computes in.
        trained_only: leave out frozen parameters.
    """
    first = engine.comm.rank == 0
    state = dict[str, Tensor]()
    named, aliases = model_names(model)
    kinds = _kinds(engine, named, dtype)
    # Gather in the compute dtype if possible, because main weights in float32 have more bytes.
    gather = gather_computed if dtype is None else gather_main
    for buffer in engine.buffers:
        # Gathers are collective, so all ranks take part, but only rank 0 keeps the values.
        for name, values in zip(buffer.names, gather(engine, buffer), strict=True):
            if first:
                state[name] = values.to("cpu", kinds[name][0], copy=True)
    if not first:
        return None
    frozen = {name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    left_out = frozen if trained_only else set()
    # Copy the other tensors, too, because training may change them later.
    state |= {n: t.detach().to("cpu", kinds[n][0], copy=True) for n, t in named.items() if n not in state}
    whole = {name: state[name] for name in named} | {alias: state[name] for alias, name in aliases.items()}
    return {name: tensor for name, tensor in whole.items() if aliases.get(name, name) not in left_out}


def _write_state(engine: Engine, path: Path, state: dict[str, Tensor] | None) -> None:
    """Write rank 0's state dict to ``path`` with ``torch.save``, through a temporary file. Collective.

    ``state`` is None on the other ranks.
    """
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
    """Convert a checkpoint's weights to safetensors files of whole tensors, in one process, one tensor at a time.

    Names are those of the plain model's ``state_dict()``. A tied tensor is written under each of its names, so that a
    plain model loads the files with ``strict=True``.

    Args:
        checkpoint: folder that :func:`zeropp.checkpoint.save` wrote.
        out: folder to write to; created, or replaced if it is an earlier export.
        dtype: dtype of floating-point weights; None for the saved dtype, which for main weights is usually float32.
        layout: "hf" for several files if needed, or "single", as in :func:`export`.
        file_nbytes: maximum size of a file in bytes, without its header; used by "hf".
        verify: "all", "sample" or "none", as in :func:`zeropp.checkpoint.load`.
        progress: show a bar after two seconds, if tqdm is installed.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or the files cannot be written.
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
    """Return the dtype and shape that each tensor has in the export, by name."""
    own = {name: buffer.compute_dtype for buffer in engine.buffers for name in buffer.names}
    return {name: (_as(each, own.get(name, each.dtype), dtype), tuple(each.shape)) for name, each in named.items()}


def _as(tensor: Tensor, own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor has in the export; ``own`` is the dtype that the model computes in."""
    # Buffers keep their dtype, because positions and counts are not weights.
    return _cast(own, dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype


def _cast(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype`` for a floating-point tensor, if given, else the tensor's own dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is {dtype!r}; expected a floating torch.dtype, such as torch.bfloat16, or None")
    return dtype if dtype is not None and own.is_floating_point else own


def _limit(layout: str, file_nbytes: int) -> int | None:
    """Check ``layout`` and ``file_nbytes``, and return the maximum size of a file; None for a single file."""
    if layout not in ("hf", "single"):
        raise ValueError(f'layout is {layout!r}; expected "hf" or "single", or in export() "torch"')
    require_file_nbytes(file_nbytes)
    return file_nbytes if layout == "hf" else None


def _foreign(target: Path, others: list[str]) -> CheckpointError:
    """Return the error for a target that contains files which no export wrote."""
    return CheckpointError(
        f"{str(target)!r} is no export of zeropp, or has other files in it: {others[:5]}; it is left as it is. "
        "Choose another path"
    )
