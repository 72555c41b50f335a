"""``state``: a model and its optimizer for torch.distributed.checkpoint, under the names that torch gives them.

What torch saves of it, FSDP2 and single processes load, and the other way round: values are boxes of true shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from zeropp.checkpoint.boxes import (
    MODEL,
    STATE,
    Box,
    CheckpointError,
    TensorBox,
    Which,
    fragments,
    main_parts,
    parts_of_row,
    state_parts,
    whole,
)
from zeropp.checkpoint.save_plan import model_names, require_ours, unfreeze
from zeropp.engine.engine import Engine, engine_of
from zeropp.optimizer.checks import Twin
from zeropp.optimizer.optimizer_step import load_carried
from zeropp.optimizer.sharded_params import Slice
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.coded_buffer import CodedBuffer

__all__ = ["ShardedTensorView", "state"]


def state(model: nn.Module, optimizer: Optimizer | None = None) -> Stateful:
    """A model and its optimizer, as ``torch.distributed.checkpoint`` saves and loads them.

    ``dcp.save({"app": zeropp.checkpoint.state(model, optimizer)}, checkpoint_id=path)``, ``dcp.load`` and
    ``dcp.async_save`` alike; or ``state(...).state_dict()`` in place of the dict. Collective, as they are. Main weights
    in full precision, optimizer states, settings by parameter; no random numbers, carried errors or anything else that
    belongs to zeropp: :func:`zeropp.checkpoint.save` has all of it.

    Args:
        model: wrapped by a ZeroOptimizer.
        optimizer: that one, or None for weights alone.

    Returns:
        ``state_dict()`` gives "model", by name, and "optimizer", by ``state.<name>.<key>`` and
        ``param_groups.<name>.<key>``, as torch flattens them.

    Raises:
        TypeError, ValueError: the optimizer is not that of the model.
    """
    engine = engine_of(model)
    return _State(engine, model, require_ours(engine, optimizer))


class ShardedTensorView(Tensor):
    """A tensor of which this rank has boxes; torch's planners ask it for them, and nothing else can be done with it.

    Attributes:
        written: boxes that this rank saves.
        read: boxes that it loads, into their values.
    """

    written: list[TensorBox]
    read: list[TensorBox]

    @staticmethod
    def __new__(
        cls, written: list[TensorBox], read: list[TensorBox], shape: Sequence[int], dtype: torch.dtype
    ) -> ShardedTensorView:
        # It has a shape but no memory: no rank has the whole tensor.
        made: ShardedTensorView = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.written = written
        made.read = read
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped there
        return f"ShardedTensorView({tuple(self.shape)}, {self.dtype}, {len(self.read)} boxes here)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What a copy for asynchronous saving begins with; boxes follow as attributes.
        if function in (torch.ops.aten.new_empty.default, torch.ops.aten.detach.default):
            own = args[0]
            return ShardedTensorView(own.written, own.read, own.shape, own.dtype)
        raise RuntimeError(
            f"{function} was called on a ShardedTensorView, this rank's boxes of a parameter, which only "
            "torch.distributed.checkpoint can use; whole values are in zeropp.full_state(model)"
        )

    def _of(self, parts: list[TensorBox]) -> list[TensorBox]:
        """Boxes; of a tensor without elements, which nobody has a piece of, one of none, as torch expects it."""
        return parts if self.numel() else [whole("", torch.empty(self.shape, dtype=self.dtype, device="cpu"))]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(part.box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(part.box), properties=TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for part in self._of(self.written)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part.box) for part in self._of(self.read)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        wanted = tuple(index.offset or ())
        for part in self._of(self.read):
            if part.box.offsets == wanted:
                return part.values
        raise CheckpointError(f"torch asks for a box at {wanted}, and this rank has none there")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class _State(Stateful):
    """See :func:`state`."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer: ZeroOptimizer | None) -> None:
        self._engine = engine
        self._model = model
        self._optimizer = optimizer
        # Decoded values of buffers that exist in codes, while they are out.
        self._decoded: list[tuple[CodedBuffer, Tensor]] = []
        self._states_of: list[tuple[Slice, dict[str, Any]]] = []

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Boxes of this rank's own memory: a load writes to them, and :meth:`load_state_dict` ends it."""
        engine = self._engine
        engine.require_idle("checkpoint.state()")
        engine.agreement.require_same_call("state_dict() of checkpoint.state()")
        unfreeze(engine, self._optimizer)
        engine.finish_load()
        engine.start_delayed_refresh()
        engine.wait_for_refresh()
        found: dict[str, Any] = {"model": self._weights()}
        if self._optimizer is not None:
            found["optimizer"] = {**self._states(self._optimizer), **self._settings(self._optimizer)}
        return found

    def _weights(self) -> dict[str, Any]:
        engine = self._engine
        self._decoded = [(buffer, buffer.decoded()) for buffer in engine.buffers if isinstance(buffer, CodedBuffer)]

        def parts(which: Which) -> Iterator[TensorBox]:
            yield from main_parts(engine, which)
            for buffer, row in self._decoded:
                yield from parts_of_row(buffer, row, buffer.placement.mode.states, MODEL, which)

        dtypes = {name: buffer.main_dtype for buffer in engine.buffers for name in buffer.names}
        named, aliases = model_names(self._model)
        spread = _spread(parts, {MODEL + name: (named[name].shape, dtype) for name, dtype in dtypes.items()})
        # Under all its names, as torch's own state dicts have tied ones.
        names = {name: name for name in named} | aliases
        return {n: spread[MODEL + first] if first in dtypes else named[first].detach() for n, first in names.items()}

    def _states(self, optimizer: ZeroOptimizer) -> dict[str, Any]:
        rows: list[tuple[Slice, str, Tensor]] = []
        shapes: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        numbers: dict[str, Any] = {}
        named, _ = model_names(self._model)
        self._states_of = []
        for part in optimizer.slices.all:
            # A load finds places only for states that are there; see :func:`fresh_state`.
            state = optimizer.inner.state.get(part.parameter) or fresh_state(optimizer.inner, part.parameter)
            self._states_of.append((part, state))
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == part.parameter.shape:
                    rows.append((part, key, value))
                    shapes[f"{STATE}{part.name}.{key}"] = named[part.name].shape, value.dtype
                else:
                    # A copy: torch loads in place, and a parameter may turn out to have no state there.
                    numbers[f"state.{part.name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
        spread = _spread(lambda which: state_parts(self._engine, rows, which), shapes)
        return {**{f"state.{name.removeprefix(STATE)}": value for name, value in spread.items()}, **numbers}

    def _settings(self, optimizer: ZeroOptimizer) -> dict[str, Any]:
        names = names_of(self._engine)
        found: dict[str, Any] = {}
        for group, given in zip(optimizer.inner.param_groups, optimizer.slices.given, strict=True):
            for name in (names[id(parameter)] for parameter in given if id(parameter) in names):
                for key, value in group.items():
                    if key not in ("params", "param_names"):
                        found[f"param_groups.{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let everything follow from what was loaded into the boxes, and take over what has none."""
        engine, optimizer = self._engine, self._optimizer
        engine.require_idle("load_state_dict() of checkpoint.state()")
        engine.agreement.require_same_call("load_state_dict() of checkpoint.state()")
        for buffer, row in self._decoded:
            for _, each in fragments(buffer, buffer.placement.mode.states, "slice"):
                buffer.put(each, row[each.offset : each.offset + each.stop - each.start], row.dtype)
        self._decoded = []
        engine.weights_changed(engine.buffers)
        if optimizer is None:
            return
        loaded = state_dict["optimizer"]
        for part, state in self._states_of:
            own = {key: loaded.get(f"state.{part.name}.{key}", value) for key, value in state.items()}
            # Boxes lie in the states' own memory. A number is copied: two slices of a parameter count one by one.
            values = {
                key: state[key]
                if isinstance(value, ShardedTensorView)
                else (value.clone() if isinstance(value, Tensor) else value)
                for key, value in own.items()
            }
            if values:
                optimizer.inner.state[part.parameter] = values
        self._take_settings(optimizer, loaded)
        # Errors carried until now belong to other gradients, and torch's checkpoint has none.
        load_carried(engine, optimizer.carried, None)
        optimizer.zero_grad(now=True)

    def _take_settings(self, optimizer: ZeroOptimizer, loaded: dict[str, Any]) -> None:
        names = names_of(self._engine)
        for number, (group, given) in enumerate(zip(optimizer.inner.param_groups, optimizer.slices.given, strict=True)):
            for key in [key for key in group if key not in ("params", "param_names")]:
                found = [loaded.get(f"param_groups.{names[id(p)]}.{key}", group[key]) for p in given if id(p) in names]
                if any(not _same(value, found[0]) for value in found[1:]):
                    raise CheckpointError(
                        f"parameters of group {number} had different values of {key!r} when they were saved; put them "
                        "into groups as they were"
                    )
                if found:
                    group[key] = found[0]


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return bool(torch.as_tensor(left == right).all())
    return left == right


def names_of(engine: Engine) -> dict[int, str]:
    """Names of the model's parameters, by identity."""
    return {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}


def fresh_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state that a parameter has after a step that changes nothing: places for what is loaded.

    Found on a parameter of two elements, so that the optimizer's own are not touched; empty if it has none.
    """
    # Not one element: a count of steps of shape [1] would pass for a state of elements.
    probe = nn.Parameter(torch.zeros(2, dtype=parameter.dtype, device=parameter.device))
    group = next(group for group in optimizer.param_groups if any(parameter is other for other in group["params"]))
    twin = Twin(optimizer, group, [probe])
    probe.grad = torch.zeros_like(probe)
    twin.step()
    found: dict[str, Any] = {}
    for key, value in twin.state[probe].items():
        if isinstance(value, Tensor):
            shape = parameter.shape if value.shape == probe.shape else value.shape
            found[key] = torch.zeros(shape, dtype=value.dtype, device=value.device)
        else:
            found[key] = type(value)() if isinstance(value, (int, float)) else value
    return found


def _spread(
    parts: Callable[[Which], Iterator[TensorBox]], shapes: dict[str, tuple[Sequence[int], torch.dtype]]
) -> dict[str, ShardedTensorView]:
    """Tensors of the given names, with the boxes of them that this rank has."""
    boxes: dict[str, dict[str, list[TensorBox]]] = {name: {"own": [], "pieces": []} for name in shapes}
    for which in ("own", "pieces"):
        for part in parts(which):
            boxes[part.name][which].append(part)
    return {n: ShardedTensorView(found["own"], found["pieces"], *shapes[n]) for n, found in boxes.items()}
