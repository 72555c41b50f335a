"""Activation checkpointing by DeepSpeed's calls: segments keep their inputs alone, and are run again in backward.

It is torch's non-reentrant checkpoint. The configuration says where inputs are kept until backward, and what is timed.
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
    """The settings that this process has configured.

    Attributes:
        block: the settings of :func:`configure`; the defaults before its first call.
        configured: whether it was called.
    """

    def __init__(self) -> None:
        self.block = ActivationCheckpointingConfig()
        self.configured = False


_process = _Process()
# Whether a segment is running. Backward runs in threads of its own, and may run while another thread is in a forward.
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
    """Say what :func:`checkpoint` does from now on. What was said before is forgotten.

    Args:
        mpu_: None, or an object that says how many model-parallel ranks there are: one.
        deepspeed_config: whose block ``activation_checkpointing`` holds, but for what the other arguments say.
        partition_activations: without effect: one model-parallel rank has nobody to divide with.
        contiguous_checkpointing, num_checkpoints: without effect: torch's allocator reuses the memory of inputs.
        checkpoint_in_cpu: keep inputs in the host's page-locked memory. Where a CPU trains they are there already.
        synchronize: wait for the GPU where a segment begins and where it ends.
        profile: log how long each segment's forward and recomputation take.

    Raises:
        ConfigError, ValueError: it cannot be done.
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
    """Tell whether :func:`configure` was called."""
    return _process.configured


def reset() -> None:
    """Do nothing: there is no buffer to give up, as DeepSpeed's has."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose activations are not kept: backward calls it again, with the same random numbers.

    Args:
        function: a module, or any other that computes the same when it is called again.
        args: of it.
        kwargs: of it.

    Returns:
        What it returns.
    """
    inputs = (*args, *kwargs.values())
    # Not inside another one, in its forward and recomputation alike, or they would save different things: the outer
    # one's recomputation has the inner one's inputs at hand.
    if not _process.block.cpu_checkpointing or not torch.is_grad_enabled() or _inside.get():
        return torch_checkpoint(_Segment(function, tuple(kwargs)), *inputs, use_reentrant=False)
    # Parameters are somebody's to keep, and where their values are changes.
    held = {place: value for place, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
    others = [None if place in held else value for place, value in enumerate(inputs)]
    with _kept_on_host(others):
        return torch_checkpoint(_Segment(function, tuple(kwargs), held), *others, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """:func:`checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args, **kwargs)


class _Segment:
    """A function that is called in forward, and again in backward.

    Args:
        function: what is called.
        names: of its last inputs, which it takes by them.
        held: inputs that it is given in place of what comes, by their number.
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
        with _watched("recomputation" if again else "forward"):
            token = _inside.set(True)
            try:
                # By their names again: as positional arguments torch saves those that are tensors.
                return self._function(*inputs[:count], **dict(zip(self._names, inputs[count:], strict=True)))
            finally:
                _inside.reset(token)


def _kept_on_host(inputs: Iterable[object]) -> saved_tensors_hooks:
    """Hooks that keep the activations among a segment's inputs in page-locked host memory until backward.

    Masks and tables of positions, which require no gradients, stay: all segments often share them.
    """
    # The hooks see the inputs alone, as other objects on the same memory.
    activations = {
        value.data_ptr()
        for value in inputs
        if isinstance(value, Tensor) and value.requires_grad and not _lies_on_host(value)
    }

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        return _OnHost(tensor) if tensor.data_ptr() in activations else _Left(tensor)

    return saved_tensors_hooks(pack, lambda packed: packed())


def _lies_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class _OnHost:
    """An input's copy in the host's memory; a call copies it back."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        # Strides stay, since kernels choose their way by them, and another way may give other bits.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def __call__(self) -> Tensor:
        # Backward may run on another stream than forward did.
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        # A copy also on a CPU, since the caller may hold it for longer than this graph.
        return self._copy.to(self._device, non_blocking=True, copy=True)


class _Left:
    """An input that stays on its device; a call returns it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def __call__(self) -> Tensor:
        # As autograd does for tensors that it saves without hooks.
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of a checkpointed segment, shape {tuple(self._tensor.shape)}, was modified in place after "
                "its forward, so its recomputation would be another one; give checkpoint() a copy"
            )
        return self._tensor


@contextlib.contextmanager
def _watched(what: str) -> Iterator[None]:
    """Wait for the GPU at both ends, and log the time between them, where that is configured."""
    block = _process.block
    if not (block.synchronize_checkpoint_boundary or block.profile):
        yield
        return
    # Or the time would be that of whatever the GPU still had to do.
    _synchronize()
    start = time.perf_counter()
    try:
        yield
    finally:
        # Also when torch ends a recomputation, by an exception, as soon as it has what backward needs.
        _synchronize()
        if block.profile:
            _log.info("checkpointed segment: %s took %.3f ms", what, 1e3 * (time.perf_counter() - start))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
