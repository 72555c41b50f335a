"""A Triton driver for one GPU that this machine lacks: kernels are compiled for it, and launches do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from zeropp_kernels.dispatch import GPU_WAYS, NAMESPACE

__all__ = ["STREAM", "WAYS", "IdleDriver", "idle_card"]

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


# Implementations that :func:`idle_card` can give to an operation, by name.
WAYS: dict[str, Callable[[str], Callable[..., None]]] = {
    "torch": lambda name: _nothing,
    "general": lambda name: GPU_WAYS[name][1],
    "prepared": lambda name: GPU_WAYS[name][0],
}


@contextmanager
def idle_card(way: str, idle: IdleDriver | None = None) -> Iterator[None]:
    """Context in which operations on CPU tensors take the code path of a GPU with the driver ``idle``.

    Args:
        way: implementation that the operations get, a name in ``WAYS``.
        idle: the driver; by default one that launches nothing.
    """
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    library, before = torch.library.Library(NAMESPACE, "IMPL"), driver._active
    with ExitStack() as undo:
        # Later registrations take precedence. Destroying the library brings the earlier ones back.
        undo.callback(library._destroy)
        undo.callback(setattr, driver, "_active", before)
        driver.set_active(IdleDriver() if idle is None else idle)
        # CPU tensors have no CUDA device to select.
        undo.enter_context(mock.patch.object(torch.cuda, "device", lambda device: nullcontext()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*other operators may also be overridden")
            for name in GPU_WAYS:
                library.impl(name, WAYS[way](name), key, allow_override=True)
        yield
