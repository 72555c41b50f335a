"""A small wrapped model whose parameters are resharded, and the result of an attempt to use them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.branching_models import make_config
from tests.support.sharded_and_plain import Pair

__all__ = ["PERSIST", "REMEDY", "Held", "Use", "attempt", "held", "still_trains"]

REMEDY = ("state_dict", "full_state", "before wrapping", "optimizer.clip_grad_norm_", "optimizer.zero_grad")


class Held(nn.Module):
    """Two layers. With a persistence threshold of 1000 elements both are persistent; with 0 both are partitioned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


Use = Callable[[nn.Parameter], object]


def attempt(name: str, use: Callable[[], object]) -> str:
    """Return "" if ``use`` raises a RuntimeError that names a remedy, else a description of the result."""
    print(f"trying {name}", file=sys.stderr, flush=True)  # the rank pool quotes it if this rank dies
    try:
        got = use()
    except RuntimeError as error:
        named = any(remedy in str(error) for remedy in REMEDY)
        return "" if named else f"{name}: RuntimeError without a remedy: {str(error)[:200]}"
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    return f"{name}: gave {type(got).__name__}"


def held(persist: int) -> Pair:
    """Return the model and its plain twin. The first refresh is finished, so persistent weights are present."""
    torch.manual_seed(5)
    pair = Pair(Held(), make_config(persist=persist, hang_timeout=10), dtype=torch.float32)
    pair.optimizer.engine.wait_for_refresh()
    return pair


def still_trains(pair: Pair) -> float:
    """Train one step, and return the largest difference from the weights of the plain model."""
    pair.model.train()
    pair.train()
    return pair.difference()


PERSIST = {"partitioned": 0, "persistent": 1000}
