"""The parts of DeepSpeed's API that act in models which plain zeropp calls build or wrap; see `zeropp._extensions`.

Scripts decide by DeepSpeed's attributes which parameters to gather. Parameters in stage 3, and parameters that
``zero.Init`` builds, carry ``ds_id``, ``ds_shape``, ``ds_numel``,
``ds_status``, ``ds_tensor``, ``ds_persist``, ``ds_active_sub_modules`` (a set that stays empty) and
``partition_numel()``. Modules carry ``ds_external_parameters()``.
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
from zeropp.params.sharded_build import Piece
from zeropp.params.unit import FlatBuffer
from zeropp.partition.levels import Fragment
from zeropp_kernels.wire import BLOCK

__all__ = ["EXTENSION", "ZeroParamStatus", "add_to_model", "add_to_piece", "remove"]


class ZeroParamStatus(Enum):
    """A parameter's ``ds_status``."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    # Nobody sees this here: who asks for a weight under way waits for it.
    INFLIGHT = 3


_ids = itertools.count()


class DsTensor(ABC):
    """A parameter's ``ds_tensor``: this rank's elements, in the order of memory; maybe none.

    Whatever a tensor has is asked of :attr:`data`.

    Attributes:
        status: that of the part, which is always there.
    """

    status = ZeroParamStatus.AVAILABLE

    @property
    @abstractmethod
    def ds_numel(self) -> int:
        """The number of elements."""

    @abstractmethod
    def values(self) -> Tensor:
        """The part itself, [ds_numel]."""

    def partition_numel(self) -> int:
        """:attr:`ds_numel`, by the name of the parameter's method."""
        return self.ds_numel

    @property
    def data(self) -> Tensor:
        """The part itself, [ds_numel].

        Given a tensor, nothing changes: the part stays where it is, and memory is given back by
        ``optimizer.offload_states()``.

        Raises:
            RuntimeError: its model is gone; or other values are given, which the whole elsewhere would not have.
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

    # Last: only what this class has not is a tensor's.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.values(), name)


class LocalPart(DsTensor):
    """A parameter's part of its main weights."""

    def __init__(self, engine: Engine, parameter: nn.Parameter) -> None:
        # Weakly, both: a parameter must keep no engine alive, nor itself. See [Note: ownership].
        self._engine = weakref.ref(engine)
        self._parameter = weakref.ref(parameter)

    @property
    def ds_numel(self) -> int:
        """See :class:`DsTensor`."""
        _, own = self._place()
        return 0 if own is None else own.stop - own.start

    def values(self) -> Tensor:
        """See :class:`DsTensor`; of frozen weights in codes, those, uint8 [blocks, 256]."""
        buffer, own = self._place()
        if own is None:
            return torch.empty(0, dtype=buffer.main_dtype, device=buffer.device)
        if isinstance(buffer, CodedBuffer):
            first = own.offset // BLOCK
            codes = buffer.blocks()[0]
            return codes[first : first - (own.start - own.stop) // BLOCK]
        return buffer.shard[own.offset : own.offset + own.stop - own.start]

    def _place(self) -> tuple[FlatBuffer, Fragment | None]:
        """The buffer that the parameter is in by now, and the range of it that is here."""
        engine = self._engine()
        parameter = self._parameter()
        if engine is None or parameter is None:
            raise RuntimeError("what held the values of this ds_tensor is gone: its model was dropped")
        # The host may be stepping it.
        engine.wait_for_step()
        buffer, index = engine.unit_of[id(parameter)].place_of(parameter)
        # At most one: a rank's slice is one range, and so is a parameter.
        return buffer, next((found for found in buffer.fragments() if found.slot == index), None)


class LocalPiece(DsTensor):
    """A built parameter's part: of its row, or of what its values would give."""

    def __init__(self, piece: Piece, parameter: nn.Parameter) -> None:
        # Weakly: the parameter owns all of it.
        self._piece = weakref.ref(piece)
        self._parameter = weakref.ref(parameter)

    @property
    def ds_numel(self) -> int:
        """See :class:`DsTensor`."""
        return self.values().numel()

    def values(self) -> Tensor:
        """See :class:`DsTensor`."""
        piece = self._piece()
        parameter = self._parameter()
        if piece is None or parameter is None:
            raise RuntimeError("what this ds_tensor was a part of is gone: ask the parameter for the one it has now")
        return piece.local_values(parameter)


class _External:
    """A module's ``ds_external_parameters``."""

    def __init__(self, module: nn.Module) -> None:
        # Weakly: it lies in the module's own dict.
        self._module = weakref.ref(module)

    def __call__(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters registered with the module, with names as ``named_parameters()`` gives them."""
        module = self._module()
        found = external_parameters(module) if module is not None else ()
        return [(f"external.{number}", parameter) for number, parameter in enumerate(found)]

    def __deepcopy__(self, memo: dict[int, Any]) -> _External:
        # Of a copy that is not wrapped; weak references cannot be copied along.
        return self


def add_to_model(model: nn.Module, engine: Engine) -> None:
    """Give the attributes to the parameters and modules of a model in stage 3."""
    for unit in engine.units:
        for parameter in unit.parameters:
            _add(parameter, LocalPart(engine, parameter), ZeroParamStatus.AVAILABLE, persistent=unit.persistent)
    replace_in(list(model.modules()), engine, EXTERNAL_AS, _External)


def add_to_piece(parameter: nn.Parameter, piece: Piece) -> None:
    """Give the attributes to a parameter that ``zero.Init`` builds, or renew them."""
    # Also where it is small and whole: DeepSpeed's is in pieces until it is gathered, and scripts ask for that.
    status = ZeroParamStatus.AVAILABLE if piece.is_gathered else ZeroParamStatus.NOT_AVAILABLE
    _add(parameter, LocalPiece(piece, parameter), status, persistent=False)


def remove(parameter: nn.Parameter) -> None:
    """Remove the attributes: scripts gather every parameter that has them."""
    for name in [name for name in parameter.__dict__ if name.startswith("ds_") or name == "partition_numel"]:
        del parameter.__dict__[name]


def _add(parameter: nn.Parameter, part: DsTensor, status: ZeroParamStatus, *, persistent: bool) -> None:
    """Give a parameter ``ds_id``, ``ds_shape``, ``ds_tensor`` and kin; anew, all but ``ds_id`` are replaced.

    Args:
        parameter: with the shape that it has when it is whole.
        part: this rank's.
        status: of the parameter, while it is not released.
        persistent: it stays whole between uses.
    """
    # Kept under a name of ours: it must be the same for good, and is no sign that somebody has partitioned this.
    number = parameter.__dict__.setdefault("_zeropp_number", next(_ids))
    # While it is released its class answers NOT_AVAILABLE in place of this; see :attr:`_DeepSpeed.released`.
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
    def __init__(self) -> None:
        # A property takes precedence over the value in a parameter's own dict, which holds while it is not released.
        self.released = {"ds_status": property(lambda parameter: ZeroParamStatus.NOT_AVAILABLE)}
        self.checkpoint_formats = ("a folder of DeepSpeed (latest, or *_optim_states.pt)",)

    def model_wrapped(self, model: nn.Module, engine: Any) -> None:
        add_to_model(model, engine)

    def piece_changed(self, parameter: nn.Parameter, piece: Any) -> None:
        add_to_piece(parameter, piece)

    def parameter_freed(self, parameter: nn.Parameter) -> None:
        remove(parameter)

    def read_checkpoint(self, path: Path, group_keys: frozenset[str] | None) -> tuple[Path, Any, Any] | None:
        # Imported here: a program that trains reads no checkpoints of DeepSpeed, most often.
        from zeropp.deepspeed.zero_checkpoints import ZeroFolder, zero_folder

        folder = zero_folder(path)
        if folder is None:
            return None
        found = ZeroFolder(folder)
        if group_keys is not None:
            found.add_optimizer(group_keys)
        return folder, found.files, found.named


EXTENSION = _DeepSpeed()
