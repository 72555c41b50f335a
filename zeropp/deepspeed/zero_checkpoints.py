"""Folders that DeepSpeed's ``save_checkpoint`` wrote in ZeRO stages 1, 2 and 3: weights, optimizer states, counters.

Stages 1 and 2 cut each parameter group, as one row, into as many partitions as there were ranks. Stage 3 cuts each
parameter, and a rank's file has its parts of all of them in a row, group by group. DeepSpeed is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint.boxes import MODEL, STATE, CheckpointError, boxes_of_range, row_major
from zeropp.checkpoint.foreign import Named, entry_of
from zeropp.checkpoint.metadata import BoxEntry, FileEntry, TensorEntry, dtype_code
from zeropp.checkpoint.torch_files import Record, TorchFileTensor, read_torch_file

__all__ = ["PACKAGES", "RunValues", "ZeroFolder", "model_files", "read_run_values", "zero_folder"]


PACKAGES = ("deepspeed", "numpy")
"""Packages whose classes stand in DeepSpeed's files: its loss scaler and the like, and arrays in users' states."""
_LATEST = "latest"
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def zero_folder(place: Path, tag: str | None = None) -> Path | None:
    """The folder of one checkpoint of DeepSpeed's: ``place`` itself, or what a tag or ``latest`` in it names.

    Returns:
        None if ``place`` is no such folder.

    Raises:
        CheckpointError: the tag, or what ``latest`` names, is not there.
    """
    if tag is None and place.is_dir() and _numbered(place, _OPTIM):
        return place
    if tag is None:
        if not (place / _LATEST).is_file():
            return None
        tag = (place / _LATEST).read_bytes()[:1000].decode(errors="replace").strip()
        # Series of checkpoints of zeropp have a file of that name, too, of JSON.
        if tag.startswith("{"):
            return None
    folder = place / tag
    if Path(tag).name != tag or not folder.is_dir():
        raise CheckpointError(f"{str(place)!r} has no folder {tag!r}, the tag that was given or that latest names")
    return folder if _numbered(folder, _OPTIM) else None


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Files of a pattern by rank."""
    found = {}
    for each in folder.iterdir():
        match = pattern.fullmatch(each.name)
        if match is not None:
            if int(match.group(2)):
                raise CheckpointError(
                    f"{str(each)!r} is of a model that tensor parallelism has cut, which is not read here; only "
                    "mp_rank_00 is"
                )
            found[int(match.group(1) or 0)] = each
    missing = sorted(set(range(len(found))) - found.keys())
    if missing:
        raise CheckpointError(f"{str(folder)!r} has no file of rank {missing[0]}, and has those of {sorted(found)}")
    return [path for _, path in sorted(found.items())]


def model_files(folder: Path) -> list[Path]:
    """Files ``*_model_states.pt`` of a checkpoint, by rank."""
    return _numbered(folder, _MODEL)


def optim_files(folder: Path) -> list[Path]:
    """Files ``*_optim_states.pt`` of a checkpoint, by rank."""
    return _numbered(folder, _OPTIM)


@dataclass(frozen=True)
class _Piece:
    """A run of elements of a row, in one file."""

    file: int
    begin: int
    count: int
    dtype: torch.dtype


