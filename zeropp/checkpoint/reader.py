"""``Reader``: a StorageReader of torch.distributed.checkpoint for zeropp's checkpoints, for jobs without zeropp."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zeropp.checkpoint.boxes import MODEL, STATE, Box, CheckpointError, TensorBox
from zeropp.checkpoint.metadata import DTYPES, METADATA, BoxEntry, Metadata, decode
from zeropp.checkpoint.tensor_reader import TensorReader, Verify, require_verify

__all__ = ["Reader"]

_GROUPS = "optimizer.param_groups."


class Reader(StorageReader):
    """A storage reader for ``dcp.load(state, storage_reader=Reader(path))`` that reads a checkpoint of zeropp.

    The job may use FSDP2 or a single process. Names are those of :func:`zeropp.checkpoint.state`, which are torch's
    with ``flatten_optimizer_state_dict=True``: ``model.<name>`` (every name of a tied parameter),
    ``optimizer.state.<name>.<key>`` and ``optimizer.param_groups.<name>.<key>``. Each rank reads only the chunks of its
    plan. torch unpickles only values that this reader has pickled itself, never bytes of the checkpoint.

    Args:
        path: folder that :func:`zeropp.checkpoint.save` wrote.
        verify: "all" verifies the checksums of all bytes that are read, "sample" of some, "none" of none.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged. Raised when reading; ``dcp.load`` wraps it in a
            CheckpointException.
        ValueError: ``verify`` has another value.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: Verify = "all") -> None:
        self._path = Path(path).absolute()
        self._verify: Verify = require_verify(verify)
        self._source: TensorReader | None = None
        # Torch's name -> name of the tensor in the checkpoint, and torch's name -> value that is not a tensor.
        self._names: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata that was read; use another folder if ``checkpoint_id`` is given."""
        self._path = self._path if checkpoint_id is None else Path(checkpoint_id).absolute()
        self._source = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if the folder contains a ``metadata.json``."""
        return (Path(checkpoint_id) / METADATA).is_file()

    def read_metadata(self, *_: Any, **__: Any) -> TorchMetadata:
        """Read the checkpoint's metadata and return it as metadata of torch.distributed.checkpoint.

        Raises:
            CheckpointError: the checkpoint is incomplete or damaged.
        """
        metadata = Metadata.read(self._path)
        self._source = source = TensorReader(self._path, metadata, self._verify)
        self._names = {name: name for name in metadata.tensors if name.startswith((MODEL, STATE))}
        self._names |= {MODEL + name: MODEL + name for name in metadata.coded}
        self._names |= {MODEL + alias: MODEL + name for alias, name in metadata.aliases.items()}
        self._values = {name: decode(value, source.tensor) for name, value in _values(metadata)}
        found: dict[str, Any] = {name: _in_torch_s_words(metadata, own) for name, own in self._names.items()}
        # A count of steps that is a tensor has an entry in ``found`` already.
        self._values = {name: value for name, value in self._values.items() if name not in found}
        found |= {name: BytesStorageMetadata() for name in self._values}
        paths = {name: (name.partition(".")[0], name.partition(".")[2]) for name in found}
        return TorchMetadata(state_dict_metadata=found, planner_data=paths)

    def set_up_storage_reader(self, metadata: TorchMetadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing, because :meth:`read_metadata` has already prepared the reader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan.

        Raises:
            CheckpointError: a file is missing or damaged, or :meth:`read_metadata` was not called before.
        """
        source = self._source
        if source is None:
            raise CheckpointError(f"read_data() of {str(self._path)!r} came before read_metadata()")
        parts = []
        given = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                memory = io.BytesIO()
                torch.save(self._values[name], memory)
                memory.seek(0)
                planner.load_bytes(item, memory)
                continue
            into = planner.resolve_tensor(item)
            # storage_offsets are relative to the chunk; add the chunk's offset to make them relative to the tensor.
            chunk = item.storage_index.offset or torch.Size([0] * len(item.lengths))
            offsets = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
            own = self._names[name]
            parts.append(TensorBox(own, _shape(source.metadata, own), Box(offsets, tuple(item.lengths)), into.detach()))
            given.append((item, into))
        source.read_boxes(parts)
        for item, into in given:
            planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _values(metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """Yield (torch's name, JSON value) for single-number optimizer states and for settings of parameter groups."""
    for rank in metadata.ranks:
        for name, state in rank.get("numbers", {}).items():
            for key, value in state.items():
                yield f"{STATE}{name}.{key}", value
    for group in metadata.values.get("groups", ()):
        for name in group["parameters"]:
            for key, value in group["settings"].items():
                yield f"{_GROUPS}{name}.{key}", value


def _shape(metadata: Metadata, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the decoded values of a parameter stored as codes."""
    coded = metadata.coded.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
    return metadata.tensors[name].shape if coded is None else coded.shape


def _in_torch_s_words(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """Return the metadata of a tensor in torch.distributed.checkpoint's form."""
    shape = _shape(metadata, name)
    if name in metadata.tensors:
        dtype, boxes = metadata.tensors[name].dtype, metadata.tensors[name].boxes
    else:
        dtype, boxes = metadata.coded[name.removeprefix(MODEL)].dtype, ()
    # A parameter stored as codes is decoded whole, so it is one chunk. An empty tensor has no boxes, but torch expects
    # one chunk.
    boxes = boxes or (BoxEntry(file=0, begin=0, offsets=(0,) * len(shape), sizes=shape),)
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), torch.Size(shape), chunks)
