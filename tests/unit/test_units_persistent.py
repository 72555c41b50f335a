"""Parameters that become persistent: small ones up to a total, and those in buffers too short to be sharded."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.module_trees import Model, Net, floating, options
from zeropp.partition.levels import BLOCK
from zeropp.partition.units import form_units

# Small parameters.


def test_small_parameters_are_persistent() -> None:
    model = Model()
    units = form_units(model, 1, options(param_persistence_threshold=28))
    kept = {name for unit in units if unit.persistent for name in unit.parameters}
    assert kept == {name for name, p in model.named_parameters() if p.numel() <= 28}
    assert [unit.persistent for unit in units] == sorted(unit.persistent for unit in units), "persistent units are last"
    assert all(unit.owners == () for unit in units if unit.persistent)
    assert sorted(name for unit in units for name in unit.parameters) == sorted(floating(model))


def test_the_model_s_total_is_filled_greedily() -> None:
    """Parameters are chosen in the model's order. After one that does not fit, a smaller one may still fit."""
    model = Net()
    for name, numel in [("a", 5), ("b", 4), ("c", 9), ("d", 3), ("e", 1)]:
        model.register_parameter(name, nn.Parameter(torch.zeros(numel)))

    def chosen(limit: int, total: int) -> str:
        units = form_units(model, 1, options(param_persistence_threshold=limit, model_persistence_threshold=total))
        return "".join(name for unit in units if unit.persistent for name in unit.parameters)

    assert chosen(5, 100) == "abde"
    assert chosen(5, 9) == "ab"
    assert chosen(5, 8) == "ade"[:2]
    assert chosen(5, 9 + 1) == "abe"
    assert chosen(5, 0) == "" and chosen(0, 100) == ""
    assert chosen(100, 100) == "abcde"


def test_all_parameters_persistent() -> None:
    units = form_units(Model(), 4, options(param_persistence_threshold=10**6))
    assert [unit.name for unit in units] == ["persistent.0"] and list(units[0].parameters) == floating(Model())


def test_persistent_units_are_cut() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3000, 1000, bias=False) for _ in range(12)))
    units = form_units(model, 1, options(param_persistence_threshold=10**7))
    sizes = [3_000_000 * len(unit.parameters) for unit in units]
    assert len(units) == 3 and all(size <= 1 << 24 for size in sizes)


# Buffers that are too short to be sharded.


def test_short_units_merge() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))  # one block each
    for world, blocks, expected in [(1, 1, 8), (1, 2, 4), (2, 1, 4), (1, 3, 2), (4, 2, 1), (1, 8, 1)]:
        units = form_units(model, world, options(unit_min_blocks=blocks))
        assert len(units) == expected, (world, blocks)
        assert [name for unit in units for name in unit.parameters] == floating(model)
        assert all(len(unit.parameters) * BLOCK >= blocks * BLOCK * world for unit in units)


def test_units_too_short_to_be_sharded_become_persistent() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    (unit,) = form_units(model, 1, options(unit_min_blocks=9))
    assert unit.persistent and list(unit.parameters) == floating(model)


def test_a_buffer_of_its_own_that_is_too_short_becomes_persistent() -> None:
    """Each (dtype, trainable or frozen) has its own buffer in a unit, and each buffer must be long enough by itself."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))
    model[3].requires_grad_(False)
    model[5].bfloat16()
    units = form_units(model, 1, options(unit_min_blocks=5))
    assert {n for u in units if u.persistent for n in u.parameters} == {"3.weight", "5.weight"}
    assert sorted(n for u in units for n in u.parameters) == sorted(floating(model))


def test_buffers_of_several_units_are_each_too_short() -> None:
    """Two short buffers of different units are not gathered together, so their sum does not count."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(10)))  # one block each
    model[0].requires_grad_(False)
    model[5].requires_grad_(False)
    units = form_units(model, 1, options(unit_min_blocks=2))
    assert {n for u in units if u.persistent for n in u.parameters} == {"0.weight", "5.weight"}


def test_adapters_do_not_make_their_layers_persistent() -> None:
    """The adapter's buffer is too short and becomes persistent, but the long buffer of the frozen weights must not."""
    layers = []
    for _ in range(8):
        layers.append(nn.ModuleDict({k: nn.Linear(256, n, bias=False) for k, n in [("frozen", 99), ("adapter", 2)]}))
    model = nn.ModuleList(layers)
    for layer in layers:
        layer["frozen"].requires_grad_(False)
    units = form_units(model, 1, options(unit_min_blocks=100))
    kept = {name for unit in units if unit.persistent for name in unit.parameters}
    assert not any("frozen" in name for name in kept), f"{len(kept)} of 16 parameters are replicated on every rank"
