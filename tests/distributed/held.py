"""A small wrapped model whose values are elsewhere, and what comes of an attempt to use them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.shapes import make_config, worst

__all__ = ["PERSIST", "REMEDY", "Held", "Use", "attempt", "managed", "still_trains"]

REMEDY = ("state_dict", "full_state", "before wrapping", "optimizer.clip_grad_norm_", "optimizer.zero_grad")


class Held(nn.Module):
    """A partitioned part and, at the usual threshold, a persistent one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


Use = Callable[[nn.Parameter], object]


def attempt(name: str, use: Callable[[], object]) -> str:
    """What came of it: "" for a RuntimeError that names a remedy, else a description."""
    print(f"trying {name}", file=sys.stderr, flush=True)  # the harness quotes it if this rank dies
    try:
        got = use()
    except RuntimeError as error:
        named = any(remedy in str(error) for remedy in REMEDY)
        return "" if named else f"{name}: RuntimeError without a remedy: {str(error)[:200]}"
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    return f"{name}: gave {type(got).__name__}"


def managed(persist: int) -> tuple[nn.Module, zeropp.ZeroOptimizer, nn.Module]:
    torch.manual_seed(5)
    model = Held()
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(persist=persist, hang_timeout=10)
    )
    optimizer.engine.refresh.wait()
    return model, optimizer, plain


def still_trains(model: nn.Module, optimizer: zeropp.ZeroOptimizer, plain: nn.Module) -> float:
    """One step, and the largest difference from the same step of the plain model."""
    model.train()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for batch in batches:
        (plain(batch).square().mean() / world).backward()
    plain_optimizer.step()
    optimizer.zero_grad()
    model(batches[rank]).square().mean().backward()
    optimizer.step()
    return worst(zeropp.full_state(model), plain.state_dict())


PERSIST = {"partitioned": 0, "persistent": 1000}
