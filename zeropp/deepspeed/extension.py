"""DeepSpeed's attributes on parameters and modules, also of models that are wrapped by plain zeropp calls.

Scripts look at DeepSpeed's attributes to decide which parameters to gather. Parameters of a model in stage 3, and
parameters built inside ``zero.Init``, have ``ds_id``, ``ds_shape``, ``ds_numel``, ``ds_status``, ``ds_tensor``,
``ds_persist``, ``ds_active_sub_modules`` (a set that zeropp leaves empty) and ``partition_numel()``. Modules of a model
in stage 3 have ``ds_external_parameters()``.

The core calls this module through the hooks of `zeropp._extensions`.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeropp._extensions import Extension
from zeropp.access.gathered import external_parameters
from zeropp.access.refusals import replace_in
from zeropp.engine.engine import Engine
from zeropp.engine.hooks import EXTERNAL_AS
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.sharded_build import Piece
from zeropp.partition.levels import Fragment
from zeropp_kernels.wire import BLOCK

__all__ = ["EXTENSION", "ZeroParamStatus", "add_to_model", "add_to_piece", "remove"]


class ZeroParamStatus(Enum):
    """Values of a parameter's ``ds_status``: AVAILABLE if the parameter has its full values, else NOT_AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    # Member of DeepSpeed's enum. zeropp never sets it.
    INFLIGHT = 3


_ids = itertools.count()


class DsTensor(ABC):
    """A parameter's ``ds_tensor``: this rank's elements of the parameter, [ds_numel] in memory order.

    The object is no tensor. Attributes that this class lacks are looked up on the tensor :attr:`data`. A rank may have
    no elements of a parameter; then ``ds_numel`` is 0.

    Attributes:
        status: always AVAILABLE, because a rank never gives up its own elements.
    """

    status = ZeroParamStatus.AVAILABLE

    @property
    @abstractmethod
    def ds_numel(self) -> int:
        """Number of elements of the parameter on this rank."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return this rank's elements as a tensor, [ds_numel]."""

    def partition_numel(self) -> int:
        """Return :attr:`ds_numel`; the parameter has a method of this name, too."""
        return self.ds_numel

    @property
    def data(self) -> Tensor:
        """This rank's elements as a tensor, [ds_numel].

        Assigning a tensor with equal values changes nothing. DeepSpeed's scripts assign a copy on the CPU to free
        device memory; here ``optimizer.offload_states()`` does that.

        Raises:
            RuntimeError: the model was deleted; or other values are assigned, because the full parameter kept elsewhere
                would not change with them.
        """
        return self.values()

    @data.setter
    def data(self, given: Tensor) -> None:
        now = self.values()
        if given.shape != now.shape or not torch.equal(given.to(now.device, now.dtype), now):
            raise RuntimeError(
                "ds_tensor.data was given other values than it has; edit whole weights in "
                "zeropp.zero.GatheredParameters(parameters, modifier_rank=0)"
            )

    # Python calls __getattr__ only for names that this class does not define.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.values(), name)


