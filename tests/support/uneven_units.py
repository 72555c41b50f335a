"""A model whose trainable units all have different sizes."""

from __future__ import annotations

from torch import Tensor, nn

from tests.support.branching_models import Block

__all__ = ["Uneven"]


class Uneven(nn.Module):
    """Blocks of widths 12, 24 and 40, so that no two of them have the same number of bytes, and a frozen layer."""

    widths = (12, 24, 40)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in self.widths)
        self.frozen = nn.Linear(40, 40, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block, width in zip(self.blocks, self.widths, strict=True):
            x = block(nn.functional.pad(x, (0, width - x.shape[-1])))
        return self.frozen(x)
