"""Two memories on one CPU: what is the host's and what a device's is known by tag, and kernels refuse to mix them.

On a card an operation on a tensor of the host and one of the card raises, unless the host's is a single number. Here
the device is ``cpu:0``, the host ``cpu``: memory has the tag of the device it was asked for on, or of what it was made
from, in every thread. Copies may cross, as they do on a card. Streams, pinned memory and kernels are not pretended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeropp._compat import unguarded
from zeropp.comm.streams import Event, ThreadStream
from zeropp.offload import tier_choice
from zeropp.offload.storage_tiers import HostMemory, MemoryTensor

__all__ = ["DEVICE", "Memories", "two_memories"]

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
_CROSS = ("copy_", "_to_copy", "_foreach_copy_")
_INDEXED = ("index", "index_put_")


class Memories:
    """Which storage is whose.

    Attributes:
        crossed: elements that were copied from one to the other.
    """

    def __init__(self) -> None:
        # With the storages, or another would come to have the number of one that is gone.
        self._device: dict[int, torch.UntypedStorage] = {}
        self.crossed = 0

    def of_device(self, tensor: Tensor) -> bool:
        with unguarded():
            return tensor.untyped_storage()._cdata in self._device

    def take(self, *tensors: Tensor) -> None:
        """Let tensors be the device's."""
        for each in tensors:
            storage = each.untyped_storage()
            self._device[storage._cdata] = storage

    def check(self, name: str, args: list[Tensor]) -> None:
        """Whether a kernel may have these.

        Raises:
            RuntimeError: it may not.
        """
        # A number of the host is an argument of a kernel; one of the device is memory.
        found = {self.of_device(each) for each in args if self.of_device(each) or each.dim()}
        if name in _INDEXED and self.of_device(args[0]):
            # Indices may be the host's.
            found = {True}
        if len(found) > 1 and name in _CROSS:
            self.crossed += args[0].numel()
        elif len(found) > 1:
            shapes = [f"{list(each.shape)} on the {'device' if self.of_device(each) else 'host'}" for each in args]
            raise RuntimeError(f"{name}: expected all tensors to be in one memory, found {', '.join(shapes)}")


class _Kernels(TorchDispatchMode):
    def __init__(self, memories: Memories) -> None:
        super().__init__()
        self._memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # Lists go to a kernel one by one where they are not in one memory.
        each_alone = (
            name.startswith("_foreach") and len(args) > 1 and all(isinstance(a, list | tuple) for a in args[:2])
        )
        for some in zip(*args[:2], strict=True) if each_alone else [given]:
            self._memories.check(name, list(some))
        found = func(*args, **kwargs)
        device = kwargs.get("device")
        # Given tensors, ``device`` is where these are: `empty_like` and its kind are told of none other here.
        here = any(map(self._memories.of_device, given)) if given or device is None else device.index == 0
        before = {each.untyped_storage()._cdata for each in given}
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and here and each.untyped_storage()._cdata not in before:
                self._memories.take(each)
        return found


def _calls(memories: Memories) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """``to`` and ``cpu``, which copy what goes from the device to the host: torch thinks that it is there already."""
    plain = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        words = [*args, *kwargs.values()]
        like = next((word for word in words if isinstance(word, Tensor)), None)
        devices = [torch.device(word) for word in words if isinstance(word, str | torch.device)]
        if like is not None:
            devices = [like.device]
        dtype = next((word for word in words if isinstance(word, torch.dtype)), None if like is None else like.dtype)
        if devices and memories.of_device(tensor) != (devices[0].index == 0):
            return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=devices[0]).copy_(tensor)
        return plain(tensor, dtype) if dtype is not None else tensor

    return to, lambda tensor: to(tensor, "cpu")


@contextlib.contextmanager
def two_memories() -> Iterator[Memories]:
    """Engines that are made inside train on the device, and have a host beside it."""
    memories = Memories()
    run = ThreadStream.run
    to, cpu = _calls(memories)

    def tagged(work: Callable[[], object]) -> object:
        with _Kernels(memories):
            return work()

    def run_tagged(self: ThreadStream, *works: Callable[[], object], after: Event | None = None) -> Event:
        return run(self, *(partial(tagged, work) for work in works), after=after)

    with (
        mock.patch.object(ThreadStream, "run", run_tagged),
        mock.patch.object(Tensor, "device", property(lambda tensor: DEVICE if memories.of_device(tensor) else HOST)),
        mock.patch.object(tier_choice, "host_memory", lambda device: HostMemory()),
        mock.patch.object(MemoryTensor, "at_hand", property(lambda row: row.place == "host")),
        mock.patch.object(Tensor, "to", to),
        mock.patch.object(Tensor, "cpu", cpu),
        _Kernels(memories),
    ):
        yield memories
