"""The two halves of a parity test: training that is sharded over ranks, and plain training on the same global batch.

:class:`Pair` has both on every rank. :mod:`tests.support.parity` has the plain half in the parent process, where it
runs once for all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, share, worst

__all__ = ["Batch", "Half", "Loss", "Pair", "mean_square", "momentum", "rows"]

Batch = Callable[[int, int, int], Any]  # of a step, a micro-batch in it, and a rank
Loss = Callable[..., Tensor]  # of a model, a batch, and the rank's route if there is one


def rows(step: int, micro: int, rank: int) -> Tensor:
    """Inputs of a rank: others for each step, the same for each micro-batch in it."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def mean_square(model: nn.Module, x: Tensor, *route: object) -> Tensor:
    loss: Tensor = model(x, *route).square().mean()
    return loss


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay tell a parameter without gradient from one whose gradient is zero."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)


@dataclass
class Half:
    """A model and its optimizer, which train on the batches of some ranks.

    Attributes:
        ranks: this rank in the sharded half, all of them in the plain one.
        divisor: what a loss is divided by before its backward, so that gradients add up to the mean of a step.
        call: does that backward.
        steps: how many were taken.
        micro: micro-batches that the running step has had.
    """

    model: nn.Module
    optimizer: Any
    ranks: Sequence[int]
    batch: Batch = rows
    loss: Loss = mean_square
    divisor: float = 1
    call: Callable[[Tensor], object] = Tensor.backward
    steps: int = 0
    micro: int = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, *routes: object) -> list[float]:
        """Forward and backward of the next micro-batch; no route, one for all ranks, or one each. Returns losses."""
        losses = []
        for rank in self.ranks:
            route = routes[rank : rank + 1] if len(routes) > 1 else routes
            loss = self.loss(self.model, self.batch(self.steps, self.micro, rank), *route)
            self.call(loss if self.divisor == 1 else loss / self.divisor)
            losses.append(loss.item())
        self.micro += 1
        return losses

    def step(self) -> None:
        self.optimizer.step()
        self.advance()

    def advance(self) -> None:
        """On to the next step's batches, without a step of the optimizer."""
        self.steps, self.micro = self.steps + 1, 0

    def state(self) -> dict[str, Tensor]:
        """Whole main weights and buffers."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            return zeropp.full_state(self.model)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


class Pair:
    """A partitioned model on every rank, and beside it the same model, whole, that sees every rank's batch.

    Args:
        optimizer: makes that of either model.
        batch: floating-point inputs, which are brought to the device and dtype.
        micros: micro-batches of a step, over which ``optimizer.backward`` takes the mean; without it, backward is
            called on losses as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, object],
        *,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
        batch: Batch = rows,
        loss: Loss = mean_square,
        micros: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model = model.to(device, dtype)
        share(self.model)
        self.plain = copy.deepcopy(self.model)
        self.optimizer = zeropp.ZeroOptimizer(optimizer(self.model), self.model, config)
        self.plain_optimizer = optimizer(self.plain)

        def moved(step: int, micro: int, rank: int) -> Tensor:
            return batch(step, micro, rank).to(device, dtype)

        self.sharded = Half(self.model, self.optimizer, [self.rank], moved, loss)
        if micros is not None:
            self.sharded.call = self.optimizer.backward
        every = range(self.world)
        self.whole = Half(self.plain, self.plain_optimizer, every, moved, loss, self.world * (micros or 1))

    @property
    def halves(self) -> tuple[Half, Half]:
        return self.sharded, self.whole

    @property
    def engine(self) -> object:
        return self.optimizer.engine

    def batch(self, rank: int) -> Tensor:
        """The input of a rank at the running step."""
        return self.sharded.batch(self.sharded.steps, self.sharded.micro, rank)

    def zero_grad(self) -> None:
        for half in self.halves:
            half.zero_grad()

    def backward(self, *routes: object) -> float:
        """Forward and backward of both; one route for all ranks, or one each. Returns this rank's loss."""
        self.whole.backward(*routes)
        return self.sharded.backward(*routes)[0]

    def step(self) -> None:
        for half in self.halves:
            half.step()

    def advance(self) -> None:
        for half in self.halves:
            half.advance()

    def train(self, *routes: object) -> None:
        """One whole step."""
        self.zero_grad()
        self.backward(*routes)
        self.step()

    def difference(self) -> float:
        """Largest difference between the partitioned weights and the plain ones."""
        return worst(self.sharded.state(), self.whole.state())

    def check(self, bound: float = 1e-12) -> None:
        found = self.difference()
        assert found <= bound, f"weights differ by {found} after {self.sharded.steps} steps"
