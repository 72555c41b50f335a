"""A small model that trains, for tests of ``offload_states``, and enums with the member names of DeepSpeed's enums."""

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
    """An enum with the names of DeepSpeed's OffloadStateTypeEnum, as a caller may pass it."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class Place(str, Enum):
    """An enum with the names of DeepSpeed's OffloadDeviceEnum, as a caller may pass it."""

    cpu = "cpu"
    nvme = "nvme"


def rows(step: int = 0) -> Tensor:
    """Return this rank's inputs of one step, [3, WIDTH]."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5 + 10 * step + rank))


def made(**settings: Any) -> tuple[nn.Module, Any]:
    """Return a model and the ZeroOptimizer around it."""
    torch.manual_seed(3)
    model = Routed(3)
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config(**settings))


def train(model: nn.Module, optimizer: Any, *steps: int) -> None:
    """Train the steps with these numbers. The gradients of the last step stay."""
    for step in steps:
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()


def told(call: Callable[[], object]) -> str:
    """Return the type and the message of the error that a call raises; "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
