"""A model of unusual shapes, the values of its weights after quantization, and error bounds of quantized gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zeropp
import zeropp_kernels as kernels

__all__ = ["GRADIENTS", "WEIGHTS", "Model", "bound", "decoded", "tokens", "wrapped"]

WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}


class Model(nn.Module):
    """Matrices, vectors, a scalar, a convolution in channels_last, a table with unused rows, and odd sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(11, 37)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(37, 37), nn.LayerNorm(37)) for _ in range(3))
        self.conv = nn.Conv2d(1, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(37, 300)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        picture = self.conv(x.reshape(-1, 1, 37, 1).expand(-1, 1, 37, 5))
        return self.head(x).square().mean() + self.scale * picture.square().mean()


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def wrapped(config: dict[str, object], lr: float, dtype: torch.dtype = torch.float32) -> Any:
    model = Model(dtype)
    return model, zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, config)


def decoded(value: Tensor, bits: int = 8) -> Tensor:
    """Return a weight after encoding and decoding, a function of this weight only."""
    flat = value.detach().reshape(-1).float()
    message = torch.empty(kernels.message_layout(flat.numel(), bits).nbytes, dtype=torch.uint8)
    kernels.quantize_(flat, message, bits=bits)
    out = torch.empty_like(flat)
    kernels.dequantize_(message, out, bits=bits)
    return out.reshape(value.shape)


def bound(plain: list[dict[str, Tensor]], name: str, local: int, bits: tuple[int, int]) -> float:
    """Return the largest error of an element of the mean gradient.

    The bound is half a quantization step of each message that contributes to the element, summed over the messages and
    divided by the number of ranks. The maximum of a group is at most the maximum of the parameter. Scales in bf16 are
    rounded up by up to 2^-7 of their value. With two hops, the error of the first hop also enlarges the groups of the
    partial sums that the second hop encodes.

    Args:
        plain: gradients of every rank, by parameter name.
        name: the parameter.
        local: ranks per node. With 1 or all ranks, there is one hop, which uses ``bits[1]``.
        bits: bits per element on the first and the second hop; 0 means an exact message.
    """
    world = len(plain)
    steps = {8: 127, 4: 7}
    first, second = (0.5 * (1 + 2**-7) / steps[b] if b else 0.0 for b in bits)
    values = [each[name] for each in plain]
    if local in (1, world):
        return sum(float(v.abs().max()) for v in values) * second / world
    total = 0.0
    for start in range(0, world, local):
        members = values[start : start + local]
        error = sum(float(v.abs().max()) for v in members) * first
        partial = torch.stack(members).sum(0).abs().max()
        total += error + (float(partial) + error) * second
    return total / world
