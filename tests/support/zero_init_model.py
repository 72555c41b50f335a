"""A model that is initialised in many ways, for tests of parameters that are partitioned while the model is built."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from zeropp.params import sharded_build

__all__ = ["Odd", "limits", "same_as", "seeded"]


class Base(nn.Module):
    """A module whose ``__init__`` initialises its own parameter; subclasses add parameters afterwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(width, width))
        self.reset()

    def reset(self) -> None:
        nn.init.normal_(self.first)


class Derived(Base):
    """A subclass that adds a parameter and edits the base's parameter after the base's ``__init__`` has returned."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.second = nn.Parameter(torch.empty(width))
        nn.init.uniform_(self.second)
        with torch.no_grad():
            self.first.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first * self.second


class Odd(nn.Module):
    """Inheritance, local classes, ties, copies, late edits, writes by ``.data``, dtypes, strides and empty tensors."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()

        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(width, width) / width)

            def forward(self, x: Tensor) -> Tensor:
                return x @ self.weight

        self.embedding = nn.Embedding(60, width)
        self.blocks = nn.ModuleList([Derived(width) for _ in range(3)])
        self.copies = nn.ModuleList([copy.deepcopy(self.blocks[0]) for _ in range(2)])
        self.inner = nn.Sequential(Inner(), Inner())
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.wide = nn.Linear(width, 8, dtype=torch.float64)
        self.head = nn.Linear(width, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("drift", torch.randn(5))
        alias = self.frozen.weight.data
        self.late = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        # A write through an alias made with ``.data``, which no guard intercepts, long after the layer was built.
        alias.fill_(0.25)
        self.apply(self._init_weights)
        with torch.no_grad():
            self.late[0].weight.copy_(self.late[1].weight).add_(1.0)
            self.late[2].weight[3] = self.blocks[1].first[2]
        self.late[3].weight.data = torch.full((width, width), 0.01)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.out_features > 8:
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens) * self.scale
        for block in (*self.blocks, *self.copies, self.inner, self.frozen, *self.late):
            x = x + block(x)
        image = self.conv(x[:, :16].reshape(-1, 4, 2, 2).repeat(1, 1, 2, 2)).mean()
        return self.head(x).sum(-1) + image + self.wide(x.double()).sum(-1) + self.drift.sum() + self.none.sum()


def same_as(model: nn.Module, plain: nn.Module) -> list[str]:
    """Return the names of parameters whose values, dtypes, shapes, strides or flags differ from the plain model's.

    The model's parameters must be unsharded.
    """
    wrong = []
    for (name, own), (other, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        same = (
            name == other
            and own.shape == wanted.shape
            and own.dtype == wanted.dtype
            and own.requires_grad == wanted.requires_grad
            and own.stride() == wanted.stride()
            and torch.equal(own.detach(), wanted.detach())
        )
        if not same:
            wrong.append(name)
    return wrong


@contextlib.contextmanager
def limits(nbytes: int, small: int) -> Iterator[None]:
    """Lower the sizes above which parameters are partitioned during the build, because the models here are small."""
    with mock.patch.object(sharded_build, "LIMIT_NBYTES", nbytes), mock.patch.object(sharded_build, "SMALL", small):
        yield


def seeded(build: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build()
