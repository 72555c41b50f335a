"""Module trees that are divided into units, and helpers that return the division."""

from __future__ import annotations

import torch
from torch import nn

from zeropp.partition.units import UnitOptions, form_units

__all__ = ["FREE", "Layer", "Model", "Net", "cut", "floating", "options"]

FREE = UnitOptions(unit_min_blocks=0, param_persistence_threshold=0)
"""Options with which only the module tree decides on units: no minimum size, no persistent parameters."""


def options(**changes: object) -> UnitOptions:
    return UnitOptions(**{**vars(FREE), **changes})  # type: ignore[arg-type]


def cut(model: nn.Module, world: int = 1, **changes: object) -> dict[str, list[str]]:
    """Return the parameter names of each unit, keyed by the unit's name."""
    return {spec.name: list(spec.parameters) for spec in form_units(model, world, options(**changes))}


def floating(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.is_floating_point()]


class Net(nn.Module):
    """A module with a forward that returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Layer(Net):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(size, 3 * size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.norm = nn.LayerNorm(size)


class Model(Net):
    """The module tree of a transformer: embeddings, layers, norm and head."""

    def __init__(self, layers: int = 3, size: int = 4, tied: bool = False, vocabulary: int = 10) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size)
        self.positions = nn.Embedding(7, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
