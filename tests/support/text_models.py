"""Small text models that differ in the nesting, sharing, tying and recomputation of blocks, and their token batches.

Sizes are odd, so that parameters end inside codec blocks and shards end inside parameters.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "LENGTH", "ROWS", "VOCABULARY", "Attention", "Block", "Nested", "Repeated", "TiedSegments", "tokens"]

VOCABULARY = 37
LENGTH = 5
ROWS = 3


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 53), nn.Linear(53, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with a tied embedding.

    Args:
        tie: "parameter" registers one parameter in both modules; "use" reads the embedding's weight in the root's
            forward.
        recompute: the checkpointed part: None, "block", "segment" (two runs of blocks), or "model" (no checkpoint
            inside; the caller checkpoints the model).
        reentrant: ``use_reentrant`` of the checkpoints.
    """

    def __init__(
        self,
        width: int = 25,
        depth: int = 3,
        *,
        tie: str = "parameter",
        recompute: str | None = None,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.tie, self.recompute, self.reentrant = tie, recompute, reentrant
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        if tie == "parameter":
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        if self.recompute == "block":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.recompute == "segment":
            x = checkpoint(partial(self._run, 0, 2), x, use_reentrant=self.reentrant)
            x = checkpoint(partial(self._run, 2, len(self.blocks)), x, use_reentrant=self.reentrant)
        else:
            x = self._run(0, len(self.blocks), x)
        x = self.norm(x)
        return self.head(x) if self.tie == "parameter" else F.linear(x, self.embedding.weight)

    def _run(self, start: int, stop: int, x: Tensor) -> Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x


class TiedSegments(nn.Module):
    """Two checkpointed segments that share a layer. A reentrant checkpoint runs one inner backward per segment."""

    def __init__(self, width: int = 25, *, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.shared = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(partial(self._segment, block), x, use_reentrant=self.reentrant)
        return self.head(x)

    def _segment(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.shared(block(torch.tanh(self.shared(x))))


class Nested(nn.Module):
    """ModuleLists inside a ModuleList, blocks of two widths, and a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        widths = (25, 31)
        self.embedding = nn.Embedding(VOCABULARY, widths[0])
        self.stages = nn.ModuleList(nn.ModuleList(Block(width) for _ in range(2)) for width in widths)
        self.between = nn.ModuleDict({"down": nn.Linear(widths[0], widths[1]), "back": nn.Linear(widths[1], 25)})
        self.heads = nn.ModuleList([nn.Sequential(nn.LayerNorm(25), nn.Linear(25, VOCABULARY)) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.stages[0]:
            x = block(x)
        y = self.between["down"](x)
        for block in self.stages[1]:
            y = block(y)
        x = x + self.between["back"](y)
        return self.heads[0](x) + self.heads[1](x.flip(1))


class Repeated(nn.Module):
    """A block that forward uses four times and a block that forward uses twice, in mixed order."""

    def __init__(self, width: int = 25) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in (0, 1, 0, 0, 1, 0):
            x = self.blocks[index](x) / 2
        return self.head(x)


def tokens(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return token ids [ROWS, LENGTH] in a tuple of one."""
    return (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator),)
