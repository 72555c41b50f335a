"""For any module tree and world size, each parameter is in one unit, and no buffer is shorter than the minimum."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.module_trees import Layer, Net, floating, options
from zeropp.partition.levels import BLOCK
from zeropp.partition.units import UnitOptions, direct_parameters, form_units


def random_tree(rng: random.Random, depth: int) -> nn.Module:
    kinds = ["linear", "norm", "layer", "own"]
    kind = rng.choice(kinds if depth == 0 else [*kinds, "list", "sequential", "dict", "module", "module", "list"])
    size = rng.choice([1, 3, 8])
    if kind == "linear":
        return nn.Linear(size, rng.choice([2, 5]), bias=rng.random() < 0.5)
    if kind == "norm":
        return rng.choice([nn.LayerNorm(size), nn.ReLU(), nn.BatchNorm1d(size)])
    if kind == "layer":
        return Layer(size)
    if kind == "own":
        module = Net()
        module.weight = nn.Parameter(torch.zeros(size), requires_grad=rng.random() < 0.7)
        if rng.random() < 0.3:
            module.count = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
        return module
    children = [random_tree(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    if kind == "dict":
        return nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)})
    module = Net() if rng.random() < 0.7 else nn.Module()
    if rng.random() < 0.3:
        module.direct = nn.Parameter(torch.zeros(2))
    for i, child in enumerate(children):
        setattr(module, f"c{i}", child)
    return module


def tie(model: nn.Module, rng: random.Random) -> None:
    """Tie up to two pairs of parameters at random."""
    homes = [(module, name) for module in model.modules() for name in module._parameters]
    for _ in range(min(2, len(homes) // 2)):
        (first, a), (second, b) = rng.sample(homes, 2)
        second._parameters[b] = first._parameters[a]


random_options = st.builds(
    UnitOptions,
    unit_numel=st.sampled_from([0, 0, 1, 20, 100]),
    unit_min_blocks=st.sampled_from([0, 0, 1, 2]),
    param_persistence_threshold=st.sampled_from([0, 0, 4, 50]),
    model_persistence_threshold=st.sampled_from([2**63 - 1, 30]),
    module_granularity_threshold=st.sampled_from([0, 0, 3, 30]),
    leaf_classes=st.sampled_from([(), ("Layer",)]),
    leaf_suffixes=st.sampled_from([(), ("c1",)]),
)


@given(st.integers(0, 2**32), random_options, st.sampled_from([1, 2, 8]))
@settings(max_examples=250)
def test_every_floating_parameter_is_in_exactly_one_unit(seed: int, opts: UnitOptions, world: int) -> None:
    rng = random.Random(seed)
    model = random_tree(rng, 3)
    tie(model, rng)
    units = form_units(model, world, opts)
    found = [name for unit in units for name in unit.parameters]
    assert sorted(found) == sorted(floating(model))
    assert form_units(model, world, opts) == units, "the result must be deterministic"
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters())
    for unit in units:
        covered = set()
        for owner in unit.owners:
            module = modules[owner.path]
            covered |= {id(p) for p in (module.parameters() if owner.recurse else direct_parameters(module))}
        assert unit.persistent or {id(parameters[name]) for name in unit.parameters} <= covered, unit
    assert len({unit.name for unit in units}) == len(units), "names of units must be unique"


@given(st.integers(0, 2**32), random_options)
@settings(max_examples=80)
def test_the_cut_does_not_depend_on_the_world(seed: int, opts: UnitOptions) -> None:
    rng = random.Random(seed)
    model = random_tree(rng, 3)
    tie(model, rng)
    opts = UnitOptions(**{**vars(opts), "unit_min_blocks": 0})
    assert all(form_units(model, world, opts) == form_units(model, 1, opts) for world in (2, 8, 1024))


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2]))
@settings(max_examples=80)
def test_no_buffer_is_shorter_than_asked_for(seed: int, world: int, blocks: int) -> None:
    model = random_tree(random.Random(seed), 3)
    parameters = dict(model.named_parameters())
    for unit in form_units(model, world, options(unit_min_blocks=blocks)):
        sizes: dict[object, int] = {}
        for name in unit.parameters:
            p = parameters[name]
            sizes[p.dtype, p.requires_grad] = sizes.get((p.dtype, p.requires_grad), 0) + p.numel()
        assert unit.persistent or min(sizes.values()) >= blocks * BLOCK * world
