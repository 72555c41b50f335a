"""Small models, each with one trait that is hard for an engine that frees weights between uses.

`MODELS` maps a name to a `Trait`, which builds the model, one rank's micro-batch, and the loss. No model draws random
numbers in forward, so both halves of a comparison compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.text_models import GPT, ROWS, VOCABULARY, Block, Nested, Repeated, TiedSegments, tokens

__all__ = ["MODELS", "Trait"]


@dataclass(frozen=True)
class Trait:
    """A model, its micro-batches and its loss.

    Attributes:
        build: builds the model in float32, with weights from the global generator.
        batch: makes one micro-batch; floating-point tensors are float32.
        loss: computes a scalar from the model and a micro-batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


# Outputs other than plain tensors.


@dataclass
class Hidden:
    """A dataclass as the output of a block."""

    state: Tensor
    note: str = "hidden"


class Bag:
    """An object as the output of a block, unknown to pytree."""

    def __init__(self, **items: object) -> None:
        self.__dict__.update(items)


class Structured(nn.Module):
    """A block that returns its result in a dict, tuple, dataclass or plain object, with tensors nested inside."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Block(width)

    def forward(self, x: Tensor) -> object:
        y = self.inner(x)
        side = y.square().mean()
        if self.kind == "dict":
            return {"out": [y], "side": side}
        if self.kind == "tuple":
            return (None, (y, side), 3)
        if self.kind == "dataclass":
            return Hidden(y)
        return Bag(deep=Bag(out=y), side=[side])


class StructuredChain(nn.Module):
    """A chain with one block of each output kind; the root returns a dict that contains the loss."""

    def __init__(self, width: int = 25) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Structured(kind, width) for kind in ("dict", "tuple", "dataclass", "object"))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, object]:
        x = self.embedding(tokens)
        first = self.blocks[0](x)
        second = self.blocks[1](first["out"][0])[1]
        third = self.blocks[2](second[0])
        fourth = self.blocks[3](third.state)
        logits = self.head(fourth.deep.out)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(1))
        return {"loss": loss + 0.1 * (first["side"] + second[1] + fourth.side[0]), "parts": Bag(logits=logits)}


class LossInside(nn.Module):
    """A root that returns None and stores its loss in an attribute, so no hook on an output can start backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(depth=2)
        self.scale = nn.Linear(VOCABULARY, VOCABULARY)
        self.loss: Tensor | None = None

    def forward(self, tokens: Tensor) -> None:
        logits = self.scale(self.body(tokens))
        self.loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(1))


# Frozen parameters.


class Adapter(nn.Module):
    """A frozen layer and a trainable low-rank addition in one module."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / width)
        self.up = nn.Parameter(torch.randn(width, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class LowRank(nn.Module):
    """A model in which only adapters and the last norm are trained, so the embedding needs no gradient."""

    def __init__(self, width: int = 29) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Adapter(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def frozen_middle(recompute: str | None = None, reentrant: bool = False) -> nn.Module:
    """Return a GPT of four blocks: the two middle blocks and some weights of the last block are frozen."""
    model = GPT(depth=4, recompute=recompute, reentrant=reentrant)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    model.blocks[3].up.requires_grad_(False)
    model.blocks[3].attention.qkv.bias.requires_grad_(False)
    return model


# Other shapes.


class Convolutions(nn.Module):
    """Channels_last weights, group norm, batch norm and a transposed convolution.

    Batch norm keeps no running statistics, because these would differ between ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(10, 10, 3, padding=1), nn.GroupNorm(2, 10), nn.SiLU()) for _ in range(3)
        )
        self.batch_norm = nn.BatchNorm2d(10, track_running_stats=False)
        self.rise = nn.ConvTranspose2d(10, 7, 2, stride=2)
        self.head = nn.Linear(7, 11)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        x = self.rise(self.batch_norm(x))
        return self.head(x.mean((2, 3)))


