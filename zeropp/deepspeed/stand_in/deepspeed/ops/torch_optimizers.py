"""torch's fused optimizers by the arguments of DeepSpeed's.

These classes make torch's objects in the place of their own: zeropp steps those on the host or on the device, wherever
it keeps their states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.deepspeed.json_optimizers import Lion, UncorrectedAdam

__all__ = ["Adagrad", "Adam", "Lion"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class Adam:
    """Adam, or AdamW with ``adamw_mode``: what is made is torch's."""

    def __new__(  # type: ignore[misc]  # torch's object is what is wanted
        cls,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool | None = None,
        fp32_optimizer_states: bool = True,
        *,
        adam_w_mode: bool = True,
        set_grad_none: bool = True,
    ) -> Optimizer:
        """Make one.

        Args:
            model_params: tensors, or groups.
            lr, betas, eps, weight_decay, amsgrad: as in torch; nothing decays by default.
            bias_correction: False takes averages as they are; what is made then is zeropp's.
            adamw_mode, adam_w_mode: two names for decay that is decoupled from gradients.
            fp32_optimizer_states: True alone.
            set_grad_none: without effect; gradients are always forgotten.

        Raises:
            ValueError: what torch's has not is asked for.
        """
        if not fp32_optimizer_states or (amsgrad and not bias_correction):
            raise ValueError(
                f"{cls.__name__} got fp32_optimizer_states {fp32_optimizer_states}, bias_correction {bias_correction} "
                f"and amsgrad {amsgrad}; zeropp has fp32_optimizer_states True alone, and amsgrad with bias_correction"
            )
        decoupled = bool(adam_w_mode if adamw_mode is None else adamw_mode)
        if not bias_correction:
            return UncorrectedAdam(model_params, lr, betas, eps, weight_decay, decoupled=decoupled)
        made = torch.optim.AdamW if decoupled else torch.optim.Adam
        return _fused(made(model_params, lr, betas, eps, weight_decay, amsgrad))


class Adagrad:
    """Adagrad: what is made is torch's."""

    def __new__(  # type: ignore[misc]  # torch's object is what is wanted
        cls,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """Make one. Arguments as in torch; ``amsgrad`` and ``fp32_optimizer_states`` are without effect."""
        return _fused(torch.optim.Adagrad(model_params, lr, eps=eps, weight_decay=weight_decay))


def _fused(optimizer: Optimizer) -> Optimizer:
    """By one pass over memory. Groups of another optimizer, which Accelerate gives here, may say otherwise."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=None)
    return optimizer
