"""The optimizer that ``initialize`` returns: a `ZeroOptimizer` with further attributes of DeepSpeed's optimizers.

To generate inside ``GatheredParameters``, some scripts remove DeepSpeed's hooks through ``optimizer.parameter_offload``
and install them again afterwards. zeropp's hooks do nothing inside ``GatheredParameters``, so they can stay, and the
methods of :class:`ParameterOffload` do nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.config import Config
from zeropp.engine.accumulation import GradAccumulation
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["CalledWindows", "ParameterOffload", "TrainingOptimizer"]


class _Coordinator:
    """Placeholder for DeepSpeed's ``param_coordinator``, which stores the order of gathers."""

    def is_invalid_trace(self) -> bool:
        """Return False: the stored order of gathers is valid."""
        return False

    def _invalidate_trace(self) -> None:
        """Do nothing. zeropp itself detects that a pass no longer follows the learned order."""


class ParameterOffload:
    """Placeholder for DeepSpeed's ``parameter_offload``, with the same names and without hooks.

    Attributes:
        module: the model.
        forward_hooks, backward_hooks: empty lists; scripts may assign them.
        param_coordinator: placeholder that reports a valid order of gathers.
    """

    def __init__(self, module: nn.Module) -> None:
        # Plain attributes and no properties, because scripts assign to them.
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Do nothing. Scripts call this method to install hooks again, and zeropp's hooks were never removed."""

    def _register_hooks_recursively(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Do nothing; this is the older name of :meth:`_register_deepspeed_module`."""

    def get_param_coordinator(self, training: bool = True) -> _Coordinator:
        """Return :attr:`param_coordinator`."""
        return self.param_coordinator


class LossScaler:
    """``optimizer.loss_scaler``: read-only view of the float16 loss scale under DeepSpeed's names."""

    def __init__(self, optimizer: TrainingOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def cur_scale(self) -> float:
        """Factor on the next loss; 1 unless fp16 is enabled."""
        return self._optimizer.loss_scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Number of optimizer steps with a dynamic loss scale, including skipped steps."""
        # A step is only counted once its step sync is read, which may not have happened for the last step.
        self._optimizer.step_result.wait_for_result()
        return self._optimizer.engine.loss_scale.iterations

    @property
    def dynamic(self) -> bool:
        """True if the loss scale is dynamic."""
        return self._optimizer.engine.loss_scale.dynamic

    @property
    def scale_window(self) -> int:
        """Configuration value ``fp16.loss_scale_window``."""
        return self._optimizer.config.loss_scaling.loss_scale_window

    @property
    def min_scale(self) -> float:
        """Configuration value ``fp16.min_loss_scale``."""
        return self._optimizer.config.loss_scaling.min_loss_scale


class CalledWindows(GradAccumulation):
    """Accumulation windows of DeepSpeed's engine, which count calls of ``engine.step()`` instead of micro-batches.

    The caller may also set the window ends itself, with ``engine.set_gradient_accumulation_boundary()``. Until the
    first call of ``engine.step()`` or of that method, the rule of :class:`ZeroOptimizer` holds: count micro-batches.

    Args:
        steps: micro-batches of a window, gradient_accumulation_steps.
        managed: False if every ``step()`` steps the optimizer.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        super().__init__(steps, managed=managed)
        self._counts_calls = False
        # Number of engine.step() calls in this window.
        self._calls = 0
        # Argument of the last set_gradient_accumulation_boundary() call; None before the first call.
        self._forced: bool | None = None

    @property
    def at_boundary(self) -> bool:
        """True if the next ``engine.step()`` steps the optimizer."""
        if self._forced is not None:
            return self._forced
        return not self.managed or self._calls + 1 >= self.steps

    @property
    def unfinished(self) -> bool:
        """True if the gradients are not yet the complete sum that the next optimizer step uses."""
        # After an engine.step() that only counted, at least one more backward adds to the gradients.
        return self.ignores_zero_grad or not self.at_boundary if self._counts_calls else super().unfinished

    @property
    def closing(self) -> bool:
        """True if the running or next backward is the last one before an optimizer step."""
        if self._counts_calls and (self.managed or self._forced is not None):
            return self.at_boundary
        return super().closing

    def note_engine_step(self) -> bool:
        """Return True if this ``engine.step()`` call steps the optimizer; otherwise count the call."""
        self._counts_calls = True
        if self.at_boundary:
            return True
        self._calls += 1
        self.ignore_step()
        return False

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether the following ``engine.step()`` calls step the optimizer."""
        self._forced = is_boundary
        self._counts_calls = True

    def warning(self) -> str | None:
        """Return a warning if the caller's ``optimizer.step()`` did nothing; None otherwise."""
        if self._counts_calls and self.ignores_zero_grad:
            return (
                "step() of the optimizer did nothing: engine.step() counts the micro-batches of a window here, and "
                "steps at its end; call that alone"
            )
        return super().warning()

    def resize(self, steps: int) -> None:
        """Change the number of micro-batches of a window. Every rank must make the same call.

        Args:
            steps: new number of micro-batches.

        Raises:
            RuntimeError: a window has begun, so its gradients are divided by the present number.
        """
        if self.count:
            raise RuntimeError(
                f"{self.count} of {self.steps} micro-batches have come since the last step; change their number after "
                "a step, or discard their gradients with zero_grad(now=True)"
            )
        self.steps = steps
        self._calls = 0

    def restart(self) -> None:
        """Start a new window. Called after an optimizer step, taken or skipped, and when gradients are discarded."""
        super().restart()
        self._calls = 0


class TrainingOptimizer(ZeroOptimizer):
    """A :class:`zeropp.ZeroOptimizer` with further attributes of DeepSpeed's optimizers.

    Attributes:
        parameter_offload: placeholder without hooks; see `zeropp.deepspeed.training_optimizer`.
        custom_loss_scaler: False, because zeropp scales the loss itself; scripts then use no scaler of their own.
    """

    config: Config
    custom_loss_scaler = False

    accumulation_type = CalledWindows

    def __init__(self, optimizer: Optimizer, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Wrap ``optimizer``; the arguments are those of :class:`zeropp.ZeroOptimizer`."""
        super().__init__(optimizer, model, *args, **kwargs)
        self.parameter_offload = ParameterOffload(model)

    # A new object for each access. A stored one would refer back to the optimizer, and this reference cycle would keep
    # the optimizer alive until the garbage collector runs.
    @property
    def loss_scaler(self) -> LossScaler:
        """Read-only view of the float16 loss scale."""
        return LossScaler(self)

    @property
    def cur_scale(self) -> float:
        """Older name of ``loss_scale``."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale is dynamic."""
        return self.loss_scaler.dynamic

    @property
    def clip_grad(self) -> float:
        """Largest norm of gradients after clipping; 0 for no clipping."""
        return self.config.gradient_clipping

    @property
    def _global_grad_norm(self) -> float | None:
        """Value of ``grad_norm``; Megatron-DeepSpeed reads this name."""
        return self.grad_norm

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's main weights: one 1-D shard for each trainable flat buffer. DeepSpeed has one per sub-group."""
        # A step on the host may still be writing to the shards.
        self.engine.wait_for_step()
        return [buffer.shard for buffer in self.engine.trainable_buffers]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """Value of :attr:`fp32_partitioned_groups_flat`; DeepSpeed's name in stages 1 and 2."""
        return self.fp32_partitioned_groups_flat

    def get_lr(self) -> Any:
        """Return the learning rate of the first parameter group."""
        return self.inner.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.inner.param_groups:
            group["lr"] = lr

    def refresh_fp32_params(self) -> None:
        """Do nothing. In zeropp loads and edits change main weights first, so they never need to be renewed."""

    def _get_norm_groups(self) -> list[Tensor]:
        """Return a list with one scalar: the norm of all gradients before clipping. Collective, before ``step()``.

        DeepSpeed returns one norm per parameter group, and callers combine the list into the total norm.
        """
        return [torch.tensor(math.hypot(*self.grad_norms().values()))]

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Do nothing. DeepSpeed puts main weights into the parameter groups here; in zeropp they are always there."""

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Do nothing. DeepSpeed removes main weights from the parameter groups here; in zeropp they stay."""
