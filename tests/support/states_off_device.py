"""A small model that trains, for tests in which its states are off the device; names as other programs give them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Routed, make_config

__all__ = ["BF16", "Place", "StateType", "made", "rows", "told", "train"]

BF16 = {"bf16": {"enabled": True}}


class StateType(Enum):
    """As DeepSpeed's, which callers have imported."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class Place(str, Enum):
    """As DeepSpeed's."""

    cpu = "cpu"
    nvme = "nvme"


def rows(step: int = 0) -> Tensor:
    """A rank's inputs of a step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5 + 10 * step + rank))


def made(**settings: Any) -> tuple[nn.Module, Any]:
    """A model, and the optimizer around it."""
    torch.manual_seed(3)
    model = Routed(3)
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config(**settings))


def train(model: nn.Module, optimizer: Any, *steps: int) -> None:
    """Steps of these numbers; the last one's gradients stay."""
    for step in steps:
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()


def told(call: Callable[[], object]) -> str:
    """The error of a call; "" if it has none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
