"""torch's fused optimizers with the arguments of DeepSpeed's optimizers.

Calling a class of this module returns an optimizer of ``torch.optim`` (or of zeropp), not an instance of the class.
zeropp steps such an optimizer on the host or on the device, wherever the optimizer's states are.
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
    """Adam, or AdamW with ``adamw_mode``. A call returns an optimizer of ``torch.optim`` or an `UncorrectedAdam`."""

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
        """Create the optimizer.

        Args:
            model_params: tensors, or parameter groups.
            lr, betas, eps, weight_decay, amsgrad: arguments of torch's Adam; the default is no weight decay.
            bias_correction: False to use the averages without bias correction (`UncorrectedAdam`).
            adamw_mode, adam_w_mode: two names of one flag: True for decoupled weight decay (AdamW).
            fp32_optimizer_states: must be True.
            set_grad_none: no effect; zeropp always sets gradients to None.

        Returns:
            A ``torch.optim.AdamW`` or ``torch.optim.Adam``, or an `UncorrectedAdam` without bias correction.

        Raises:
            ValueError: ``fp32_optimizer_states`` is False, or ``amsgrad`` is used without bias correction.
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
    """Adagrad. A call returns a ``torch.optim.Adagrad``."""

    def __new__(  # type: ignore[misc]  # torch's object is what is wanted
        cls,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Optimizer:
        """Create the optimizer. Arguments are torch's; ``amsgrad`` and ``fp32_optimizer_states`` have no effect."""
        return _fused(torch.optim.Adagrad(model_params, lr, eps=eps, weight_decay=weight_decay))


def _fused(optimizer: Optimizer) -> Optimizer:
    """Switch all parameter groups to torch's fused kernels, also groups that another optimizer configured otherwise."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=None)
    return optimizer
