"""A model wrapped with SGD, and the memory that Python's tensors of this process reach."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import zeropp

__all__ = ["SHARED_NAN", "storages", "trained"]


def trained(model: nn.Module, config: dict[str, object]) -> zeropp.ZeroOptimizer:
    return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)


SHARED_NAN = 16  # bytes: one NaN for each dtype, seen through every released parameter of the process


def storages() -> dict[int, int]:
    """Bytes of every storage that some Python tensor reaches, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # What another test has compiled keeps fakes of its parameters, which have no memory.
        if (type(thing) is Tensor or isinstance(thing, nn.Parameter)) and not isinstance(thing, FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                if thing.device.type == "cpu":
                    storage = thing.untyped_storage()
                    found[storage._cdata if storage.nbytes() == 0 else storage.data_ptr()] = storage.nbytes()
    return found
