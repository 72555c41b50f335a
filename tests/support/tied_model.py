"""A model with tied weights, and a comparison of state dicts with a plain model's by names, values and storages."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CONFIGS", "Tied", "differences"]


class Tied(nn.Module):
    """A head tied to its embedding, a block registered under two names, a tied integer parameter and a tied buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(50, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.again = self.block
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)
        self.head.register_parameter("count", self.count)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.head.register_buffer("mask", self.mask)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.head(self.again(self.block(self.embed(tokens)))).square().mean()
        return loss


CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2 bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage 3, units": {"zero_optimization": {"stage": 3}, "zeropp": {"unit_min_blocks": 0}},
}


def names_by_storage(state: dict[str, Tensor]) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for name, value in state.items():
        found.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return list(found.values())


def nbytes(state: dict[str, Tensor]) -> int:
    file = io.BytesIO()
    torch.save(dict(state), file)  # of a plain dict: a state dict of torch also has metadata
    return file.getbuffer().nbytes


def differences(found: dict[str, Tensor], wanted: nn.Module, about: str) -> list[str]:
    """Return descriptions of the ways in which a state dict differs from that of a plain model in the same dtypes."""
    plain = wanted.state_dict()
    wrong = []
    if list(found) != list(plain) or any(not torch.equal(found[name], plain[name]) for name in plain):
        wrong.append(f"{about}: names or values")
    if names_by_storage(found) != names_by_storage(plain):
        wrong.append(f"{about}: {names_by_storage(found)}")
    if nbytes(found) > nbytes(plain):
        wrong.append(f"{about}: {nbytes(found)} bytes, and {nbytes(plain)} of a plain model")
    return wrong