class LocalPart(DsTensor):
    """This rank's elements of a managed parameter, as a view of its main weights."""

    def __init__(self, engine: Engine, parameter: nn.Parameter) -> None:
        # Weak references: the parameter owns this object, so it must keep neither the engine nor the parameter alive.
        # See [Note: ownership].
        self._engine = weakref.ref(engine)
        self._parameter = weakref.ref(parameter)

    @property
    def ds_numel(self) -> int:
        """Number of elements of the parameter in this rank's shard."""
        _, own = self._place()
        return 0 if own is None else own.stop - own.start

    def values(self) -> Tensor:
        """Return this rank's elements, a view of the shard, [ds_numel].

        For frozen weights stored quantized, return their codes instead, uint8 [blocks, 256].
        """
        buffer, own = self._place()
        if own is None:
            return torch.empty(0, dtype=buffer.main_dtype, device=buffer.device)
        if isinstance(buffer, CodedBuffer):
            first = own.offset // BLOCK
            codes = buffer.blocks()[0]
            return codes[first : first - (own.start - own.stop) // BLOCK]
        return buffer.shard[own.offset : own.offset + own.stop - own.start]

    def _place(self) -> tuple[FlatBuffer, Fragment | None]:
        """Return the parameter's flat buffer, and the range of the parameter in this rank's shard or None."""
        engine = self._engine()
        parameter = self._parameter()
        if engine is None or parameter is None:
            raise RuntimeError("the engine that held the values of this ds_tensor is gone: its model was dropped")
        # A delayed optimizer step on the host may still be writing to the shard.
        engine.wait_for_step()
        buffer, index = engine.unit_of[id(parameter)].place_of(parameter)
        # At most one fragment: a rank's slice is one range of the buffer, and so is a parameter.
        return buffer, next((found for found in buffer.fragments() if found.slot == index), None)


class LocalPiece(DsTensor):
    """This rank's elements of a parameter built in ``zero.Init``, before an engine manages the parameter."""

    def __init__(self, piece: Piece, parameter: nn.Parameter) -> None:
        # Weak references, because the parameter owns this object and the piece.
        self._piece = weakref.ref(piece)
        self._parameter = weakref.ref(parameter)

    @property
    def ds_numel(self) -> int:
        """Number of elements of the parameter in this rank's piece."""
        return self.values().numel()

    def values(self) -> Tensor:
        """Return this rank's elements, [ds_numel]."""
        piece = self._piece()
        parameter = self._parameter()
        if piece is None or parameter is None:
            raise RuntimeError(
                "this ds_tensor is outdated: its parameter was wrapped or deleted since; read parameter.ds_tensor again"
            )
        return piece.local_values(parameter)


class _External:
    """The method ``ds_external_parameters`` of one module."""

    def __init__(self, module: nn.Module) -> None:
        # A weak reference, because the module's own dict holds this object.
        self._module = weakref.ref(module)

    def __call__(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) for each external parameter registered with the module.

        Names are ``external.0``, ``external.1`` and so on.
        """
        module = self._module()
        found = external_parameters(module) if module is not None else ()
        return [(f"external.{number}", parameter) for number, parameter in enumerate(found)]

    def __deepcopy__(self, memo: dict[int, Any]) -> _External:
        # A weak reference cannot be deep-copied. A copied module is not wrapped and needs no object of its own.
        return self


def add_to_model(model: nn.Module, engine: Engine) -> None:
    """Add DeepSpeed's attributes to all parameters and modules of a model.

    Args:
        model: model in stage 3.
        engine: engine that manages it.
    """
    for unit in engine.units:
        for parameter in unit.parameters:
            _add(parameter, LocalPart(engine, parameter), ZeroParamStatus.AVAILABLE, persistent=unit.persistent)
    replace_in(list(model.modules()), engine, EXTERNAL_AS, _External)


def add_to_piece(parameter: nn.Parameter, piece: Piece) -> None:
    """Add DeepSpeed's attributes to a parameter built in ``zero.Init``, or replace them.

    Args:
        parameter: parameter with its full shape.
        piece: this rank's piece of the parameter.
    """
    # A small parameter is kept whole, but is NOT_AVAILABLE until it is gathered: DeepSpeed partitions each parameter,
    # and scripts rely on that status.
    status = ZeroParamStatus.AVAILABLE if piece.is_gathered else ZeroParamStatus.NOT_AVAILABLE
    _add(parameter, LocalPiece(piece, parameter), status, persistent=False)


def remove(parameter: nn.Parameter) -> None:
    """Remove DeepSpeed's attributes from a parameter, because scripts gather every parameter that has them."""
    for name in [name for name in parameter.__dict__ if name.startswith("ds_") or name == "partition_numel"]:
        del parameter.__dict__[name]


def _add(parameter: nn.Parameter, part: DsTensor, status: ZeroParamStatus, *, persistent: bool) -> None:
    """Set DeepSpeed's attributes on a parameter. A second call replaces all of them except ``ds_id``.

    Args:
        parameter: parameter with its full shape.
        part: this rank's elements.
        status: ``ds_status`` of the parameter while its values are not released.
        persistent: True if the parameter stays gathered between uses.
    """
    # The number is stored under a private name, so that it survives remove() and ds_id never changes. ``ds_id`` itself
    # cannot stay: scripts take it as the sign of a partitioned parameter.
    number = parameter.__dict__.setdefault("_zeropp_number", next(_ids))
    # While the parameter is released, a property of its class returns NOT_AVAILABLE instead of this ``ds_status``: see
    # :attr:`_DeepSpeed.released`.
    parameter.__dict__.update(
        ds_id=number,
        ds_shape=parameter.shape,
        ds_numel=parameter.numel(),
        ds_tensor=part,
        ds_status=status,
        ds_persist=persistent,
        ds_active_sub_modules=set(),
        partition_numel=part.partition_numel,
    )


class _DeepSpeed(Extension):
    """Hooks that add DeepSpeed's attributes to models of the core and let the core read DeepSpeed's checkpoints."""

    def __init__(self) -> None:
        # Released parameters have a subclass with these class attributes. A property takes precedence over the value in
        # the parameter's own dict.
        self.released = {"ds_status": property(lambda parameter: ZeroParamStatus.NOT_AVAILABLE)}
        self.checkpoint_formats = ("a folder of DeepSpeed (latest, or *_optim_states.pt)",)

    def model_wrapped(self, model: nn.Module, engine: Any) -> None:
        add_to_model(model, engine)

    def piece_changed(self, parameter: nn.Parameter, piece: Any) -> None:
        add_to_piece(parameter, piece)

    def parameter_freed(self, parameter: nn.Parameter) -> None:
        remove(parameter)

    def read_checkpoint(self, path: Path, group_keys: frozenset[str] | None) -> tuple[Path, Any, Any] | None:
        # Imported only here, because most programs read no checkpoints of DeepSpeed.
        from zeropp.deepspeed.zero_checkpoints import ZeroFolder, zero_folder

        folder = zero_folder(path)
        if folder is None:
            return None
        found = ZeroFolder(folder)
        if group_keys is not None:
            found.add_optimizer(group_keys)
        return folder, found.files, found.named


EXTENSION = _DeepSpeed()
