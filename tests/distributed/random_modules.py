"""Modules grown at random: nested, shared, tied, recomputed, frozen, and branching by the data of each rank."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WIDTH", "Spec", "grow", "specs"]

WIDTH = 6
Spec = tuple[Any, ...]

_SHARED = [("again", 0), ("again", 1), ("tied", 0), ("tied", 1)]  # a module used before, or its weight
_LEAVES = st.sampled_from([("linear",), ("bare",), ("norm",), ("raw",), *_SHARED])


def _branches(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    some = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.tuples(st.sampled_from(["sequence", "list"]), some),
        st.tuples(st.sampled_from(["residual", "twice", "frozen", "aside", "skipped"]), inner),
        st.tuples(st.just("checkpoint"), inner, st.booleans()),
        st.tuples(st.just("either"), inner, inner),
    )


def specs() -> st.SearchStrategy[Spec]:
    """Trees of at most a dozen leaves."""
    return st.recursive(_LEAVES, _branches, max_leaves=12)


class _Part(nn.Module):
    """One node; ``kind`` says what it does with its children."""

    def __init__(self, kind: str, *children: nn.Module, flag: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.flag = flag
        self.parts = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.parts)
        if self.kind == "list":
            for part in parts:
                x = part(x)
        elif self.kind == "residual":
            x = x + torch.tanh(parts[0](x))
        elif self.kind == "twice":
            x = parts[0](torch.tanh(parts[0](x)))
        elif self.kind == "aside":  # no gradient comes back from the part's input
            x = x + parts[0](x.detach())
        elif self.kind == "skipped":
            x = parts[0](x) if x.sum() > 0 else x
        elif self.kind == "checkpoint":
            x = checkpoint(parts[0], x, use_reentrant=self.flag)
        elif self.kind == "either":
            x = parts[0](x) if x.sum() > 0 else parts[1](x) * 0.5
        return x


class _Raw(nn.Module):
    """A parameter of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.store = nn.Module()
        self.store.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.store.gain


class _Grower:
    def __init__(self) -> None:
        self.made: list[nn.Module] = []

    def make(self, spec: Spec) -> nn.Module:
        kind = spec[0]
        if kind in ("linear", "bare", "norm", "raw"):
            module = self._leaf(kind)
            self.made.append(module)
            return module
        if kind == "again":
            return self.made[spec[1] % len(self.made)] if self.made else self.make(("linear",))
        if kind == "tied":
            module = nn.Linear(WIDTH, WIDTH)
            linears = [m for m in self.made if isinstance(m, nn.Linear)]
            if linears:
                module.weight = linears[spec[1] % len(linears)].weight
            return module
        if kind == "sequence":
            return nn.Sequential(*(self.make(child) for child in spec[1]))
        if kind == "list":
            return _Part("list", *(self.make(child) for child in spec[1]))
        if kind == "checkpoint":
            return _Part("checkpoint", self.make(spec[1]), flag=spec[2])
        if kind == "frozen":
            return _Part("list", self.make(spec[1]).requires_grad_(False))
        return _Part(kind, *(self.make(child) for child in spec[1:]))

    @staticmethod
    def _leaf(kind: str) -> nn.Module:
        if kind == "raw":
            return _Raw()
        return nn.LayerNorm(WIDTH) if kind == "norm" else nn.Linear(WIDTH, WIDTH, bias=kind == "linear")


def grow(spec: Spec) -> nn.Module:
    """The module of a spec, between two layers of its own, in float64; the same one every time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), _Grower().make(spec), nn.Linear(WIDTH, WIDTH)).double()
