"""DeepSpeed's attributes of parameters, by which scripts decide what to gather."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.params.status import ZeroParamStatus

__all__ = ["CarriedPart", "carry", "drop"]

_ids = itertools.count()


class CarriedPart(ABC):
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


def carry(parameter: nn.Parameter, part: CarriedPart, status: ZeroParamStatus, *, persistent: bool) -> None:
    """Give a parameter ``ds_id``, ``ds_shape``, ``ds_tensor`` and kin; anew, all but ``ds_id`` are replaced.

    Args:
        parameter: with the shape that it has when it is whole.
        part: this rank's.
        status: of the parameter, while it is not released.
        persistent: it stays whole between uses.
    """
    # Kept under a name of ours: it must be the same for good, and is no sign that somebody has partitioned this.
    number = parameter.__dict__.setdefault("_zeropp_number", next(_ids))
    # While it is released its class answers NOT_AVAILABLE in place of this; see `zeropp.params.guard`.
    parameter.__dict__.update(
        ds_id=number, ds_shape=parameter.shape, ds_numel=parameter.numel(), ds_tensor=part,
        ds_status=status, ds_persist=persistent, ds_active_sub_modules=set(),
        partition_numel=part.partition_numel,
    )  # fmt: skip


def drop(parameter: nn.Parameter) -> None:
    """Take them off: scripts take a parameter that has them for one that is to be gathered."""
    for name in [name for name in parameter.__dict__ if name.startswith("ds_") or name == "partition_numel"]:
        del parameter.__dict__[name]
