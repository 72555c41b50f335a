"""A Triton driver for one GPU that this machine lacks: kernels are compiled for it, and launches do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from zeropp_kernels.dispatch import GPU_WAYS, NAMESPACE

__all__ = ["STREAM", "IdleDriver", "idle_card"]

STREAM = 7777  # handle of the current stream


def _nothing(*arguments: object) -> None:
    """Take the arguments of a launcher."""


class IdleDriver:
    """What Triton's launches ask of a driver, for compute capability 9.0.

    Attributes:
        launched: function that is called with the arguments of each launch.
        device: number of the current device.
    """

    def __init__(self, launched: Callable[..., None] = _nothing) -> None:
        self.launched, self.device, self.loaded = launched, 0, 0
        self.launcher_cls = lambda source, metadata: self.launched
        self.utils = SimpleNamespace(
            load_binary=self._load,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def _load(self, *binary: object) -> tuple[int, int, int, int, int]:
        # A function has a number of its own, so that tests can tell kernels apart.
        self.loaded += 1
        return self.loaded, self.loaded, 0, 0, 1024

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def idle_card(way: int, idle: Any) -> Iterator[None]:
    """Context in which operations on CPU tensors take the code path of a GPU with this driver.

    Args:
        way: 0 for calls with prepared launches, 1 for calls through Triton: a place in ``GPU_WAYS``.
        idle: the driver.
    """
    library = torch.library.Library(NAMESPACE, "IMPL")
    before = driver.active if driver._active is not None else None
    with ExitStack() as undo:
        undo.callback(library._destroy)
        undo.callback(setattr, driver, "_active", before)
        driver.set_active(idle)
        # CPU tensors have no CUDA device to select.
        undo.enter_context(mock.patch.object(torch.cuda, "device", lambda device: nullcontext()))
        for name, ways in GPU_WAYS.items():
            library.impl(name, ways[way], "CPU", allow_override=True)
        yield
