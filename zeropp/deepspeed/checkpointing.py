"""Activation checkpointing under DeepSpeed's names: a segment keeps only its inputs and is recomputed in backward.

The functions wrap torch's non-reentrant checkpoint. The configuration says if the inputs wait for backward on the
device or on the host, and if the run time of each segment is logged.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeropp.config import ConfigSource, load_config
from zeropp.config.blocks import ActivationCheckpointingConfig
from zeropp.deepspeed.distributed import require_no_model_parallelism

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "reset",
]

_log = logging.getLogger("zeropp")


class _Process:
    """The activation checkpointing settings of this process.

    Attributes:
        block: settings of the last :func:`configure` call; the defaults before the first call.
        configured: True if :func:`configure` was called.
    """

    def __init__(self) -> None:
        self.block = ActivationCheckpointingConfig()
        self.configured = False


_process = _Process()
# True while a segment runs. A ContextVar, because autograd recomputes segments in threads of its own, and one thread
# may be in backward while another is in forward.
_inside = ContextVar("_inside", default=False)


def configure(
    mpu_: Any,
    deepspeed_config: ConfigSource = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set the behavior of :func:`checkpoint` for all later calls. Settings of an earlier call are dropped.

    Args:
        mpu_: Megatron-style object that reports its model-parallel size, which must be 1; or None.
        deepspeed_config: configuration whose ``activation_checkpointing`` block is used. Arguments below that are not
            None override the block.
        partition_activations: no effect: with one model-parallel rank there is no rank to share activations with.
        contiguous_checkpointing, num_checkpoints: no effect: torch's allocator reuses the memory of inputs.
        checkpoint_in_cpu: keep inputs that require gradients in page-locked host memory until backward. No effect on
            tensors that are on a CPU.
        synchronize: wait for the GPU at the start and at the end of each segment.
        profile: log the duration of each segment's forward and recomputation; also waits for the GPU at both ends.

    Raises:
        ConfigError: the configuration is invalid.
        ValueError: a setting is invalid, or ``mpu_`` reports a model-parallel size above 1.
    """
    require_no_model_parallelism(mpu_)
    block = ActivationCheckpointingConfig()
    if deepspeed_config is not None:
        block = load_config(deepspeed_config).activation_checkpointing
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    said = {key: value for key, value in given.items() if value is not None}
    _process.block = ActivationCheckpointingConfig.model_validate({**block.model_dump(), **said})
    _process.configured = True


def is_configured() -> bool:
    """Return True if :func:`configure` was called in this process."""
    return _process.configured


def reset() -> None:
    """Do nothing. DeepSpeed's function frees its activation buffers, and zeropp keeps no such buffers."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without keeping its activations; backward calls it again with the same random numbers.

    Args:
        function: module or function that computes the same values when it is called again.
        args: positional arguments of ``function``.
        kwargs: keyword arguments of ``function``.

    Returns:
        The return value of ``function``.
    """
    inputs = (*args, *kwargs.values())
    # Inputs of a segment inside another segment stay on the device: the outer recomputation produces them again. The
    # outer forward and its recomputation follow the same rule, because torch requires that both save the same tensors.
    if not _process.block.cpu_checkpointing or not torch.is_grad_enabled() or _inside.get():
        return torch_checkpoint(_Segment(function, tuple(kwargs)), *inputs, use_reentrant=False)
    # Parameters are not saved with the other inputs: the model keeps them, and zeropp may free and gather their values
    # between forward and backward.
    held = {place: value for place, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
    others = [None if place in held else value for place, value in enumerate(inputs)]
    with _kept_on_host(others):
        return torch_checkpoint(_Segment(function, tuple(kwargs), held), *others, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call :func:`checkpoint`, which always uses the non-reentrant variant of torch."""
    return checkpoint(function, *args, **kwargs)


class _Segment:
    """The function of one segment, as torch's checkpoint calls it in forward and again in backward.

    Args:
        function: function to call.
        names: names of the last ``len(names)`` inputs, which ``function`` takes as keyword arguments.
        held: position of an input -> parameter to pass to ``function`` at that position; the caller passes None there.
    """

    def __init__(
        self, function: Callable[..., Any], names: tuple[str, ...], held: Mapping[int, nn.Parameter] | None = None
    ) -> None:
        self._function = function
        self._names = names
        self._held = held or {}
        self._called = False

    def __call__(self, *given: Any) -> Any:
        inputs = [self._held.get(place, value) for place, value in enumerate(given)]
        count = len(inputs) - len(self._names)
        again, self._called = self._called, True
        with _timed_segment("recomputation" if again else "forward"):
            token = _inside.set(True)
            try:
                # Restore the keyword arguments. They come as positional arguments because torch's checkpoint saves
                # only positional tensors for backward.
                return self._function(*inputs[:count], **dict(zip(self._names, inputs[count:], strict=True)))
            finally:
                _inside.reset(token)


def _kept_on_host(inputs: Iterable[object]) -> saved_tensors_hooks:
    """Return autograd hooks that keep a segment's inputs in page-locked host memory until backward.

    Inputs that require no gradients (masks, position tables) stay on the device, because many segments often share
    the same tensors.
    """
    # Inside a segment torch's own checkpoint hooks are active, so these hooks only see the segment's inputs. Autograd
    # passes new tensor objects with the same memory, so inputs are recognized by their data_ptr.
    activations = {
        value.data_ptr()
        for value in inputs
        if isinstance(value, Tensor) and value.requires_grad and not _lies_on_host(value)
    }

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        return _SavedOnHost(tensor) if tensor.data_ptr() in activations else _SavedOnDevice(tensor)

    return saved_tensors_hooks(pack, lambda packed: packed())


def _lies_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class _SavedOnHost:
    """A copy of a segment's input in host memory. Calling the object returns a new copy on the input's device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        # Keep the strides: kernels choose their algorithm by the strides, and another algorithm may round differently.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def __call__(self) -> Tensor:
        # Backward may run on another stream than forward. Without this wait it may read an incomplete copy.
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        # copy=True: if the device is a CPU, .to() would otherwise return the stored tensor itself.
        return self._copy.to(self._device, non_blocking=True, copy=True)


class _SavedOnDevice:
    """A segment's input that stays on its device. Calling the object returns the input."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def __call__(self) -> Tensor:
        # Autograd does not check the version of tensors that it saves through hooks, so an edit is detected here.
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of a checkpointed segment, shape {tuple(self._tensor.shape)}, was modified in place after "
                "its forward, so its recomputation would give other results; give checkpoint() a copy"
            )
        return self._tensor


@contextlib.contextmanager
def _timed_segment(what: str) -> Iterator[None]:
    """Context manager that waits for the GPU at both ends and logs the time between, as the settings demand.

    Args:
        what: word for the log message: "forward" or "recomputation".
    """
    block = _process.block
    if not (block.synchronize_checkpoint_boundary or block.profile):
        yield
        return
    # Without this wait the measured time would include work that was queued on the GPU before.
    _synchronize()
    start = time.perf_counter()
    try:
        yield
    finally:
        # In a finally block, because torch stops a recomputation by an exception once it has all tensors for backward.
        _synchronize()
        if block.profile:
            _log.info("checkpointed segment: %s took %.3f ms", what, 1e3 * (time.perf_counter() - start))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
