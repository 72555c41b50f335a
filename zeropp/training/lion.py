"""Lion, which torch has not: the sign of an average of gradients (Chen et al., arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Lion"]


class Lion(Optimizer):
    """Steps each weight by the learning rate, up or down. Element by element, so that slices can be stepped.

    Args:
        params: tensors, or groups.
        lr: of each step; a third to a tenth of AdamW's.
        betas: weights of the past in what is stepped by, and in what is kept.
        weight_decay: decoupled.

    Raises:
        ValueError: a number that is no use.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion got lr {lr}, betas {betas} and weight_decay {weight_decay}; expected lr and weight_decay of at "
                "least 0, and betas from 0 to below 1"
            )
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
