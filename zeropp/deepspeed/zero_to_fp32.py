"""DeepSpeed's ``zero_to_fp32`` functions: full float32 weights from a checkpoint of DeepSpeed or of zeropp.

The functions run in one process without DeepSpeed; their names and defaults are DeepSpeed's. They are also a command:

    python -m zeropp.checkpoint.zero_to_fp32 runs/first weights --safe_serialization

:func:`write_script` writes a script with the same command into a directory of checkpoints.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zeropp.checkpoint.boxes import MODEL, STATE, CheckpointError
from zeropp.checkpoint.files import WholeFiles
from zeropp.checkpoint.foreign import TORCH_INDEX, TORCH_SINGLE, metadata_of
from zeropp.checkpoint.metadata import DTYPES, METADATA, Metadata, sync_folder, write_synced
from zeropp.checkpoint.series import Series
from zeropp.checkpoint.tensor_reader import TensorReader
from zeropp.deepspeed.zero_checkpoints import ZeroFolder, zero_folder
from zeropp.engine.engine import engine_of

__all__ = [
    "SCRIPT",
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "make_executable",
    "write_script",
]

_log = logging.getLogger("zeropp")

SCRIPT = "zero_to_fp32.py"
_TEXT = '''#!/usr/bin/env python3
"""Whole float32 weights from the checkpoints beside this file: python zero_to_fp32.py . WEIGHTS --safe_serialization"""

from zeropp.checkpoint.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint whose values are only read when ``contiguous()`` is called.

    Attributes:
        dtype: dtype of the tensor that ``contiguous()`` returns.
        shape: shape of the tensor.
        source: reader of the checkpoint.
        name: name of the tensor in the checkpoint.
    """

    dtype: torch.dtype
    shape: torch.Size
    source: TensorReader
    name: str

    def contiguous(self) -> Tensor:
        """Read and return the tensor, on the CPU."""
        return self.source.weight(self.name).to(self.dtype).contiguous()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor] | dict[str, LazyTensor]:
    """Return full weights and buffers of a checkpoint; floating-point tensors are in float32.

    Args:
        checkpoint_dir: DeepSpeed's directory with ``latest`` and a folder for each tag; or a checkpoint of zeropp; or
            the directory of a :class:`~zeropp.checkpoint.Series`.
        tag: name of the checkpoint in the directory; None for the newest.
        exclude_frozen_parameters: True to leave out frozen parameters. In a checkpoint of zeropp trained parameters are
            recognized by their optimizer states, so buffers are left out as well.
        lazy_mode: True to return a :class:`LazyTensor` for each tensor instead of reading it.

    Returns:
        Name -> tensor. A tied parameter is in the dict under each of its names, as the same object.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    lazy = _lazy(Path(checkpoint_dir).absolute(), tag, exclude_frozen_parameters)
    if lazy_mode:
        return lazy
    # Names of a tied parameter share one LazyTensor. Read it once, so that the names also share one tensor.
    made: dict[int, Tensor] = {}
    for each in lazy.values():
        if id(each) not in made:
            made[id(each)] = each.contiguous()
    return {name: made[id(each)] for name, each in lazy.items()}


def _lazy(root: Path, tag: str | None, trained_only: bool) -> dict[str, LazyTensor]:
    """Return a LazyTensor for each weight and buffer of a checkpoint, by name, including the names of tied ones."""
    source, left_out = _source(root, tag, trained_only)
    metadata = source.metadata
    kinds = {
        name.removeprefix(MODEL): (DTYPES[entry.dtype], entry.shape)
        for name, entry in metadata.tensors.items()
        if name.startswith(MODEL)
    }
    kinds |= {name: (DTYPES[entry.dtype], entry.shape) for name, entry in metadata.coded.items()}
    found = {
        name: LazyTensor(torch.float32 if dtype.is_floating_point else dtype, torch.Size(shape), source, name)
        for name, (dtype, shape) in kinds.items()
        if name not in left_out
    }
    return found | {alias: found[first] for alias, first in metadata.aliases.items() if first in found}


def _source(root: Path, tag: str | None, trained_only: bool) -> tuple[TensorReader, set[str]]:
    """Return the reader of a checkpoint, and the names of its tensors to leave out.

    Args:
        root: directory given by the user.
        tag: name of the checkpoint in ``root``; None for the newest.
        trained_only: True to leave out everything but trained parameters.
    """
    folder = root if tag is None else root / tag
    # A Series numbers its checkpoints by steps. The training engine and DeepSpeed write the newest tag to ``latest``.
    series = Series(root)
    if tag is None and series.steps():
        folder = series.path(series.latest() or 0)
    elif tag is None and (root / "latest").is_file():
        folder = root / (root / "latest").read_text().strip()
    if (folder / METADATA).is_file():
        metadata = Metadata.read(folder)
        return TensorReader(folder, metadata, "all"), _untrained(folder, metadata) if trained_only else set()
    there = zero_folder(root, tag) if root.is_dir() else None
    if there is None:
        raise CheckpointError(
            f"{str(folder)!r} is no checkpoint of zeropp ({METADATA}) and none of DeepSpeed's (latest, or "
            "*_optim_states.pt)"
        )
    zero = ZeroFolder(there)
    # "none", because DeepSpeed's files have no checksums to verify.
    return TensorReader(there, metadata_of(zero.files, zero.named), "none"), zero.frozen if trained_only else set()


def _untrained(folder: Path, metadata: Metadata) -> set[str]:
    """Return the names of weights and buffers without optimizer states in a checkpoint of zeropp."""
    stepped = {name.removeprefix(STATE).rpartition(".")[0] for name in metadata.tensors if name.startswith(STATE)}
    if not stepped:
        raise CheckpointError(
            f"{str(folder)!r} has no optimizer states, which say what was trained; leave exclude_frozen_parameters out"
        )
    names = {name.removeprefix(MODEL) for name in metadata.tensors if name.startswith(MODEL)} | metadata.coded.keys()
    return names - stepped


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write full float32 weights of a checkpoint to files that can be loaded without zeropp and DeepSpeed.

    The files are written under temporary names and renamed when all of them are complete.

    Args:
        checkpoint_dir: directory as for :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: directory for the files; created if it does not exist.
        max_shard_size: largest size of a file, in bytes or as a string such as "5GB"; None for one file.
        safe_serialization: True to write ``model.safetensors``, with one tensor in memory at a time. The format has no
            shared tensors, so a tied tensor is written under each of its names. False to write
            ``pytorch_model.bin``, with the tensors of one file in memory at a time.
        tag: name of the checkpoint in the directory; None for the newest.
        exclude_frozen_parameters: True to leave out frozen parameters.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
        OSError: a file cannot be written.
        ValueError: ``max_shard_size`` is not a size.
    """
    limit = _nbytes(max_shard_size)
    lazy = _lazy(Path(checkpoint_dir).absolute(), tag, exclude_frozen_parameters)
    out = Path(output_dir).absolute()
    beside = out / f".converting-{secrets.token_hex(4)}"
    beside.mkdir(parents=True)
    try:
        (_write_safetensors if safe_serialization else _write_torch)(beside, lazy, limit)
        # Rename the index last: readers take an index as the sign that all files are complete.
        for path in sorted(beside.iterdir(), key=lambda path: path.suffix == ".json"):
            os.replace(path, out / path.name)
        sync_folder(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _nbytes(size: str | int | None) -> int | None:
    """Return a size in bytes, given in bytes or as a string such as "5GB"; None stays None."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?I?)B?\s*", size.upper())
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f'max_shard_size is {size!r}; expected bytes, or a number with a unit as in "5GB"')
    return int(match.group(1)) * _UNITS[match.group(2)]


def _write_safetensors(folder: Path, lazy: dict[str, LazyTensor], limit: int | None) -> None:
    """Write all tensors to safetensors files of at most ``limit`` bytes, reading one tensor at a time."""
    files = WholeFiles(folder, {name: (each.dtype, tuple(each.shape)) for name, each in lazy.items()}, limit)
    try:
        for name, each in lazy.items():
            files.write(name, each.contiguous())
    except BaseException:
        files.close_unfinished()
        raise
    files.close(list(range(len(files.names))))
    files.write_index()


def _write_torch(folder: Path, lazy: dict[str, LazyTensor], limit: int | None) -> None:
    """Write all tensors with ``torch.save`` to files of about ``limit`` bytes, reading one file's tensors at a time."""
    groups = list(_grouped(lazy, limit))
    stem, end = TORCH_SINGLE.split(".")
    index: dict[str, str] = {}
    for number, group in enumerate(groups):
        file = TORCH_SINGLE if len(groups) == 1 else f"{stem}-{number + 1:05d}-of-{len(groups):05d}.{end}"
        made = {id(lazy[name]): lazy[name].contiguous() for name in group}
        with open(folder / file, "xb") as opened:
            torch.save({name: made[id(lazy[name])] for name in group}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        index |= dict.fromkeys(group, file)
    if len(groups) > 1:
        # Count a tied tensor once, because a file stores it once.
        total = sum(each.shape.numel() * each.dtype.itemsize for each in {id(e): e for e in lazy.values()}.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        write_synced(folder / TORCH_INDEX, text.encode())


def _grouped(lazy: dict[str, LazyTensor], limit: int | None) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    # All names of a tied tensor go into one file, because torch.save stores a shared tensor once only inside one file.
    names: dict[int, list[str]] = {}
    for name, each in lazy.items():
        names.setdefault(id(each), []).append(name)
    group: list[str] = []
    nbytes = 0
    for own in names.values():
        size = lazy[own[0]].shape.numel() * lazy[own[0]].dtype.itemsize
        if limit is not None and group and nbytes + size > limit:
            yield group
            group = []
            nbytes = 0
        group += own
        nbytes += size
    yield group


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move a plain model to the CPU and load the float32 weights of a checkpoint into it, not strictly.

    Args:
        model: model that is not wrapped. Load into a wrapped model with :func:`zeropp.checkpoint.load` or
            :func:`zeropp.checkpoint.load_foreign`.
        checkpoint_dir: directory as for :func:`get_fp32_state_dict_from_zero_checkpoint`.
        tag: name of the checkpoint in the directory; None for the newest.

    Returns:
        The model.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
        ValueError: a ZeroOptimizer manages the model.
    """
    try:
        engine_of(model)
    except ValueError:
        pass
    else:
        raise ValueError(
            f"{type(model).__name__} is managed by a ZeroOptimizer; load into it with zeropp.checkpoint.load, or "
            "load_foreign for a folder of DeepSpeed"
        )
    model = model.cpu()
    # strict=False, as in DeepSpeed's function of this name.
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main(argv: list[str] | None = None) -> None:
    """Run the command ``zero_to_fp32.py``, with DeepSpeed's arguments.

    Args:
        argv: command-line arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py",
        description="Whole float32 weights from a checkpoint, zeropp's or DeepSpeed's, without processes.",
    )
    parser.add_argument("checkpoint_dir", help="the folder that has latest")
    parser.add_argument("output_dir", help="directory for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a file; default: 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of torch's files")
    parser.add_argument("-t", "--tag", help="name of the checkpoint; default: the one that latest names")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, but has no effect")
    args = parser.parse_args(argv)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


def write_script(folder: Path) -> None:
    """Write the script ``zero_to_fp32.py`` into a directory of checkpoints, where DeepSpeed also puts it."""
    path = folder / SCRIPT
    path.write_text(_TEXT)
    make_executable(path)


def make_executable(path: str | os.PathLike[str]) -> None:
    """Set the executable bit of a script; if that fails, only log the error."""
    try:
        os.chmod(path, os.stat(path).st_mode | 0o100)
    except OSError as error:
        _log.info("%s was not made executable (%s); run it by python", path, error)