class ZeroFolder:
    """One checkpoint of DeepSpeed's.

    Attributes:
        folder: that it is in.
        files: with their sizes.
        named: tensors under zeropp's names, and further names of tied ones.
        stage: of ZeRO; 1 for the optimizer that DeepSpeed has for bfloat16, which does not say.
        frozen: parameters that were not trained.

    Raises:
        CheckpointError: files are missing, damaged, contradict each other, or name what is not known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[FileEntry] = []
        self.named = Named()
        self.frozen: set[str] = set()
        self._optims = [(self._add(path), self._read(path)) for path in optim_files(folder)]
        paths = model_files(folder)
        if any(folder.glob("*expert_*")):
            raise CheckpointError(f"{str(folder)!r} has experts in files of their own, which are not read here")
        if not self._optims or not paths:
            raise CheckpointError(
                f"{str(folder)!r} is no folder of DeepSpeed's: it has {len(self._optims)} files *_optim_states.pt and "
                f"{len(paths)} files *_model_states.pt"
            )
        self._models = [(self._add(path), self._read(path)) for path in paths]
        try:
            self._states = [state["optimizer_state_dict"] for _, state in self._optims]
            self._find()
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{str(folder)!r} does not have the form of DeepSpeed's checkpoints: {type(error).__name__}: {error}"
            ) from error

    def _add(self, path: Path) -> int:
        self.files.append(FileEntry(name=path.name, nbytes=path.stat().st_size, sums=""))
        return len(self.files) - 1

    def _read(self, path: Path) -> Any:
        found = read_torch_file(path, PACKAGES)
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{str(path)!r} holds a {type(found).__name__}, expected a dict")
        return found

    def _find(self) -> None:
        own = self._states[0]
        stage = own.get("zero_stage")
        # An enumeration that is not here, by the number it was made of.
        stage = stage.args[0] if isinstance(stage, Record) else (stage or 1)
        self.stage = int(stage)
        count = own.get("partition_count", len(self._optims))
        # Stages 1 and 2 write one number for each parameter group.
        count = max(count) if isinstance(count, (list, tuple)) else count
        if count != len(self._optims):
            raise CheckpointError(
                f"{str(self.folder)!r} was written by {count} ranks and has the files of {len(self._optims)}; a "
                "file is missing, or was left by another run"
            )
        model = self._models[0][1]
        self._add_module()
        self._add_frozen()
        self._shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        self._trained = [name for group in self._shapes for name in group]
        self.frozen -= set(self._trained)
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        # In place of the module's own entries, which have the rounded weights that were computed with.
        for name, entry in self._rows([state[key] for state in self._states]):
            self.named.tensors[MODEL + name] = entry
        for name, there in dict(model.get("shared_params") or {}).items():
            if MODEL + there in self.named.tensors:
                self.named.tensors.pop(MODEL + name, None)
                self.named.aliases[name] = there

    def _add_module(self) -> None:
        number, model = self._models[0]
        for name, value in model["module"].items():
            is_buffer = name in model["buffer_names"]
            # Stage 3 leaves parameters there without elements.
            if isinstance(value, TorchFileTensor) and (self.stage < 3 or is_buffer):
                self.named.tensors[MODEL + name] = entry_of(value, number, name)
                if not is_buffer:
                    self.frozen.add(name)

    def _add_frozen(self) -> None:
        """Parameters that were not trained: whole in stage 2, cut as trained ones are in stage 3."""
        for name, shape in dict(self._models[0][1].get("frozen_param_shapes") or {}).items():
            self.frozen.add(name)
            if self.stage < 3:
                number, model = self._models[0]
                self.named.tensors[MODEL + name] = entry_of(model["frozen_param_fragments"][name], number, name)
                continue
            if len(self._models) != len(self._optims):
                raise ValueError(f"there are {len(self._models)} files *_model_states.pt, expected one a rank")
            fragments = [(number, model["frozen_param_fragments"][name]) for number, model in self._models]
            pieces = [piece for number, each in fragments for piece in _pieces(number, [each])]
            self.named.tensors[MODEL + name] = _joined(name, tuple(shape), pieces)

    def _rows(self, rows: Sequence[Sequence[TorchFileTensor]]) -> Iterator[tuple[str, TensorEntry]]:
        """Each trained parameter, of what every rank has in rows: one for each group.

        Args:
            rows: of each rank.
        """
        numbers = [number for number, _ in self._optims]
        if self.stage == 3:
            yield from self._of_parts([list(_pieces(n, own)) for n, own in zip(numbers, rows, strict=True)])
            return
        for index, group in enumerate(self._shapes):
            pieces = [piece for n, own in zip(numbers, rows, strict=True) for piece in _pieces(n, [own[index]])]
            begin = 0
            for name, shape in group.items():
                end = begin + torch.Size(shape).numel()
                yield name, _joined(name, shape, _cut(pieces, begin, end))
                begin = end

    def _of_parts(self, rows: list[list[_Piece]]) -> Iterator[tuple[str, TensorEntry]]:
        world = len(rows)
        begin = 0
        for group in self._shapes:
            for name, shape in group.items():
                # Stage 3 pads each parameter until all ranks have the same number of its elements.
                part = -(-torch.Size(shape).numel() // world)
                pieces = [piece for row in rows for piece in _cut(row, begin, begin + part)]
                yield name, _joined(name, shape, pieces)
                begin += part

    def add_optimizer(self, known: Iterable[str]) -> None:
        """Add the states of trained parameters, and the settings of their groups.

        Args:
            known: names of settings that the optimizer has.
        """
        try:
            self._add_optimizer(list(known))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{str(self.folder)!r} has optimizer states of another form than Adam's: {type(error).__name__}: "
                f"{error}"
            ) from error

    def _add_optimizer(self, known: list[str]) -> None:
        bases = [state.get("optimizer_state_dict", state.get("base_optimizer_state")) for state in self._states]
        # Of older checkpoints of stages 1 and 2 a list, without the settings.
        settings = [] if isinstance(bases[0], list) else bases[0]["param_groups"]
        by_row = [list(_by_row(base)) for base in bases]
        steps = {}
        for index, state in enumerate(by_row[0]):
            group: Mapping[str, Any] = next((each for each in settings if index in each["params"]), {})
            steps[index] = state.get("step", group.get("step", self._states[0].get("base_optimizer_state_step")))
        # A state of one number, such as the count of steps, has no shape.
        rowwise = (
            [k for k, v in by_row[0][0].items() if isinstance(v, TorchFileTensor) and v.shape] if by_row[0] else []
        )
        for key in rowwise:
            for name, entry in self._rows([[state[key] for state in rank] for rank in by_row]):
                self.named.add_state(name, key, entry)
        for index, shapes in enumerate(self._shapes[: len(by_row[0])]):
            for name in shapes:
                self._add_step(name, steps[index])
        if not settings:
            self.named.add_group(self._trained, {}, known)
        for each in settings:
            names = [name for index in each["params"] if index < len(self._shapes) for name in self._shapes[index]]
            self.named.add_group(names, {k: v for k, v in each.items() if not isinstance(v, TorchFileTensor)}, known)

    def _add_step(self, name: str, step: object) -> None:
        if isinstance(step, TorchFileTensor):
            self.named.add_state(name, "step", entry_of(step, self._optims[0][0], f"{STATE}{name}.step"))
        elif step is not None:
            self.named.add_state(name, "step", step)


def _by_row(base: Any) -> Iterator[Mapping[str, Any]]:
    """States of each row, in the order of rows."""
    if isinstance(base, list):
        yield from base
    else:
        yield from (base["state"][index] for index in sorted(base["state"]))


def _numel(stored: TorchFileTensor) -> int:
    if len(stored.shape) != 1 or (stored.shape[0] > 1 and stored.strides[0] != 1):
        raise ValueError(f"a row is of shape {stored.shape} and strides {stored.strides}")
    return stored.shape[0]


def _pieces(number: int, rows: Iterable[TorchFileTensor]) -> Iterator[_Piece]:
    for row in rows:
        yield _Piece(number, row.begin, _numel(row), row.dtype)


def _cut(pieces: Iterable[_Piece], begin: int, end: int) -> Iterator[_Piece]:
    """The pieces of a range of what pieces make up, one behind the other."""
    first = 0
    for piece in pieces:
        low = max(begin, first)
        high = min(end, first + piece.count)
        if low < high:
            yield replace(piece, begin=piece.begin + (low - first) * piece.dtype.itemsize, count=high - low)
        first += piece.count


def _joined(name: str, shape: tuple[int, ...], pieces: Iterable[_Piece]) -> TensorEntry:
    """A tensor of pieces, one behind the other; what they have beyond its elements is padding."""
    numel = torch.Size(shape).numel()
    strides = row_major(shape)
    start = 0
    boxes: list[BoxEntry] = []
    # A parameter without elements has no piece that tells its dtype.
    dtype = torch.float32
    for piece in pieces:
        dtype = piece.dtype
        stop = min(start + piece.count, numel)
        for box in boxes_of_range(shape, strides, start, stop):
            begin = piece.begin + (box.first(strides) - start) * dtype.itemsize
            boxes.append(BoxEntry(file=piece.file, begin=begin, offsets=box.offsets, sizes=box.sizes))
        start = stop
    if start < numel:
        raise ValueError(f"there are {start} of {numel} elements of {name!r}")
    return TensorEntry(dtype=dtype_code(dtype, name), shape=shape, boxes=tuple(boxes))


_COUNTS = ("global_steps", "global_samples", "micro_steps")
# Its own, which are read elsewhere, or say nothing to another engine.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_metadata", *_COUNTS,
}  # fmt: skip


@dataclass
class RunValues:
    """Plain values of the first rank's file.

    Attributes:
        counts: ``global_steps`` and its like, as far as they are there.
        lr_scheduler: its ``state_dict()``, or None.
        skipped_steps: steps that overflowed.
        loss_scale: a dynamic one, as of :meth:`zeropp.params.gradient.LossScale.state_dict`; None for others.
        client: what the script gave.
        left_out: names of the script's values that hold tensors or objects, which are not read.
    """

    counts: dict[str, int] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] | None = None
    skipped_steps: int = 0
    loss_scale: dict[str, Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_run_values(folder: Path) -> RunValues:
    """Read them.

    Args:
        folder: of one checkpoint.

    Raises:
        CheckpointError: the file is damaged, or names what is not known.
    """
    files = model_files(folder)
    found = RunValues()
    if not files:
        return found
    saved = read_torch_file(files[0], PACKAGES)
    if not isinstance(saved, Mapping):
        return found
    found.counts = {name: saved[name] for name in _COUNTS if isinstance(saved.get(name), int)}
    skipped = saved.get("skipped_steps")
    found.skipped_steps = skipped if isinstance(skipped, int) else 0
    found.loss_scale = _loss_scale(folder)
    schedule = saved.get("lr_scheduler")
    # Of a schedule that is an object of the user's, the state may be anything.
    if isinstance(schedule, dict) and _is_plain(schedule):
        found.lr_scheduler = schedule
    elif schedule is not None:
        found.left_out.append("lr_scheduler")
    for name, value in saved.items():
        if name in _OWN:
            continue
        if _is_plain(value):
            found.client[name] = value
        else:
            found.left_out.append(str(name))
    return found


def _loss_scale(folder: Path) -> dict[str, Any] | None:
    """The dynamic loss scale of a run in float16: the same in every rank's file."""
    # Its own attributes -> ours. A static scale has but the first, and is the configuration's.
    names = {
        "cur_scale": "value",
        "cur_iter": "iterations",
        "last_overflow_iter": "last_overflow",
        "cur_hysteresis": "left",
    }
    for path in optim_files(folder)[:1]:
        saved = read_torch_file(path, PACKAGES)
        inner = saved.get("optimizer_state_dict") if isinstance(saved, Mapping) else None
        scaler = inner.get("loss_scaler") if isinstance(inner, Mapping) else None
        if isinstance(scaler, Record) and all(isinstance(scaler.get(name), int | float) for name in names):
            return {own: scaler.get(name) for name, own in names.items()}
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return not isinstance(value, TorchFileTensor | Record) and (
        value is None or isinstance(value, str | bytes | int | float)
    )
