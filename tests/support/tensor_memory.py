"""A model wrapped with SGD, and the storages of all CPU tensors that Python objects of this process refer to."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import zeropp

__all__ = ["SHARED_NAN", "storages", "trained"]


def trained(model: nn.Module, config: dict[str, object]) -> zeropp.ZeroOptimizer:
    return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)


SHARED_NAN = 16  # bytes of one NaN per dtype: released parameters of the process are views of these


def storages() -> dict[int, int]:
    """Return the bytes of the storage of every live CPU tensor, keyed by address.

    An empty storage has no data pointer, so the address of the storage object is its key.
    """
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Fake tensors, which torch.compile keeps for compiled functions of earlier tests, have no memory.
        if (type(thing) is Tensor or isinstance(thing, nn.Parameter)) and not isinstance(thing, FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                if thing.device.type == "cpu":
                    storage = thing.untyped_storage()
                    found[storage._cdata if storage.nbytes() == 0 else storage.data_ptr()] = storage.nbytes()
    return found
