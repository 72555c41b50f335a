"""DeepSpeed's attributes of parameters and modules, by which scripts decide what to gather."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.access.external import external_parameters
from zeropp.access.refusals import replace_in
from zeropp.engine.engine import Engine
from zeropp.engine.hooks import EXTERNAL_AS
from zeropp.params.carried import CarriedPart, carry
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.status import ZeroParamStatus
from zeropp.partition.layout import Fragment
from zeropp_kernels.wire import BLOCK

__all__ = ["LocalPart", "carry_attributes"]


class LocalPart(CarriedPart):
    """A parameter's part of its main weights."""

    def __init__(self, engine: Engine, parameter: nn.Parameter) -> None:
        # Weakly, both: a parameter must keep no engine alive, nor itself. See [Note: ownership].
        self._engine, self._parameter = weakref.ref(engine), weakref.ref(parameter)

    @property
    def ds_numel(self) -> int:
        """See :class:`CarriedPart`."""
        _, own = self._place()
        return 0 if own is None else own.stop - own.start

    def values(self) -> Tensor:
        """See :class:`CarriedPart`; of frozen weights in codes, those, uint8 [blocks, 256]."""
        buffer, own = self._place()
        if own is None:
            return torch.empty(0, dtype=buffer.main_dtype, device=buffer.device)
        if isinstance(buffer, CodedBuffer):
            first, codes = own.offset // BLOCK, buffer.blocks()[0]
            return codes[first : first - (own.start - own.stop) // BLOCK]
        return buffer.shard[own.offset : own.offset + own.stop - own.start]

    def _place(self) -> tuple[FlatBuffer, Fragment | None]:
        """The buffer that the parameter is in by now, and the range of it that is here."""
        engine, parameter = self._engine(), self._parameter()
        if engine is None or parameter is None:
            raise RuntimeError("what held the values of this ds_tensor is gone: its model was dropped")
        # The host may be stepping it.
        engine.refresh.wait_stepped()
        buffer, index = engine.unit_of[id(parameter)].place_of(parameter)
        # At most one: a rank's slice is one range, and so is a parameter.
        return buffer, next((found for found in buffer.fragments() if found.slot == index), None)


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


def carry_attributes(model: nn.Module, engine: Engine) -> None:
    """Give the parameters and modules of a model in stage 3 what DeepSpeed's carry.

    ``ds_id``, ``ds_shape``, ``ds_numel``, ``ds_status``, ``ds_tensor``, ``ds_persist``, ``ds_active_sub_modules`` (a
    set that stays empty) and ``partition_numel()``; ``ds_external_parameters()`` of each module.
    """
    for unit in engine.units:
        for parameter in unit.parameters:
            carry(parameter, LocalPart(engine, parameter), ZeroParamStatus.AVAILABLE, persistent=unit.persistent)
    replace_in(list(model.modules()), engine, EXTERNAL_AS, _External)
