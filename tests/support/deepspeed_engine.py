"""A small model in a DeepSpeed-style training engine, with batches, losses and learning rates for a plain twin."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.branching_models import WIDTH, Routed, apart
from zeropp.training import Engine

__all__ = ["MICRO", "RATES", "STEPS", "WARMUP", "batch", "loss_of", "model_of", "settings", "train"]

STEPS, MICRO = 5, 2
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 3, "warmup_type": "linear"}
RATES = [0.0, 0.0, 0.1 / 3, 0.2 / 3, 0.1]


def settings(**more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "gradient_clipping": 1.0,
        "zeropp": {"unit_min_blocks": 0, "hang_timeout": 20},
        **more,
    }


def batch(number: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, WIDTH, generator=seed, dtype=torch.float64)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Routed(3).double()


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    loss: Tensor = model(batch(number, rank)).square().mean()
    return loss


def train(engine: Engine, first: int, last: int) -> tuple[list[float], list[float]]:
    """Train steps ``first`` to ``last - 1``; return the loss of each micro-batch and the learning rate of each step."""
    losses, rates = [], []
    for number in range(first * MICRO, last * MICRO):
        loss = loss_of(engine, number, dist.get_rank())
        rates += [engine.get_lr()[0]] * engine.is_gradient_accumulation_boundary()
        returned = engine.backward(loss)
        assert apart(returned, loss / MICRO) == 0
        engine.step()
        losses.append(loss.item())
    return losses, rates
