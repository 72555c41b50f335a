"""The fraction of padding in flat buffers, for large models and for many small parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.module_trees import Model, Net
from zeropp.partition.levels import build_layout, dense_strides
from zeropp.partition.units import UnitOptions, form_units

WORLDS = [1, 8, 64, 512, 1024]


def padding(model: nn.Module, world: int, opts: UnitOptions) -> float:
    """Return padding elements per parameter element, over all flat buffers of all units."""
    parameters = dict(model.named_parameters())
    used = padded = 0
    for unit in form_units(model, world, opts):
        groups: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name in unit.parameters:
            groups.setdefault((parameters[name].dtype, parameters[name].requires_grad), []).append(name)
        for names in groups.values():
            members = [(n, parameters[n]) for n in names]
            rows = [(n, tuple(p.shape), dense_strides(p.shape, p.stride())) for n, p in members]
            layout = build_layout(rows, world)
            used, padded = used + layout.used_numel, padded + layout.numel
    assert used == sum(p.numel() for p in model.parameters())
    return padded / used - 1


class Adapter(Net):
    """A frozen linear layer with a trainable low-rank update."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = inner.requires_grad_(False)
        self.a = nn.Linear(inner.in_features, rank, bias=False)
        self.b = nn.Linear(rank, inner.out_features, bias=False)


class Swiglu(Net):
    def __init__(self, size: int, inner: int, rank: int) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            linear = nn.Linear(size, size, bias=False)
            setattr(self, name, Adapter(linear, rank) if rank and name in "qv" else linear)
        self.up, self.gate = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(size) for _ in range(2))


class Llama(Net):
    def __init__(self, layers: int, size: int, inner: int, rank: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32_000, size)
        self.layers = nn.ModuleList(Swiglu(size, inner, rank) for _ in range(layers))
        self.norm = nn.RMSNorm(size)
        self.head = nn.Linear(size, 32_000, bias=False)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".a." in name or ".b." in name)


LARGE = {
    "gpt of 1e8": lambda: Model(layers=12, size=768, vocabulary=50_257),
    "odd gpt of 1e8": lambda: Model(layers=31, size=515, vocabulary=50_021),
    "gpt of 1e9": lambda: Model(layers=20, size=2048, vocabulary=50_257),
    "7b": lambda: Llama(32, 4096, 11_008),
    "7b with adapters": lambda: Llama(32, 4096, 11_008, rank=8),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", LARGE)
def test_padding_of_large_models(name: str, world: int) -> None:
    with torch.device("meta"):
        model = LARGE[name]()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    assert total >= 1e8
    assert padding(model, world, UnitOptions()) <= 0.01
    nothing_small = UnitOptions(param_persistence_threshold=0)
    assert padding(model, world, nothing_small) <= 0.01
    units = form_units(model, world, nothing_small)
    assert sum(sizes[n] for u in units if u.persistent for n in u.parameters) <= 0.002 * total
    assert world > 64 or len(units) >= 14, "too many units were merged"


@pytest.mark.parametrize("world", [1024, pytest.param(1, marks=pytest.mark.campaign)])
def test_padding_of_many_small_parameters(world: int) -> None:
    """Padding is at most 1 %, plus the cost of starting each of 20,000 parameters on a block."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(10_000)))
    aligned = (10_240 + 256) / 10_100 - 1
    assert aligned <= padding(model, world, UnitOptions()) <= aligned + 0.01
    assert padding(model, world, UnitOptions(param_persistence_threshold=0)) <= aligned + 0.01
