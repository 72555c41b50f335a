"""DeepSpeed's functions of ``zero_to_fp32``, over its own folders and over checkpoints of zeropp.

They need no ranks and no DeepSpeed; names and defaults are DeepSpeed's. Also as a command:
python -m zeropp.checkpoint.zero_to_fp32 runs/first weights --safe_serialization
and as the script that :func:`write_script` leaves in a folder of checkpoints.
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
    """A tensor that is read when ``contiguous()`` is called: dtype and shape that it will have."""

    dtype: torch.dtype
    shape: torch.Size
    source: TensorReader
    name: str

    def contiguous(self) -> Tensor:
        """Its values, on the CPU."""
        return self.source.weight(self.name).to(self.dtype).contiguous()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor] | dict[str, LazyTensor]:
    """Whole weights and buffers of a checkpoint, floating ones in float32.

    Args:
        checkpoint_dir: DeepSpeed's folder with ``latest`` and folders of tags; or a checkpoint of zeropp, or the folder
            of a :class:`~zeropp.checkpoint.Series`.
        tag: name of the checkpoint in it; None for the newest.
        exclude_frozen_parameters: leave out what was not trained. A checkpoint of zeropp says of trained parameters
            alone what they are, by their optimizer states; buffers are left out with the rest.
        lazy_mode: give :class:`LazyTensor` in place of tensors.

    Returns:
        By name; tied ones under each of their names, the same object.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    lazy = _lazy(Path(checkpoint_dir).absolute(), tag, exclude_frozen_parameters)
    if lazy_mode:
        return lazy
    # Tied names share one lazy tensor, and have to share one in memory.
    made: dict[int, Tensor] = {}
    for each in lazy.values():
        if id(each) not in made:
            made[id(each)] = each.contiguous()
    return {name: made[id(each)] for name, each in lazy.items()}


def _lazy(root: Path, tag: str | None, trained_only: bool) -> dict[str, LazyTensor]:
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
    """A checkpoint, and names of tensors that are not wanted of it."""
    folder = root if tag is None else root / tag
    # A training engine names its newest in ``latest``, as DeepSpeed does in folders of its own; a series has steps.
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
    # DeepSpeed's files have no checksums to verify.
    return TensorReader(there, metadata_of(zero.files, zero.named), "none"), zero.frozen if trained_only else set()


def _untrained(folder: Path, metadata: Metadata) -> set[str]:
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
    """Write whole float32 weights of a checkpoint to files that need neither zeropp nor DeepSpeed.

    Files have their names once all are complete.

    Args:
        checkpoint_dir: as in :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: gets the files; made if it is not there.
        max_shard_size: largest size of a file, as bytes or as in "5GB"; None for one file.
        safe_serialization: write ``model.safetensors``, with one tensor in memory. Tied tensors are written once for
            each name, since the format has no shared ones, and a plain model loads the file strictly. Otherwise
            ``pytorch_model.bin``, with one file in memory.
        tag, exclude_frozen_parameters: as there.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        OSError: files cannot be written.
    """
    limit = _nbytes(max_shard_size)
    lazy = _lazy(Path(checkpoint_dir).absolute(), tag, exclude_frozen_parameters)
    out = Path(output_dir).absolute()
    beside = out / f".converting-{secrets.token_hex(4)}"
    beside.mkdir(parents=True)
    try:
        (_write_safetensors if safe_serialization else _write_torch)(beside, lazy, limit)
        # An index, which makes files one, comes last.
        for path in sorted(beside.iterdir(), key=lambda path: path.suffix == ".json"):
            os.replace(path, out / path.name)
        sync_folder(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _nbytes(size: str | int | None) -> int | None:
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?I?)B?\s*", size.upper())
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f'max_shard_size is {size!r}; expected bytes, or a number with a unit as in "5GB"')
    return int(match.group(1)) * _UNITS[match.group(2)]


def _write_safetensors(folder: Path, lazy: dict[str, LazyTensor], limit: int | None) -> None:
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
        # A file has a tied tensor once, whatever its names are.
        total = sum(each.shape.numel() * each.dtype.itemsize for each in {id(e): e for e in lazy.values()}.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        write_synced(folder / TORCH_INDEX, text.encode())


def _grouped(lazy: dict[str, LazyTensor], limit: int | None) -> Iterator[list[str]]:
    """Names for each file; those of one tensor together."""
    # torch.save keeps two names of one tensor tied only inside one file.
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
    """Bring a plain model to the CPU and load the float32 weights of a checkpoint into it.

    Args:
        model: of plain torch. For one that a ZeroOptimizer manages there are :func:`zeropp.checkpoint.load` and
            :func:`zeropp.checkpoint.load_foreign`.
        checkpoint_dir, tag: as in :func:`get_fp32_state_dict_from_zero_checkpoint`.

    Returns:
        The model.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
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
    # Not strict, as DeepSpeed's function of this name.
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main(argv: list[str] | None = None) -> None:
    """The command, by DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py",
        description="Whole float32 weights from a checkpoint, zeropp's or DeepSpeed's, without processes.",
    )
    parser.add_argument("checkpoint_dir", help="the folder that has latest")
    parser.add_argument("output_dir", help="where the weights go")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file; default: 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of torch's files")
    parser.add_argument("-t", "--tag", help="of the checkpoint; default: the one that latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="trained ones alone")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; without effect")
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
    """Leave the script in a folder of checkpoints, where guides to DeepSpeed tell people to look for it."""
    path = folder / SCRIPT
    path.write_text(_TEXT)
    make_executable(path)


def make_executable(path: str | os.PathLike[str]) -> None:
    """Let the script be run by its name; a file system without permissions, or without the file, is only logged."""
    try:
        os.chmod(path, os.stat(path).st_mode | 0o100)
    except OSError as error:
        _log.info("%s was not made executable (%s); run it by python", path, error)
