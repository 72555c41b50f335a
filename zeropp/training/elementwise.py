"""Optimizers that torch does not have: Lion, and Adam without bias correction. They treat every element by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Lion", "UncorrectedAdam"]


def _check(name: str, betas: tuple[float, float], **others: float) -> None:
    """Refuse settings out of range; ``others`` are to be at least 0."""
    if min(others.values()) < 0 or not all(0 <= beta < 1 for beta in betas):
        given = ", ".join(f"{key} {value}" for key, value in others.items())
        *most, last = others
        raise ValueError(
            f"{name} got {given} and betas {betas}; expected {', '.join(most)} and {last} of at least 0, and betas "
            "from 0 to below 1"
        )


class Lion(Optimizer):
    """Steps each weight by the learning rate, up or down, by the sign of an average of gradients.

    Algorithm 2 of Chen et al., arXiv:2302.06675.

    Args:
        params: tensors, or groups.
        lr: of each step; a third to a tenth of AdamW's.
        betas: weights of the past in what is stepped by, and in what is kept.
        weight_decay: decoupled.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _check("Lion", betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See :meth:`torch.optim.Optimizer.step`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            stepping, keeping = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                # In place and element by element, so that the halves of a slice step as the whole does.
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = torch.lerp(parameter.grad, average, stepping).sign_()
                parameter.add_(direction * -group["lr"])
                # After the step: the sign is of the older average and this gradient.
                average.lerp_(parameter.grad, 1 - keeping)
        return loss


class UncorrectedAdam(Optimizer):
    """Adam whose averages are taken as they are, without the correction for their start at zero.

    Algorithm 1 of Kingma and Ba, arXiv:1412.6980, with m and v in place of their corrected values, as DeepSpeed's Adam
    with ``bias_correction`` false and BERT's recipes. The first step is (1 - beta1) / sqrt(1 - beta2) times as long.

    Args:
        params: tensors, or groups.
        lr: of each step.
        betas: weights of the past in the averages of gradients and of their squares.
        eps: added to the root of the second average.
        weight_decay: share of the weights that is taken off.
        decoupled: take it off the weights, as AdamW does; otherwise it is added to gradients.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        _check("Adam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See :meth:`torch.optim.Optimizer.step`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                if group["decoupled"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    # Not in place: the user may look at gradients after the step.
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                average, square = state["exp_avg"], state["exp_avg_sq"]
                average.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                parameter.addcdiv_(average, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss
