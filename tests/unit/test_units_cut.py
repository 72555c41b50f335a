"""The division of models into units: parameters that are gathered together, and the modules whose forward uses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.module_trees import FREE, Layer, Model, Net, cut, floating, options
from zeropp.partition.units import Owner, UnitOptions, UnitSpec, form_units, have_tensors

# The default division.


def test_repeated_blocks_and_the_remaining_parameters_are_units() -> None:
    units = form_units(Model(), 1, FREE)
    assert [unit.name for unit in units] == ["tokens..positions", "layers.0", "layers.1", "layers.2", "norm..head"]
    assert units[0].owners == (Owner("tokens", True), Owner("positions", True))
    assert units[1].owners == (Owner("layers.0", True),)
    assert units[4].parameters == ("norm.weight", "norm.bias", "head.weight")
    assert not any(unit.persistent for unit in units)


def test_tied_weights_belong_to_the_first() -> None:
    units = cut(Model(tied=True))
    assert units["tokens..positions"] == ["tokens.weight", "positions.weight"]
    assert units["norm"] == ["norm.weight", "norm.bias"]
    assert [name for names in units.values() for name in names] == floating(Model(tied=True))


def test_tied_between_blocks_and_shared_modules() -> None:
    model = nn.Sequential(Layer(), Layer(), Layer())
    model[2].attention = model[0].attention  # the same module in two blocks
    model[1].norm.weight = model[0].norm.weight
    units = cut(model)
    assert "attention.weight" not in "".join(units["2"]) and "1.norm.weight" not in units["1"]
    assert sorted(name for names in units.values() for name in names) == sorted(floating(model))
    same = Layer()
    found = [name for names in cut(nn.Sequential(same, nn.ReLU(), same)).values() for name in names]
    assert found == [f"0.{name}" for name in floating(same)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ModuleList(Layer() for _ in range(3)),
        lambda: nn.Sequential(Layer(), Layer(), Layer()),
        lambda: nn.Sequential(Layer(), nn.ReLU(), Layer(), nn.Dropout(), Layer()),
        lambda: nn.ModuleDict({"a": Layer(), "b": Layer(), "c": Layer()}),
    ],
)
def test_kinds_of_containers(make: Callable[[], nn.Module]) -> None:
    model = Net()
    model.blocks = make()
    units = form_units(model, 1, FREE)
    assert len(units) == 3 and all(unit.owners == (Owner(unit.name, True),) for unit in units)


def test_children_of_an_ordinary_module_are_no_blocks() -> None:
    model = Net()
    model.first, model.second, model.third = (nn.Linear(2, 2) for _ in range(3))
    assert form_units(model, 1, FREE) == [UnitSpec("<root>", (Owner("", True),), tuple(floating(model)))]


def test_a_single_block_in_a_list_is_not_repeated() -> None:
    """A single block is divided like any other module; its remaining parameters merge with the list's neighbours."""
    units = form_units(Model(layers=1), 1, FREE)
    assert units[0].name == "tokens..layers.0.attention" and units[-1].name == "layers.0.norm..head"
    assert [name for unit in units for name in unit.parameters] == floating(Model(layers=1))


def test_nested_lists() -> None:
    model = Net()
    model.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(3))
    units = form_units(model, 1, FREE)
    for unit in units:
        for owner in unit.owners:
            module = model.get_submodule(owner.path)
            assert type(module) not in (nn.ModuleList, nn.ModuleDict), f"{owner} has no forward"
    assert [unit.name for unit in units] == [f"stages.{i}.{j}" for i in range(3) for j in range(2)]


def test_lists_of_pairs() -> None:
    """A layer that is a list of its parts is one unit. Each part is an owner, because the list has no forward."""
    model = Net()
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]) for _ in range(3))
    units = form_units(model, 1, FREE)
    assert [unit.parameters for unit in units] == [
        tuple(f"layers.{i}.{name}" for name in floating(model.layers[i])) for i in range(3)
    ]
    for i, unit in enumerate(units):
        assert unit.owners == (Owner(f"layers.{i}.0", True), Owner(f"layers.{i}.1", True))


