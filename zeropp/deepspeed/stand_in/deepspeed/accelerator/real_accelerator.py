"""``DeepSpeedAccelerator``: DeepSpeed's device calls (names, memory, streams), answered by PyTorch for GPU or CPU."""

from __future__ import annotations

import contextlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

# Names that scripts use on every device, but that torch's modules of some devices, such as torch.cpu, lack. There the
# names in _ZERO return 0 bytes, and the names in _NOTHING do nothing.
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
    """One kind of device, with the methods of DeepSpeed's accelerator.

    Names that this class does not define are taken from torch's module for the device, such as ``torch.cuda``.

    Args:
        kind: device type, such as "cuda" or "cpu"; None for torch's current accelerator, or "cpu" without one.
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
        """Return the device's name: "cuda", or "cuda:3" with index 3; "cpu" for every index on a CPU."""
        # All ranks of a node share the CPU, so the CPU's name has no index.
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int | str:
        """Return the index of this process's device, or "cpu" on a CPU."""
        return "cpu" if self._name == "cpu" else int(self._module.current_device())

    def current_device_name(self) -> str:
        """Return the name of this process's device with its index, such as "cuda:3", or "cpu" on a CPU."""
        return "cpu" if self._name == "cpu" else f"{self._name}:{self._module.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context manager that makes a device the current one; it does nothing on a CPU."""
        return contextlib.nullcontext() if self._name == "cpu" else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make a device the current one of this process, by index; nothing happens on a CPU."""
        if self._name != "cpu":
            self._module.set_device(device_index)

    def device_count(self) -> int:
        """Return the number of devices of this node; on CPUs, the number of ranks on this node."""
        if self._name != "cpu":
            return int(self._module.device_count())
        # On CPUs each rank counts as one device, because scripts compute their world size from this number. DeepSpeed's
        # launcher sets LOCAL_SIZE, and torchrun sets LOCAL_WORLD_SIZE.
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")

    def is_available(self) -> bool:
        """Return True if a device of this kind is available."""
        return bool(self._module.is_available())

    def is_synchronized_device(self) -> bool:
        """Return True if calls return after the device has finished, as on CPUs."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """Return the backend of process groups for this device: "nccl" for CUDA, "gloo" for CPUs."""
        return "gloo" if self._name == "cpu" else torch.distributed.get_default_backend_for_device(self._name)

    def random(self) -> ModuleType:
        """Return torch's module of random numbers, ``torch.random``."""
        return torch.random

    def is_bf16_supported(self) -> bool:
        """Return True if the device computes in bfloat16."""
        return True if self._name == "cpu" else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return True: the engine can compute in float16 on every device."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which the engine can compute on this device."""
        sixteen = [torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]
        return [torch.float32, *sixteen]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the size of the device's memory in bytes; on a CPU, of the host's memory."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._module.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of the device in bytes; on a CPU, of the host."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return int(self._module.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Return a copy of the tensor in page-locked memory; on a CPU, the tensor itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if the tensor is in page-locked memory."""
        return bool(tensor.is_pinned())

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return True if the tensor is on a device of this kind."""
        return tensor.device.type == self._name

    def get_compile_backend(self) -> str:
        """Return the name of the default backend of ``torch.compile``."""
        return "inductor"


_current: list[DeepSpeedAccelerator] = []


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process; the environment variable DS_ACCELERATOR overrides its kind."""
    # Create the object at the first call, not at import: looking for devices may initialize CUDA, and a process
    # that is forked later could not use CUDA.
    if not _current:
        _current.append(DeepSpeedAccelerator(os.environ.get("DS_ACCELERATOR")))
    return _current[0]


def set_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    """Make `get_accelerator` return this accelerator."""
    _current[:] = [accelerator]


def is_current_accelerator_supported() -> bool:
    """Return True if zeropp runs on the accelerator: CPUs, and NVIDIA or AMD GPUs ("cuda")."""
    return get_accelerator().device_name() in ("cpu", "cuda")
