"""The second result of ``initialize``: a `ZeroOptimizer` that answers what scripts ask DeepSpeed's optimizers.

Some scripts take DeepSpeed's hooks off a model through ``optimizer.parameter_offload``, and put them back, to
generate inside ``GatheredParameters``. zeropp's hooks do nothing there, so all calls of :class:`ParameterOffload`
are harmless.
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
    """``param_coordinator``: an order of gathers that is known, and nothing to forget."""

    def is_invalid_trace(self) -> bool:
        """False: what is known of the order holds."""
        return False

    def _invalidate_trace(self) -> None:
        """Nothing: whoever parts from a known order is noticed."""


class ParameterOffload:
    """Has the names of DeepSpeed's, and no hooks.

    Attributes:
        module: the model.
        forward_hooks, backward_hooks: empty lists, which may be assigned.
        param_coordinator: says that its order is known.
    """

    def __init__(self, module: nn.Module) -> None:
        # Assigned by those scripts, too, and so no properties.
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing: hooks have never been away."""

    def _register_hooks_recursively(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing, as :meth:`_register_deepspeed_module`, by its older name."""

    def get_param_coordinator(self, training: bool = True) -> _Coordinator:
        """:attr:`param_coordinator`."""
        return self.param_coordinator


class LossScaler:
    """``optimizer.loss_scaler``: where the loss scale of float16 is, by DeepSpeed's names; to read."""

    def __init__(self, optimizer: TrainingOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def cur_scale(self) -> float:
        """The factor that the next loss gets; 1 but in float16."""
        return self._optimizer.loss_scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps that a dynamic scale has seen, skipped ones included."""
        # The last step may not be decided yet, and then it is not counted.
        self._optimizer.step_result.wait_for_result()
        return self._optimizer.engine.loss_scale.iterations

    @property
    def dynamic(self) -> bool:
        """True if the loss scale is dynamic."""
        return self._optimizer.engine.loss_scale.dynamic

    @property
    def scale_window(self) -> int:
        """The configuration's ``fp16.loss_scale_window``."""
        return self._optimizer.config.loss_scaling.loss_scale_window

    @property
    def min_scale(self) -> float:
        """The configuration's ``fp16.min_loss_scale``."""
        return self._optimizer.config.loss_scaling.min_loss_scale


class CalledWindows(GradAccumulation):
    """Windows of DeepSpeed's engine: it counts calls of its ``step()``, or its caller says where a window ends.

    Until the engine's ``step()`` is called for the first time, and where every step acts, the rule of
    :class:`ZeroOptimizer` holds.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        super().__init__(steps, managed=managed)
        self._counts_calls = False
        # Calls of the engine's step() in this window.
        self._calls = 0
        # The last word of set_gradient_accumulation_boundary().
        self._forced: bool | None = None

    @property
    def at_boundary(self) -> bool:
        """True if the engine's next ``step()`` ends the window."""
        if self._forced is not None:
            return self._forced
        return not self.managed or self._calls + 1 >= self.steps

    @property
    def unfinished(self) -> bool:
        """True if gradients are not those that the engine's next optimizer step takes."""
        # Between a step() and the backward that follows, more is to come.
        return self.ignores_zero_grad or not self.at_boundary if self._counts_calls else super().unfinished

    @property
    def closing(self) -> bool:
        """True if the running or next backward is the last before an optimizer step."""
        if self._counts_calls and (self.managed or self._forced is not None):
            return self.at_boundary
        return super().closing

    def note_engine_step(self) -> bool:
        """Tell whether a call of the engine's ``step()`` ends the window; one that does not is counted."""
        self._counts_calls = True
        if self.at_boundary:
            return True
        self._calls += 1
        self.ignore_step()
        return False

    def set_boundary(self, is_boundary: bool) -> None:
        """Let the engine's ``step()`` end the window or not, from here on, as its caller says."""
        self._forced = is_boundary
        self._counts_calls = True

    def warning(self) -> str | None:
        """A warning for the caller of the optimizer's own ``step()``, where it did nothing; else None."""
        if self._counts_calls and self.ignores_zero_grad:
            return (
                "step() of the optimizer did nothing: engine.step() counts the micro-batches of a window here, and "
                "steps at its end; call that alone"
            )
        return super().warning()

    def resize(self, steps: int) -> None:
        """Let windows have another number of micro-batches from here on; every rank decides alike.

        Raises:
            RuntimeError: in the middle of a window, whose gradients were divided by the older number.
        """
        if self.count:
            raise RuntimeError(
                f"{self.count} of {self.steps} micro-batches have come since the last step; change their number after "
                "a step, or discard their gradients with zero_grad(now=True)"
            )
        self.steps = steps
        self._calls = 0

    def restart(self) -> None:
        """A step was taken or skipped, or gradients were discarded."""
        super().restart()
        self._calls = 0


class TrainingOptimizer(ZeroOptimizer):
    """As :class:`zeropp.ZeroOptimizer`, with more names.

    Attributes:
        parameter_offload: has no hooks to take off; see `zeropp.deepspeed.training_optimizer`.
        loss_scaler: where the loss scale is.
        custom_loss_scaler: False: GradScaler and the like are left out, since float16 is scaled here.
    """

    config: Config
    custom_loss_scaler = False

    accumulation_type = CalledWindows

    def __init__(self, optimizer: Optimizer, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """As for :class:`zeropp.ZeroOptimizer`."""
        super().__init__(optimizer, model, *args, **kwargs)
        self.parameter_offload = ParameterOffload(model)

    # Made when it is asked for: it refers to this, which must go when nothing else does.
    @property
    def loss_scaler(self) -> LossScaler:
        return LossScaler(self)

    @property
    def cur_scale(self) -> float:
        """``loss_scale``, by an older name."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale is dynamic."""
        return self.loss_scaler.dynamic

    @property
    def clip_grad(self) -> float:
        """The norm that gradients are clipped to; 0 for none."""
        return self.config.gradient_clipping

    @property
    def _global_grad_norm(self) -> float | None:
        """``grad_norm``, by the name that Megatron-DeepSpeed reads."""
        return self.grad_norm

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's main weights, flat: a view for each unit's buffer, where DeepSpeed has one for each sub-group."""
        # The host may be stepping them.
        self.engine.wait_for_step()
        return [buffer.shard for buffer in self.engine.trainable_buffers]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The same, as the optimizer of stages 1 and 2 calls it."""
        return self.fp32_partitioned_groups_flat

    def get_lr(self) -> Any:
        """The first group's learning rate."""
        return self.inner.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Give every group this learning rate."""
        for group in self.inner.param_groups:
            group["lr"] = lr

    def refresh_fp32_params(self) -> None:
        """Nothing: what is loaded or edited goes to main weights first, and weights follow them."""

    def _get_norm_groups(self) -> list[Tensor]:
        """Norms whose own norm is that of all gradients, before clipping; here one. Collective, before ``step()``."""
        return [torch.tensor(math.hypot(*self.grad_norms().values()))]

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Nothing: groups of the wrapped optimizer always have the main weights. DeepSpeed's have them between this and
        :meth:`_clear_fp32_optimizer_param_groups`.
        """

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Nothing, as :meth:`_set_fp32_optimizer_param_groups`."""
