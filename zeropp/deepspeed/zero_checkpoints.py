"""Reader of checkpoints that DeepSpeed's ``save_checkpoint`` wrote in ZeRO stages 1, 2 and 3.

The reader finds weights, optimizer states and counters without DeepSpeed. The stages store them in different ways:

- Stages 1 and 2 concatenate the parameters of each parameter group into one row, and cut the row into one partition
  for each rank.
- Stage 3 cuts each parameter into one part for each rank. A rank's file has a row with its parts of all parameters,
  group by group.
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
"""Packages whose classes DeepSpeed's files may refer to: its loss scaler, for example, and users' numpy arrays."""
_LATEST = "latest"
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def zero_folder(place: Path, tag: str | None = None) -> Path | None:
    """Return the folder of one checkpoint of DeepSpeed.

    Args:
        place: the folder itself, or the directory that contains it.
        tag: name of the folder in ``place``; None for ``place`` itself or the name in the file ``latest``.

    Returns:
        The folder, which has files ``*_optim_states.pt``; None if there is no such folder.

    Raises:
        CheckpointError: the folder named by ``tag`` or ``latest`` does not exist.
    """
    if tag is None and place.is_dir() and _numbered(place, _OPTIM):
        return place
    if tag is None:
        if not (place / _LATEST).is_file():
            return None
        tag = (place / _LATEST).read_bytes()[:1000].decode(errors="replace").strip()
        # zeropp's own series of checkpoints has a file ``latest``, too, which holds JSON.
        if tag.startswith("{"):
            return None
    folder = place / tag
    if Path(tag).name != tag or not folder.is_dir():
        raise CheckpointError(f"{str(place)!r} has no folder {tag!r}, the tag that was given or that latest names")
    return folder if _numbered(folder, _OPTIM) else None


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a folder whose names match a pattern, sorted by rank.

    Args:
        folder: folder of a checkpoint.
        pattern: regular expression with the data-parallel rank as group 1 and the model-parallel rank as group 2.

    Raises:
        CheckpointError: a rank's file is missing, or a file is of a model-parallel rank above 0.
    """
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
    """Return the files ``*_model_states.pt`` of a checkpoint's folder, sorted by rank."""
    return _numbered(folder, _MODEL)


def optim_files(folder: Path) -> list[Path]:
    """Return the files ``*_optim_states.pt`` of a checkpoint's folder, sorted by rank."""
    return _numbered(folder, _OPTIM)


@dataclass(frozen=True)
class _Piece:
    """A contiguous run of elements in one file.

    Attributes:
        file: index of the file in `ZeroFolder.files`.
        begin: position of the first element in the file, in bytes.
        count: number of elements.
        dtype: dtype of the elements.
    """

    file: int
    begin: int
    count: int
    dtype: torch.dtype


class ZeroFolder:
    """The contents of one checkpoint of DeepSpeed: places of all tensors in its files. No values are read.

    Args:
        folder: folder of the checkpoint, as :func:`zero_folder` returns it.

    Attributes:
        folder: folder of the checkpoint.
        files: the files, with names and sizes in bytes.
        named: tensors under the names that zeropp's checkpoints use, and aliases of tied parameters.
        stage: ZeRO stage; 1 if the files do not store a stage, as with DeepSpeed's bfloat16 optimizer.
        frozen: names of parameters that were not trained.

    Raises:
        CheckpointError: files are missing, damaged, contradict each other, or refer to unknown classes.
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
        """Add a file to :attr:`files` and return its index."""
        self.files.append(FileEntry(name=path.name, nbytes=path.stat().st_size, sums=""))
        return len(self.files) - 1

    def _read(self, path: Path) -> Any:
        """Return the dict that a file holds, with the place of each tensor instead of its values."""
        found = read_torch_file(path, PACKAGES)
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{str(path)!r} holds a {type(found).__name__}, expected a dict")
        return found

    def _find(self) -> None:
        """Find the stage, and all weights and buffers."""
        own = self._states[0]
        stage = own.get("zero_stage")
        # The stage is stored as a member of an enum that is not importable here; args[0] is its value.
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
        # Main weights replace the module's own entries, which are weights in the compute dtype.
        for name, entry in self._rows([state[key] for state in self._states]):
            self.named.tensors[MODEL + name] = entry
        for name, there in dict(model.get("shared_params") or {}).items():
            if MODEL + there in self.named.tensors:
                self.named.tensors.pop(MODEL + name, None)
                self.named.aliases[name] = there

    def _add_module(self) -> None:
        """Add the module's state dict: buffers in all stages, and parameters in stages 1 and 2."""
        number, model = self._models[0]
        for name, value in model["module"].items():
            is_buffer = name in model["buffer_names"]
            # In stage 3 the module's parameters are saved without elements.
            if isinstance(value, TorchFileTensor) and (self.stage < 3 or is_buffer):
                self.named.tensors[MODEL + name] = entry_of(value, number, name)
                if not is_buffer:
                    self.frozen.add(name)

    def _add_frozen(self) -> None:
        """Add frozen parameters: whole tensors in stages 1 and 2, one part for each rank in stage 3."""
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
        """Yield name and places of each trained parameter, from rows of main weights or of one optimizer state.

        Args:
            rows: for each rank, its rows: one for each parameter group.
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
        """Yield name and places of each trained parameter in stage 3; ``rows`` are the pieces of each rank's row."""
        world = len(rows)
        begin = 0
        for group in self._shapes:
            for name, shape in group.items():
                # Stage 3 pads each parameter to a multiple of the number of ranks: part = ceil(numel / world).
                part = -(-torch.Size(shape).numel() // world)
                pieces = [piece for row in rows for piece in _cut(row, begin, begin + part)]
                yield name, _joined(name, shape, pieces)
                begin += part

    def add_optimizer(self, known: Iterable[str]) -> None:
        """Add optimizer states of trained parameters, and the settings of their parameter groups, to :attr:`named`.

        Args:
            known: names of settings that the optimizer's groups have; other saved settings are dropped.

        Raises:
            CheckpointError: the saved states do not have the form of Adam's.
        """
        try:
            self._add_optimizer(list(known))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{str(self.folder)!r} has optimizer states of another form than Adam's: {type(error).__name__}: "
                f"{error}"
            ) from error

    def _add_optimizer(self, known: list[str]) -> None:
        """Do the work of :meth:`add_optimizer`, without turning errors into CheckpointError."""
        bases = [state.get("optimizer_state_dict", state.get("base_optimizer_state")) for state in self._states]
        # Older checkpoints of stages 1 and 2 have a list of states and no settings.
        settings = [] if isinstance(bases[0], list) else bases[0]["param_groups"]
        by_row = [list(_by_row(base)) for base in bases]
        steps = {}
        for index, state in enumerate(by_row[0]):
            group: Mapping[str, Any] = next((each for each in settings if index in each["params"]), {})
            steps[index] = state.get("step", group.get("step", self._states[0].get("base_optimizer_state_step")))
        # Only states with one value per element have a shape. A step count has none.
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
        """Add the step count of a parameter, stored as a tensor or as a number; None adds nothing."""
        if isinstance(step, TorchFileTensor):
            self.named.add_state(name, "step", entry_of(step, self._optims[0][0], f"{STATE}{name}.step"))
        elif step is not None:
            self.named.add_state(name, "step", step)


