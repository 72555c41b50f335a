"""A byte-level GPT in plain PyTorch, for the examples and the benchmarks.

The model contains no distributed code: no collective, no hook, no special base class. zeropp and FSDP2 only need the
usual structure, a ``ModuleList`` of equal blocks, to split it into units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. The defaults give 10.8 million parameters."""

    vocab: int = 256  # number of tokens; one per byte value, so no tokenizer is needed
    layers: int = 6
    d_model: int = 384
    heads: int = 6
    seq_len: int = 128  # longest context in tokens; number of rows of the rotary table
    tied: bool = False  # True to share the embedding's weight with the output head

    def __post_init__(self) -> None:
        if min(self.vocab, self.layers, self.d_model, self.heads, self.seq_len) < 1:
            raise ValueError(f"every size must be at least 1, got {self}")
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise ValueError(
                f"d_model={self.d_model} must be an even multiple of heads={self.heads}: "
                "heads share d_model equally, and rotary embedding turns pairs of channels"
            )


def rotary_table(seq_len: int, head_dim: int, base: float = 10_000.0) -> Tensor:
    """Return cosines and sines of the rotary embedding, [2, seq_len, head_dim / 2] (arXiv 2104.09864, eq. 15)."""
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float32)[:, None] * inverse
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate channel pairs of ``x`` [B, H, T, D] by angles of their positions; ``table`` is [2, >= T, D / 2]."""
    cos, sin = table[:, : x.size(-2)].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        y = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Transformer block with LayerNorm before attention and before the MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT model: ``model(x)`` returns logits [B, T, vocab], ``model(x, y)`` the mean fp32 loss in nats per token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        table = rotary_table(config.seq_len, config.d_model // config.heads)
        # Not persistent, because the table follows from the sizes and checkpoints need not contain it.
        self.register_buffer("table", table, persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        # As in GPT-2: 2 * layers layers add their output to the residual stream. Their weights start smaller by
        # sqrt(2 * layers), so that the variance of the sum does not grow with depth.
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=residual if writes_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.size(1) > self.config.seq_len:
            raise ValueError(f"{tokens.size(1)} tokens given, the model was built for {self.config.seq_len}")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parameter_count(config: GPTConfig) -> int:
    """Return the number of parameters of a model with these sizes, without building the model."""
    d = config.d_model
    block = 12 * d * d + 13 * d  # matrices: qkv 3, out 1, up 4, down 4 (times d * d); biases 9 d, norms 4 d
    embeddings = config.vocab * d * (1 if config.tied else 2)
    return config.layers * block + embeddings + 2 * d


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, count: int, seq_len: int, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """Sample ``count`` tokens that continue ``prompt`` [T], and yield each token as it is drawn.

    With a sharded model all ranks must iterate together, with the same arguments, because each forward gathers weights.
    All ranks draw the same tokens, because the draws come from a CPU generator with the same seed.
    """
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty: expected at least one token to continue")
    draws = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    context = prompt[None, -seq_len:]  # [1, T]
    try:
        for _ in range(count):
            logits = model(context)[0, -1].float().cpu()
            drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=draws)
            context = torch.cat([context, drawn[None].to(context.device)], dim=1)[:, -seq_len:]
            yield int(drawn)
    finally:
        model.train(was_training)
