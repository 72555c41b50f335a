"""A model with every kind of parameter that buffer layouts distinguish, and settings that quantize both directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.branching_models import Block

__all__ = ["CODED", "Mixed"]

CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


class Mixed(nn.Module):
    """Trainable and frozen weights, two dtypes, odd shapes, channels_last, a tied weight, integers and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32, freeze: bool = True, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.emb = nn.Embedding(37, 24, dtype=dtype)
            self.blocks = nn.ModuleList(Block(24).to(dtype) for _ in range(3))
            self.norm = nn.LayerNorm(24, dtype=dtype)
            self.conv = nn.Conv2d(3, 5, 3, dtype=dtype).to(memory_format=torch.channels_last)
            self.other = nn.Linear(24, 7, dtype=torch.float64 if dtype == torch.float32 else torch.float32)
            self.head = nn.Linear(24, 37, bias=False, dtype=dtype)
            self.head.weight = self.emb.weight
            self.register_buffer("seen", torch.zeros(3))
            self.codes = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
        if freeze:
            self.blocks[1].requires_grad_(False)
            self.norm.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x).sum() + self.other(x.to(self.other.weight.dtype)).sum() + self.conv.weight.sum()
