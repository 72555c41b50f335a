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

from zeropp_kernels.dispatch import GPU_WAYS, LAUNCHES, NAMESPACE

__all__ = ["WAYS", "IdleDriver", "idle_card"]


def _nothing(*arguments: object) -> None:
    """Take the arguments of a launcher."""


class IdleDriver:
    """The methods of a driver that Triton calls for a launch, for a GPU of compute capability 9.0.

    Attributes:
        launched: function that is called with the arguments of each launch.
        device: number of the current device.
        stream: handle of the current stream.
        unloaded: handles of modules that Triton has unloaded.
    """

    def __init__(self, launched: Callable[..., None] = _nothing) -> None:
        # Triton keeps compiled kernels by device, so this is a number that no real GPU has.
        self.launched, self.device, self.stream, self.loaded = launched, 1 << 20, 7777, 0
        self.unloaded: list[int] = []
        self.launcher_cls = lambda source, metadata: self.launched
        self.utils = SimpleNamespace(
            load_binary=self._load,
            unload_module=self.unloaded.append,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def _load(self, *binary: object) -> tuple[int, int, int, int, int]:
        # A function has a number of its own, so that tests can tell kernels apart.
        self.loaded += 1
        return self.loaded, self.loaded, 0, 0, 1024

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


# Functions from the name of an operation to an implementation.
WAYS: dict[str, Callable[[str], Callable[..., None]]] = {
    "torch": lambda name: _nothing,
    "general": lambda name: GPU_WAYS[name][1],
    "prepared": lambda name: GPU_WAYS[name][0],
}


@contextmanager
def idle_card(way: Callable[[str], Callable[..., None]], idle: IdleDriver | None = None) -> Iterator[None]:
    """Context in which operations on CPU tensors take the code path of a GPU with the driver ``idle``.

    Args:
        way: function from the name of an operation to the implementation that it gets.
        idle: the driver; by default one that launches nothing.
    """
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    library, before = torch.library.Library(NAMESPACE, "IMPL"), driver._active
    with ExitStack() as undo:
        # Later registrations take precedence. Destroying the library brings the earlier ones back.
        undo.callback(library._destroy)
        undo.callback(setattr, driver, "_active", before)
        driver.set_active(IdleDriver() if idle is None else idle)
        # Public functions repeat prepared launches without the registered implementation. Those of another driver
        # would not be repeated, but looking for them takes time.
        for launches in LAUNCHES.values():
            launches.found.clear()
            undo.callback(launches.found.clear)
        # CPU tensors have no CUDA device to select.
        undo.enter_context(mock.patch.object(torch.cuda, "device", lambda device: nullcontext()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*other operators may also be overridden")
            for name in GPU_WAYS:
                library.impl(name, way(name), key, allow_override=True)
        yield
