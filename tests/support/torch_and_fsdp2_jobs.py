"""Training jobs of plain torch and FSDP2 whose checkpoints the tests of ``load_foreign`` read."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

from tests.support.checkpoint_training import make_optimizer
from tests.support.quantized_model import Model, tokens

__all__ = ["FLAT", "Other", "Shardable", "fsdp2_saves", "other", "plain", "sharded", "train_fsdp2", "train_plain"]

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    optimizer = make_optimizer(model)
    train_plain(model, optimizer, range(4))
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 1e-3 * (number + 1)
    return model, optimizer


class Other(nn.Module):
    """A model with frozen weights, tied weights and a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 7)
        self.last = nn.Linear(7, 5)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.frozen(self.first(x)))
        return out.square().mean()


def other() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Other()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(torch.ones(2, 7)).backward()
    optimizer.step()
    return model, optimizer


class Shardable(Model):
    """The model with its scalar as a vector of one, because FSDP2 refuses scalars, and a contiguous convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(self.scale.detach().reshape(1))
        self.conv.to(memory_format=torch.contiguous_format)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).sum()


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Shardable()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, make_optimizer(model)


def train_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp2_saves(path: Path) -> list[float]:
    model, optimizer = sharded()
    train_fsdp2(model, optimizer, range(4))
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    return train_fsdp2(model, optimizer, range(4, 8))