def test_a_list_that_is_a_leaf() -> None:
    """A list of experts that is a leaf is one unit. Each expert's forward begins a use of the unit."""
    model = Model()
    model.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    (unit,) = [unit for unit in form_units(model, 1, options(leaf_names=("experts",))) if "experts" in unit.name]
    assert unit.owners == tuple(Owner(f"experts.{i}", True) for i in range(3))
    assert unit.parameters == tuple(f"experts.{name}" for name in floating(model.experts))


def test_a_list_beside_its_blocks_stages() -> None:
    """A list may have blocks of several classes, and a stage may contain a downsampling layer."""
    model = Net()
    model.stages = nn.ModuleList(nn.Sequential(Layer(), Layer(), nn.Linear(4, 4)) for _ in range(2))
    assert list(cut(model)) == ["stages.0", "stages.1"]
    model.stages = nn.ModuleList([Layer(), nn.Linear(4, 4), Layer(), nn.Linear(4, 4), nn.LayerNorm(4)])
    assert [name.split("..")[0] for name in cut(model)] == [f"stages.{i}" for i in range(5)]


def test_leftovers_stay_below_the_nearest_common_parent() -> None:
    model = Net()
    model.encoder, model.decoder = Model(), Model()
    units = form_units(model, 1, FREE)
    for unit in units:
        if unit.name.startswith(("encoder.norm", "decoder.tokens")):
            continue
        sides = {owner.path.split(".")[0] for owner in unit.owners}
        assert len(sides) == 1
    assert [name for unit in units for name in unit.parameters] == floating(model)


def test_direct_parameters_have_their_module_as_owner() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(1))
    model.layers[0].gate = nn.Parameter(torch.ones(1))
    units = form_units(model, 1, FREE)
    assert units[0].owners[0] == Owner("", False) and units[0].parameters[0] == "scale"
    assert "layers.0.gate" in units[1].parameters
    only = Net()
    only.weight = nn.Parameter(torch.ones(3))
    assert form_units(only, 1, FREE) == [UnitSpec("<root>", (Owner("", True),), ("weight",))]


def never_called(model: nn.Module, path: str) -> bool:
    module = model.get_submodule(path)
    return type(module).forward is nn.Module.forward


@pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
def test_parameters_in_lists(kind: type[nn.Module]) -> None:
    """A ParameterList has no forward, so the module that contains the list is the owner of its parameters."""
    model = Model()
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    model.prompts = nn.ParameterList(parameters) if kind is nn.ParameterList else nn.ParameterDict({"a": parameters[0]})
    units = form_units(model, 1, FREE)
    for unit in units:
        assert not any(never_called(model, owner.path) for owner in unit.owners), unit
    (unit,) = [unit for unit in units if any("prompts" in name for name in unit.parameters)]
    assert Owner("", False) in unit.owners


