"""``state``: present a model and its optimizer to torch.distributed.checkpoint (DCP), under torch's names.

DCP stores each tensor in its true shape, as chunks. So FSDP2 jobs and single processes can load checkpoints that DCP
saves from this state, and this state can load theirs.
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
from zeropp.optimizer.optimizer_step import load_error_feedback
from zeropp.optimizer.sharded_params import Slice
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.coded_buffer import CodedBuffer

__all__ = ["ShardedTensorView", "state"]


def state(model: nn.Module, optimizer: Optimizer | None = None) -> Stateful:
    """Return a Stateful of a model and its optimizer for ``torch.distributed.checkpoint``.

    Use ``dcp.save({"app": zeropp.checkpoint.state(model, optimizer)}, checkpoint_id=path)``, and ``dcp.load`` and
    ``dcp.async_save`` in the same way. ``state(...).state_dict()`` may take the place of the dict. These calls are
    collective. The state has main weights in full precision, optimizer states, and settings by parameter. It lacks
    random states, carried quantization errors and other state of zeropp, which :func:`zeropp.checkpoint.save` saves.

    Args:
        model: model wrapped by a ZeroOptimizer.
        optimizer: the ZeroOptimizer of ``model``; None for weights only.

    Returns:
        An object whose ``state_dict()`` has "model", with tensors by name, and, with an optimizer, "optimizer", with
        keys ``state.<name>.<key>`` and ``param_groups.<name>.<key>``, as torch flattens them.

    Raises:
        TypeError: ``optimizer`` is not a ZeroOptimizer.
        ValueError: ``optimizer`` belongs to another model.
    """
    engine = engine_of(model)
    return _State(engine, model, require_ours(engine, optimizer))


class ShardedTensorView(Tensor):
    """A sharded tensor for DCP: shape and dtype of the whole tensor, and the boxes that this rank has.

    DCP's planners get boxes and values through the methods with double underscores below. Tensor operations raise,
    except new_empty and detach, which return another view of the same boxes.

    Attributes:
        written: boxes that this rank saves. Replicas are left out, so the boxes of all ranks do not overlap.
        read: boxes that this rank loads; a load writes to their values in place.
    """

    written: list[TensorBox]
    read: list[TensorBox]

    @staticmethod
    def __new__(
        cls, written: list[TensorBox], read: list[TensorBox], shape: Sequence[int], dtype: torch.dtype
    ) -> ShardedTensorView:
        # A wrapper subclass has a shape but no memory, because no rank has the whole tensor.
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
        # dcp.async_save starts its copy of a tensor with these operations, and later copies the attributes.
        if function in (torch.ops.aten.new_empty.default, torch.ops.aten.detach.default):
            own = args[0]
            return ShardedTensorView(own.written, own.read, own.shape, own.dtype)
        raise RuntimeError(
            f"{function} was called on a ShardedTensorView, this rank's boxes of a parameter, which only "
            "torch.distributed.checkpoint can use; whole values are in zeropp.full_state(model)"
        )

    def _of(self, parts: list[TensorBox]) -> list[TensorBox]:
        """Return ``parts``. For an empty tensor, of which no rank has a box, return one empty box, as DCP expects."""
        return parts if self.numel() else [whole("", torch.empty(self.shape, dtype=self.dtype, device="cpu"))]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return a write item for each box that this rank saves; called by DCP's save planner."""
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
        """Return the chunks that this rank loads; called by DCP's load planner."""
        return [_chunk(part.box) for part in self._of(self.read)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the values of the box at ``index.offset``; called by DCP's planners."""
        wanted = tuple(index.offset or ())
        for part in self._of(self.read):
            if part.box.offsets == wanted:
                return part.values
        raise CheckpointError(f"torch asks for a box at {wanted}, and this rank has none there")


def _chunk(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP's chunk."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class _State(Stateful):
    """The Stateful that :func:`state` returns."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer: ZeroOptimizer | None) -> None:
        self._engine = engine
        self._model = model
        self._optimizer = optimizer
        # Decoded values of buffers stored as codes, from state_dict() until load_state_dict() encodes them again.
        self._decoded: list[tuple[CodedBuffer, Tensor]] = []
        self._states_of: list[tuple[Slice, dict[str, Any]]] = []

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the model's and the optimizer's state, with views of this rank's shards. Collective.

        ``dcp.load`` writes to these views. :meth:`load_state_dict` must be called after that.
        """
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
        """Return main weights as :class:`ShardedTensorView`, and the other tensors of the model, by name."""
        engine = self._engine
        self._decoded = [(buffer, buffer.decoded()) for buffer in engine.buffers if isinstance(buffer, CodedBuffer)]

        def parts(which: Which) -> Iterator[TensorBox]:
            yield from main_parts(engine, which)
            for buffer, row in self._decoded:
                yield from parts_of_row(buffer, row, buffer.placement.mode.states, MODEL, which)

        dtypes = {name: buffer.main_dtype for buffer in engine.buffers for name in buffer.names}
        named, aliases = model_names(self._model)
        spread = _spread(parts, {MODEL + name: (named[name].shape, dtype) for name, dtype in dtypes.items()})
        # Include every name of a tied tensor, as torch's state dicts do.
        names = {name: name for name in named} | aliases
        return {n: spread[MODEL + first] if first in dtypes else named[first].detach() for n, first in names.items()}

    def _states(self, optimizer: ZeroOptimizer) -> dict[str, Any]:
        """Return the optimizer states by ``state.<name>.<key>``; elementwise ones as :class:`ShardedTensorView`."""
        rows: list[tuple[Slice, str, Tensor]] = []
        shapes: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        numbers: dict[str, Any] = {}
        named, _ = model_names(self._model)
        self._states_of = []
        for part in optimizer.slices.all:
            # dcp.load fills only the states that exist here. For a parameter without states, fresh_state() makes them.
            state = optimizer.inner.state.get(part.parameter) or fresh_state(optimizer.inner, part.parameter)
            self._states_of.append((part, state))
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == part.parameter.shape:
                    rows.append((part, key, value))
                    shapes[f"{STATE}{part.name}.{key}"] = named[part.name].shape, value.dtype
                else:
                    # Clone: dcp.load writes in place, but only load_state_dict() may change the optimizer's numbers.
                    numbers[f"state.{part.name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
        spread = _spread(lambda which: state_parts(self._engine, rows, which), shapes)
        return {**{f"state.{name.removeprefix(STATE)}": value for name, value in spread.items()}, **numbers}

    def _settings(self, optimizer: ZeroOptimizer) -> dict[str, Any]:
        """Return the settings of all groups, by ``param_groups.<parameter name>.<key>``."""
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
        """Complete a load after DCP has written to the views of :meth:`state_dict`. Collective.

        Encodes quantized weights and refreshes cached weights. With an optimizer, takes over states and settings that
        are not views, and discards pending gradients and carried quantization errors.
        """
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
            # Elementwise states were loaded in place. Clone a count of steps, because each slice of a parameter
            # increments its own in place.
            values = {
                key: state[key]
                if isinstance(value, ShardedTensorView)
                else (value.clone() if isinstance(value, Tensor) else value)
                for key, value in own.items()
            }
            if values:
                optimizer.inner.state[part.parameter] = values
        self._take_settings(optimizer, loaded)
        # The present carried errors belong to other gradients, and DCP's checkpoint does not have any.
        load_error_feedback(engine, optimizer.error_feedback, None)
        optimizer.zero_grad(now=True)

    def _take_settings(self, optimizer: ZeroOptimizer, loaded: dict[str, Any]) -> None:
        """Set the settings of each group; raise CheckpointError if its parameters have different values."""
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
    """Return True if two settings are equal; tensors are compared by value."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return bool(torch.as_tensor(left == right).all())
    return left == right


def names_of(engine: Engine) -> dict[int, str]:
    """Return the names of the model's parameters, by id of the parameter."""
    return {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}


def fresh_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return zeroed optimizer states for a parameter that has none, as memory to load states into.

    The keys, shapes and dtypes come from a step of a copy of the optimizer on a separate parameter with two elements.

    Args:
        optimizer: the inner optimizer, which is not changed.
        parameter: a 1-D slice parameter of the optimizer.

    Returns:
        The states by key; empty if the optimizer has no states.
    """
    # With one element, a count of steps of shape [1] could not be told from an elementwise state.
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
    """Return, for torch.distributed.checkpoint, a view of each sharded tensor that lists this rank's parts of it.

    Args:
        parts: returns this rank's boxes (rectangular parts): "own" to save, "pieces" to load; see :data:`Which`.
        shapes: (shape, dtype) of each whole tensor, by name.

    Returns:
        A view per tensor, by name; its lists are empty if this rank has no elements of the tensor.
    """
    boxes: dict[str, dict[str, list[TensorBox]]] = {name: {"own": [], "pieces": []} for name in shapes}
    for which in ("own", "pieces"):
        for part in parts(which):
            boxes[part.name][which].append(part)
    return {n: ShardedTensorView(found["own"], found["pieces"], *shapes[n]) for n, found in boxes.items()}
