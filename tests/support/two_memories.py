"""Two memories on one CPU: a host and a device. Kernels that mix their tensors raise.

On a GPU, an operation on a host tensor and a device tensor raises, unless the host tensor is a single number. Here the
device is ``cpu:0`` and the host is ``cpu``. Each storage is tagged, in every thread: with the device that its
allocation named, or with the device of the tensors that it was computed from. Copies between the memories are allowed,
as on a GPU. Streams, pinned memory and GPU kernels are not simulated.
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
    """The set of storages on the simulated device; all other storages are on the host.

    Attributes:
        crossed: number of elements copied between host and device.
    """

    def __init__(self) -> None:
        # The dict keeps the storages alive, so that no new storage gets the address of a freed one.
        self._device: dict[int, torch.UntypedStorage] = {}
        self.crossed = 0

    def of_device(self, tensor: Tensor) -> bool:
        with unguarded():
            return tensor.untyped_storage()._cdata in self._device

    def take(self, *tensors: Tensor) -> None:
        """Tag the storages of the tensors as device memory."""
        for each in tensors:
            storage = each.untyped_storage()
            self._device[storage._cdata] = storage

    def check(self, name: str, args: list[Tensor]) -> None:
        """Check the operands of a kernel.

        Raises:
            RuntimeError: the operands are in both memories and the kernel is not a copy.
        """
        # A host tensor without dimensions may join any kernel, because a GPU kernel takes it as a plain argument.
        found = {self.of_device(each) for each in args if self.of_device(each) or each.dim()}
        if name in _INDEXED and self.of_device(args[0]):
            # Indices may be on the host.
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
        # Foreach kernels take lists. Tensors of one list may be in different memories, so check each pair by itself.
        each_alone = (
            name.startswith("_foreach") and len(args) > 1 and all(isinstance(a, list | tuple) for a in args[:2])
        )
        for some in zip(*args[:2], strict=True) if each_alone else [given]:
            self._memories.check(name, list(some))
        found = func(*args, **kwargs)
        device = kwargs.get("device")
        # If there are tensor operands, the result is where they are: ``empty_like`` and its kind get no device argument
        # here.
        here = any(map(self._memories.of_device, given)) if given or device is None else device.index == 0
        before = {each.untyped_storage()._cdata for each in given}
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and here and each.untyped_storage()._cdata not in before:
                self._memories.take(each)
        return found


def _calls(memories: Memories) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return replacements of ``Tensor.to`` and ``Tensor.cpu`` that copy between device and host.

    Both simulated devices are CPU, so torch's own methods would return the tensor without a copy.
    """
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
    """Simulate two memories in the block: engines that are built inside train on the device and offload to the host."""
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
