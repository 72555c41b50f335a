"""The accelerator that torch finds, or the CPU: names, memory, streams."""

from __future__ import annotations

import contextlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

# Asked of every device, and known to torch's modules of some: on a CPU they have nothing to count or to free.
_ZERO = (
    "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "memory_allocated", "memory_cached",
    "memory_reserved",
)  # fmt: skip
_NOTHING = (
    "empty_cache", "manual_seed_all", "range_pop", "range_push", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats",
)  # fmt: skip
_LEGACY = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")


class DeepSpeedAccelerator:
    """One kind of device. What it has not by itself is that of torch's module for the kind (``torch.cuda``).

    Args:
        kind: "cuda", "cpu", or another type of torch's devices; None for what torch finds.
    """

    def __init__(self, kind: str | None = None) -> None:
        found = torch.accelerator.current_accelerator()
        self._name = kind or ("cpu" if found is None else found.type)

    @property
    def _module(self) -> ModuleType:
        module: ModuleType = torch.get_device_module(self._name)
        return module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(self._module, name):
            return getattr(self._module, name)
        if name in _ZERO:
            return lambda device_index=None: 0
        if name in _NOTHING:
            return lambda *args, **kwargs: None
        if name in _LEGACY:
            return getattr(torch, name)
        raise AttributeError(f"neither zeropp's accelerator nor torch.{self._name} has {name!r}")

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", or "cuda:3" of an index; "cpu" of any."""
        # There is one host, whatever the rank on it.
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int | str:
        """Index of this process's device; "cpu" has none."""
        return "cpu" if self._name == "cpu" else int(self._module.current_device())

    def current_device_name(self) -> str:
        """ "cuda:3" of this process's; "cpu"."""
        return "cpu" if self._name == "cpu" else f"{self._name}:{self._module.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which this device is the current one."""
        return contextlib.nullcontext() if self._name == "cpu" else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make this process's device that of an index."""
        if self._name != "cpu":
            self._module.set_device(device_index)

    def device_count(self) -> int:
        """Devices of this host; on CPUs, ranks of it."""
        if self._name != "cpu":
            return int(self._module.device_count())
        # Scripts size their jobs by it, and each rank on a CPU is a device to them; the first name is DeepSpeed's.
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")

    def is_available(self) -> bool:
        """Whether there is one."""
        return bool(self._module.is_available())

    def is_synchronized_device(self) -> bool:
        """Whether calls return when the device is done with them."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """What its process groups use: "nccl" or "gloo"."""
        return "gloo" if self._name == "cpu" else torch.distributed.get_default_backend_for_device(self._name)

    def random(self) -> ModuleType:
        """torch's module of random numbers."""
        return torch.random

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bfloat16."""
        return True if self._name == "cpu" else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What the engine may be told to compute in."""
        sixteen = [torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]
        return [torch.float32, *sixteen]

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory; of the host's, on a CPU."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._module.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return int(self._module.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in page-locked memory; as it is where no device copies from it."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is there."""
        return bool(tensor.is_pinned())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.device.type == self._name

    def get_compile_backend(self) -> str:
        """``torch.compile``'s."""
        return "inductor"


_current: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """This process's; DS_ACCELERATOR in the environment names another kind."""
    # Not as this is imported: what devices there are is asked of them then, and a fork later could use none.
    if not _current:
        _current.append(DeepSpeedAccelerator(os.environ.get("DS_ACCELERATOR")))
    return _current[0]


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """Let `get_accelerator` give this one."""
    _current[:] = [accelerator]


def is_current_accelerator_supported() -> bool:
    """Whether zeropp runs on it: CPUs, NVIDIA's and AMD's GPUs."""
    return get_accelerator().device_name() in ("cpu", "cuda")