class RawRoot(nn.Module):
    """Parameters of the root itself: a matrix, a vector, a scalar and an empty one."""

    def __init__(self, width: int = 27) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.register_buffer("offset", torch.linspace(-1, 1, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table[tokens] + self.shift + self.offset.to(self.shift.dtype)
        for block in self.blocks:
            x = block(x)
        return (x @ self.table.t()) / self.temperature


class Modes(nn.Module):
    """A model with different paths in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(depth=2)
        self.extra = nn.ModuleList(nn.Linear(VOCABULARY, VOCABULARY) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.body(tokens)
        if self.training:
            return logits + self.extra[1](torch.tanh(self.extra[0](logits)))
        return logits + self.extra[0](logits)


class Encoder(nn.Module):
    """torch's encoder layers. `MultiheadAttention` reads the weight of `out_proj` without calling its forward."""

    def __init__(self, width: int = 26) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = partial(nn.TransformerEncoderLayer, width, 2, 39, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.attention(x, x, x)[0])


# Batches and losses.


def images(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return images [ROWS, 3, 6, 6] in channels_last, and labels [ROWS]."""
    pixels = torch.randn(ROWS, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return pixels, torch.randint(0, 11, (ROWS,), generator=generator)


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the cross-entropy of each next token."""
    (ids,) = batch
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(1))


def whole_model_recomputed(model: nn.Module, batch: tuple[Tensor, ...], *, reentrant: bool) -> Tensor:
    """Return the loss of a model whose root runs under checkpoint.

    Reentrant checkpoints record a graph only for differentiable inputs, so a stand-in input is added.
    """
    (ids,) = batch
    stand_in = torch.ones((), requires_grad=True)
    logits = checkpoint(lambda one, t: model(t) * one, stand_in, ids, use_reentrant=reentrant)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten().roll(1))


def loss_in_output(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss that the model puts into its output dict."""
    loss: Tensor = model(*batch)["loss"]
    return loss


def loss_inside(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss that the model stores in an attribute."""
    model(*batch)
    loss: Tensor = model.loss
    model.loss = None
    return loss


def classify(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the cross-entropy of the labels."""
    return F.cross_entropy(model(batch[0]), batch[1])


def _convolutions() -> nn.Module:
    return Convolutions().to(memory_format=torch.channels_last)


def _text(build: Callable[[], nn.Module]) -> Trait:
    return Trait(build, tokens, next_token)


MODELS: dict[str, Trait] = {
    "gpt": _text(GPT),
    "gpt tied by use": _text(partial(GPT, tie="use")),
    "gpt, blocks recomputed": _text(partial(GPT, recompute="block")),
    "gpt, segments recomputed": _text(partial(GPT, recompute="segment")),
    "gpt, blocks reentrant": _text(partial(GPT, recompute="block", reentrant=True)),
    "gpt, segments reentrant": _text(partial(GPT, recompute="segment", reentrant=True)),
    "gpt, model recomputed": Trait(GPT, tokens, partial(whole_model_recomputed, reentrant=False)),
    "gpt, model reentrant": Trait(GPT, tokens, partial(whole_model_recomputed, reentrant=True)),
    "tied segments": _text(partial(TiedSegments, reentrant=False)),
    "tied segments, reentrant": _text(TiedSegments),
    "nested lists": _text(Nested),
    "repeated blocks": _text(Repeated),
    "structured outputs": Trait(StructuredChain, tokens, loss_in_output),
    "loss inside": Trait(LossInside, tokens, loss_inside),
    "frozen middle": _text(frozen_middle),
    "frozen middle, segments recomputed": _text(partial(frozen_middle, "segment")),
    "frozen middle, blocks reentrant": _text(partial(frozen_middle, "block", True)),
    "low rank": _text(LowRank),
    "convolutions": Trait(_convolutions, images, classify),
    "raw root": _text(RawRoot),
    "modes": _text(Modes),
    "encoder": _text(Encoder),
}
