"""Activation checkpointing by DeepSpeed's calls: segments keep their inputs alone, and are run again in backward.

It is torch's non-reentrant checkpoint. What is configured here says where inputs lie meanwhile, and what is measured.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeropp.config import ConfigSource, load_config
from zeropp.config.runtime import ActivationCheckpointingConfig
from zeropp.training.distributed import require_no_model_parallelism
from zeropp.training.kept_inputs import InputStore
from zeropp.training.random_tracker import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

_log = logging.getLogger("zeropp")


class _Process:
    """The settings that this process has configured.

    Attributes:
        block: as :func:`configure` was told; the defaults before.
        store: that moves inputs; None where they stay.
        configured: whether it was told anything.
    """

    def __init__(self) -> None:
        self.block = ActivationCheckpointingConfig()
        self.store: InputStore | None = None
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
        contiguous_checkpointing: keep inputs in one buffer, which is made at the first segment.
        num_checkpoints: segments of a forward, whose inputs that buffer has room for.
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
    block = ActivationCheckpointingConfig.model_validate({**block.model_dump(), **said})
    contiguous = block.contiguous_memory_optimization
    # Before anything is kept of it: what was configured before goes on then.
    if contiguous and block.number_checkpoints is None:
        raise ValueError(
            "contiguous_checkpointing needs num_checkpoints, the number of checkpointed segments in a forward, to know "
            "how large its buffer is; give it, or number_checkpoints in the configuration"
        )
    moves = contiguous or block.cpu_checkpointing
    segments = block.number_checkpoints if contiguous else None
    # A new one each time; graphs of before keep what they hold in the old one.
    _process.store = InputStore(on_host=block.cpu_checkpointing, segments=segments) if moves else None
    _process.block, _process.configured = block, True


def is_configured() -> bool:
    """Tell whether :func:`configure` was called."""
    return _process.configured


def reset() -> None:
    """Give up the buffer of ``contiguous_checkpointing``; the next segment makes another one."""
    if _process.store is not None:
        _process.store.reset()


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
    if _process.store is None or not torch.is_grad_enabled() or _inside.get():
        return torch_checkpoint(_Segment(function, tuple(kwargs)), *inputs, use_reentrant=False)
    # Parameters are somebody's to keep, and where their values are changes.
    held = {place: value for place, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
    others = [None if place in held else value for place, value in enumerate(inputs)]
    with _process.store.hooks(others):
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
        self._function, self._names, self._held = function, names, held or {}
        self._states: Mapping[str, Tensor] | None = None

    def __call__(self, *given: Any) -> Any:
        inputs = [self._held.get(place, value) for place, value in enumerate(given)]
        count = len(inputs) - len(self._names)
        with self._drawing_alike() as again, _watched("recomputation" if again else "forward"):
            token = _inside.set(True)
            try:
                # By their names again: as positional arguments torch saves those that are tensors.
                return self._function(*inputs[:count], **dict(zip(self._names, inputs[count:], strict=True)))
            finally:
                _inside.reset(token)

    @contextlib.contextmanager
    def _drawing_alike(self) -> Iterator[bool]:
        """Let named sequences go on as they did in forward; torch does it for the default one. Gives whether it did."""
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        if self._states is None:
            self._states = now
            yield False
            return
        tracker.set_states(self._states)
        try:
            yield True
        finally:
            tracker.set_states(now)


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
