"""A context in which ``import deepspeed`` imports zeropp's stand-in, and a model with a DeepSpeed training loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.deepspeed.refused_modules import RefusingFinder
from zeropp.deepspeed.stand_in_path import STAND_IN

__all__ = [
    "ADAMW",
    "EPSILON",
    "LR",
    "Net",
    "data",
    "distance",
    "engine_of",
    "loss_of",
    "plain",
    "standing_in",
    "steps",
    "zero3",
]

LR = 0.05
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
EPSILON = 1e-12  # float64; only the order of additions differs


@contextlib.contextmanager
def standing_in() -> Iterator[ModuleType]:
    """Make ``import deepspeed`` find the stand-in inside the block, and yield the imported module.

    The block puts the stand-in on ``sys.path`` itself. ``install`` must run before libraries such as transformers are
    imported, and the test process may have imported them already.
    """
    sys.path.insert(0, STAND_IN)
    try:
        import deepspeed

        yield deepspeed
    finally:
        sys.path.remove(STAND_IN)
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, RefusingFinder)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]


class Net(nn.Module):
    """An embedding, blocks in a list, and a head, in float64 so that only the order of additions changes results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 12)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def zero3(**more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zeropp": {"unit_min_blocks": 0, "hang_timeout": 20},
        **more,
    }


def engine_of(deepspeed: Any, **more: Any) -> Any:
    """Return an engine that trains a :class:`Net` with AdamW; ``more`` adds keys to the configuration."""
    return deepspeed.initialize(model=Net(), config=zero3(optimizer=ADAMW, **more))[0]


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the token ids and the targets of a batch, each [2, 5]."""
    drawn = torch.randint(12, (2, 2, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return drawn[0], drawn[1]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    ids, targets = data(step, rank)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def steps(engine: Any, first: int, last: int) -> None:
    """Train steps ``first`` to ``last - 1`` on this rank's batches."""
    for step in range(first, last):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()


def plain(last: int, world: int = 2, model: nn.Module | None = None) -> nn.Module:
    """Train ``last`` steps in one process with AdamW on the batches of all ranks, and return the model."""
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(last):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, step, rank) / world).backward()
        optimizer.step()
    return model


def distance(found: dict[str, Tensor], wanted: nn.Module) -> float:
    """Return the largest difference of any weight. The names must be equal."""
    known = wanted.state_dict()
    assert found.keys() == known.keys()
    return max(float((found[name].double() - value).abs().max()) for name, value in known.items())