def _by_row(base: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the optimizer states of each row, in the order of rows."""
    if isinstance(base, list):
        yield from base
    else:
        yield from (base["state"][index] for index in sorted(base["state"]))


def _numel(stored: TorchFileTensor) -> int:
    """Return the number of elements of a row; raise ValueError if the tensor is not 1-D and contiguous."""
    if len(stored.shape) != 1 or (stored.shape[0] > 1 and stored.strides[0] != 1):
        raise ValueError(f"a row is of shape {stored.shape} and strides {stored.strides}")
    return stored.shape[0]


def _pieces(number: int, rows: Iterable[TorchFileTensor]) -> Iterator[_Piece]:
    """Yield one piece for each row of the file with index ``number``."""
    for row in rows:
        yield _Piece(number, row.begin, _numel(row), row.dtype)


def _cut(pieces: Iterable[_Piece], begin: int, end: int) -> Iterator[_Piece]:
    """Yield the pieces that make up elements ``begin`` to ``end`` of the concatenation of ``pieces``."""
    first = 0
    for piece in pieces:
        low = max(begin, first)
        high = min(end, first + piece.count)
        if low < high:
            yield replace(piece, begin=piece.begin + (low - first) * piece.dtype.itemsize, count=high - low)
        first += piece.count


def _joined(name: str, shape: tuple[int, ...], pieces: Iterable[_Piece]) -> TensorEntry:
    """Return the entry of a tensor whose elements, in row-major order, are the concatenation of pieces.

    Args:
        name: name of the tensor, for errors.
        shape: shape of the tensor.
        pieces: pieces with at least as many elements as the tensor; further elements are padding.

    Raises:
        ValueError: the pieces have fewer elements than the tensor.
    """
    numel = torch.Size(shape).numel()
    strides = row_major(shape)
    start = 0
    boxes: list[BoxEntry] = []
    # Default for a parameter without elements, which has no piece with a dtype.
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
# Entries that DeepSpeed itself writes; all other entries are the user's ``client_state``.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_metadata", *_COUNTS,
}  # fmt: skip


@dataclass
class RunValues:
    """Counters, scheduler state and the user's values from the first rank's file of a checkpoint.

    Attributes:
        counts: the counters ``global_steps``, ``global_samples`` and ``micro_steps``, as far as they are stored.
        lr_scheduler: the scheduler's ``state_dict()``; None without one.
        skipped_steps: number of optimizer steps that were skipped because of an overflow.
        loss_scale: state of a dynamic loss scale, as in :meth:`zeropp.params.gradient.LossScale.state_dict`; None for a
            static loss scale or none.
        client: the user's values, the ``client_state`` of DeepSpeed's ``save_checkpoint``.
        left_out: names of values that were not read, because they contain tensors or objects.
    """

    counts: dict[str, int] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] | None = None
    skipped_steps: int = 0
    loss_scale: dict[str, Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_run_values(folder: Path) -> RunValues:
    """Return the counters and plain values of one checkpoint of DeepSpeed.

    Args:
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: the file is damaged, or refers to unknown classes.
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
    # The scheduler may be the user's own object, whose state may contain tensors or objects.
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
    """Return the state of a dynamic loss scale; None if there is none. Every rank's file has the same state."""
    # DeepSpeed's attribute -> zeropp's key. A static scale has only the first attribute. A static scale is not read,
    # because the configuration gives it.
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
    """Return True if a value consists of None, strings, bytes, numbers, and containers of these."""
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return not isinstance(value, TorchFileTensor | Record) and (
        value is None or isinstance(value, str | bytes | int | float)
    )