@pytest.mark.parametrize("wrap", [lambda stage: stage, lambda stage: nn.ModuleList([stage])])
def test_namespaces(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A plain nn.Module that only contains modules, as in published autoencoders, has no forward and is no owner."""
    model = Net()
    model.down = nn.ModuleList()
    for _ in range(2):
        stage = nn.Module()
        stage.block, stage.sample = nn.Linear(4, 4), nn.LayerNorm(4)
        model.down.append(wrap(stage))
    units = form_units(model, 1, FREE)
    assert [name for unit in units for name in unit.parameters] == floating(model) and len(units) == 2
    for unit in units:
        assert len(unit.owners) == 2 and not any(never_called(model, owner.path) for owner in unit.owners), unit


def test_parameters_that_are_not_floating_point_have_no_unit() -> None:
    model = Model()
    model.codes = nn.Parameter(torch.zeros(5, dtype=torch.int8), requires_grad=False)
    model.phases = nn.Parameter(torch.zeros(5, dtype=torch.complex64), requires_grad=False)
    found = [name for names in cut(model).values() for name in names]
    assert found == floating(model) and "codes" not in found and "phases" not in found


def test_frozen_parameters_are_in_units() -> None:
    model = Model()
    model.tokens.requires_grad_(False)
    assert cut(model) == cut(Model())


def test_a_model_without_floating_parameters() -> None:
    assert form_units(nn.Sequential(nn.ReLU()), 4, UnitOptions()) == []


# Settings and modules that change the division.


def test_unit_numel_cuts_further_down() -> None:
    model = Model(size=8)
    size = sum(p.numel() for p in model.layers[0].parameters())
    assert cut(model, unit_numel=size).keys() >= {"layers.0", "layers.1", "layers.2"}
    units = form_units(model, 1, options(unit_numel=size - 1))
    inside = [unit for unit in units if unit.name.startswith("layers.0")]
    assert len(inside) > 1
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for unit in units:
        total = sum(sizes[name] for name in unit.parameters)
        lone = len({name.rsplit(".", 1)[0] for name in unit.parameters}) == 1
        assert total <= size - 1 or lone, f"{unit.name} has {total} elements"
        blocks = {".".join(owner.path.split(".")[:2]) for owner in unit.owners}
        assert len(blocks) == 1 or not any(block.startswith("layers.") for block in blocks), "a unit spans two blocks"
    assert [n for unit in units for n in unit.parameters] == floating(model)
    smallest = form_units(model, 1, options(unit_numel=1))
    assert all(len({name.rsplit(".", 1)[0] for name in unit.parameters}) == 1 for unit in smallest)


@pytest.mark.parametrize(
    "choice",
    [
        {"leaf_classes": ("Model",)},
        {"leaf_classes": (f"{Model.__module__}.Model",)},
        {"leaf_names": ("inner",)},
        {"leaf_suffixes": ("ner",)},
    ],
)
def test_leaf_modules_are_one_unit(choice: dict[str, object]) -> None:
    model = Net()
    model.before, model.inner, model.after = nn.Linear(2, 2), Model(), nn.Linear(2, 2)
    assert list(cut(model, **choice)) == ["before", "inner", "after"]
    unit = form_units(model, 1, options(**choice))[1]
    assert unit.owners == (Owner("inner", True),) and len(unit.parameters) == len(list(model.inner.parameters()))
    assert list(cut(model, leaf_names=("inn",), leaf_classes=("odel", "Nobody"))) == list(cut(model))


def test_an_empty_suffix_or_name_does_not_reach_everything() -> None:
    assert list(cut(Model(), leaf_suffixes=("nothing has this",))) == list(cut(Model()))
    assert list(cut(Model(), leaf_names=("",))) == ["<root>"], "the empty name is the root's"


def test_granularity() -> None:
    """A module is one unit if elements / modules (itself included) is at most the threshold."""
    model = nn.Sequential(Layer(), Layer())
    layer = model[0]
    each = sum(p.numel() for p in model.parameters()) // sum(1 for _ in model.modules())
    assert list(cut(model)) == ["0", "1"]
    assert list(cut(model, module_granularity_threshold=each)) == ["<root>"]
    assert list(cut(model, module_granularity_threshold=each - 1)) == ["0", "1"]
    mean = sum(p.numel() for p in layer.parameters()) // sum(1 for _ in layer.modules())
    assert list(cut(layer, module_granularity_threshold=mean)) == ["<root>"]
    assert list(cut(nn.ModuleList([layer]), module_granularity_threshold=10**9)) == ["0"], "lists have no forward"
    assert list(cut(model, module_granularity_threshold=-1)) == ["0", "1"]


def test_compiled_modules_are_one_unit() -> None:
    model = Net()
    model.before = nn.Linear(2, 2)
    model.inner = torch.compile(Model())
    model.other = Model()
    model.other.compile()
    assert list(cut(model)) == ["before", "inner", "other"]
    assert [n for names in cut(model).values() for n in names] == floating(model)


def test_modules_that_have_tensors_are_told_as_torch_tells_them() -> None:
    """The result is also right for modules in a cycle, modules used twice, and tensors that are None."""
    shared, circle, bare = nn.Linear(2, 2, bias=False), nn.Module(), nn.Module()
    circle.other = nn.Sequential(nn.ReLU())
    circle.other.append(circle)
    bare.register_parameter("nothing", None)
    bare.register_buffer("none", None)
    model = nn.Sequential(nn.Sequential(shared), circle, nn.ModuleList([shared, bare]), nn.BatchNorm1d(2, affine=False))
    for tensors in (nn.Linear(1, 1), None):
        circle.held = tensors
        modules = list(model.modules())
        parameters = [any(True for _ in module.parameters()) for module in modules]
        buffers = [any(True for _ in module.buffers()) for module in modules]
        assert have_tensors(modules, ("_parameters",)) == parameters
        either = [one or other for one, other in zip(parameters, buffers, strict=True)]
        assert have_tensors(modules, ("_parameters", "_buffers")) == either != parameters
