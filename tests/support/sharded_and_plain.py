"""The two halves of a parity test: sharded training on ranks, and plain training on the batches of all ranks.

A :class:`Pair` runs both halves on every rank. With :mod:`tests.support.parity`, the plain half runs once in the parent
process.
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

Batch = Callable[[int, int, int], Any]  # (step, micro-batch of the step, rank) -> a batch
Loss = Callable[..., Tensor]  # (model, batch, route if there is one) -> loss


def rows(step: int, micro: int, rank: int) -> Tensor:
    """Return the inputs of a rank, [3, WIDTH], different for each step and equal for each micro-batch of a step."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def mean_square(model: nn.Module, x: Tensor, *route: object) -> Tensor:
    loss: Tensor = model(x, *route).square().mean()
    return loss


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and weight decay, which also move a parameter whose gradient is zero.

    So a missing gradient, which moves nothing, gives other weights than a gradient of zero.
    """
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)


@dataclass
class Half:
    """A model and its optimizer, trained on the batches of some ranks.

    Attributes:
        ranks: the ranks whose batches are used: this rank in the sharded half, all ranks in the plain half.
        batch: makes a batch.
        loss: computes the loss of a batch.
        divisor: divisor of each loss before backward, so that the gradients of a step add up to the mean.
        call: runs backward on a loss.
        steps: number of finished steps.
        micro: number of micro-batches of the current step so far.
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
        """Run forward and backward of the next micro-batch on each of ``ranks``, and return the losses.

        Args:
            routes: nothing, one route for all ranks, or one route per rank.
        """
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
        """Go to the batches of the next step without an optimizer step."""
        self.steps, self.micro = self.steps + 1, 0

    def state(self) -> dict[str, Tensor]:
        """Return the full main weights and buffers by name."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            return zeropp.full_state(self.model)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


class Pair:
    """A partitioned model on every rank, and beside it a whole copy that trains on the batches of all ranks.

    Args:
        model: the model, which is moved to ``device`` and ``dtype``.
        config: the configuration of ZeroOptimizer.
        optimizer: makes the optimizer of either model.
        batch: makes floating-point inputs, which are moved to ``device`` and ``dtype``.
        loss: computes the loss of a batch.
        micros: micro-batches per step, of which ``optimizer.backward`` takes the mean. None: ``loss.backward()`` is
            called on undivided losses.
        dtype: dtype of the models and the inputs.
        device: device of the models and the inputs.
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
        """Return the input of a rank at the current step."""
        return self.sharded.batch(self.sharded.steps, self.sharded.micro, rank)

    def zero_grad(self) -> None:
        for half in self.halves:
            half.zero_grad()

    def backward(self, *routes: object) -> float:
        """Run forward and backward of both halves, and return this rank's loss.

        Args:
            routes: nothing, one route for all ranks, or one route per rank.
        """
        self.whole.backward(*routes)
        return self.sharded.backward(*routes)[0]

    def step(self) -> None:
        for half in self.halves:
            half.step()

    def advance(self) -> None:
        for half in self.halves:
            half.advance()

    def train(self, *routes: object) -> None:
        """Train one step of both halves."""
        self.zero_grad()
        self.backward(*routes)
        self.step()

    def difference(self) -> float:
        """Return the largest difference between the partitioned weights and the plain weights."""
        return worst(self.sharded.state(), self.whole.state())

    def check(self, bound: float = 1e-12) -> None:
        found = self.difference()
        assert found <= bound, f"weights differ by {found} after {self.sharded.steps} steps"
