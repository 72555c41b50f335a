"""Modules marked as leaves by a call become one unit each; a name or class without modules is an error."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import zeropp
from zeropp import zero
from zeropp.config import load_config
from zeropp.partition.units import form_units
from zeropp.setup.choices import choose_unit_options


class Expert(nn.Linear):
    """A subclass of nn.Linear."""


class Sparse(nn.Module):
    """A module with three experts. Each expert is a unit unless this module is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x)


def model_of() -> nn.Sequential:
    # The children have three classes, because children of one class would be blocks.
    return nn.Sequential(Sparse(), nn.Linear(16, 16), nn.Sequential(Sparse()))


def units(model: nn.Module) -> int:
    partitioned = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": partitioned, "zeropp": {"unit_min_blocks": 0}}
    return len(form_units(model, 2, choose_unit_options(load_config(config))))


@pytest.mark.parametrize("given", [[Sparse], ["Sparse"], [f"{__name__}.Sparse"], [nn.Embedding, Sparse]], ids=str)
def test_classes(given: list[type[nn.Module] | str]) -> None:
    model = model_of()
    assert units(model) == 7
    assert zero.set_z3_leaf_modules(model, given) == [model[0], model[2][0]] == zero.get_z3_leaf_modules(model)
    assert units(model) == 3 and zero.z3_leaf_module(model[0]) and not zero.z3_leaf_module(model[1])
    assert zero.unset_z3_leaf_modules(model, [Sparse]) == [model[0], model[2][0]]
    assert units(model) == 7 and zero.get_z3_leaf_modules(model) == []


def test_names_and_suffixes() -> None:
    model = model_of()
    assert zero.set_z3_leaf_modules_by_name(model, ["2.0"]) == ([model[2][0]], [])
    assert units(model) == 5
    assert zero.set_z3_leaf_modules_by_name(model, ["9"], raise_if_not_found=False) == ([], ["9"])
    assert zero.set_z3_leaf_modules_by_suffix(model, ["0"])[0][0] is model[0]
    assert units(model) == 3
    zero.set_z3_leaf_module(model[2][0], False)
    assert units(model) == 5


def test_classes_and_names_without_modules_are_errors() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"no modules of classes \['Mixtral'\]"):
        zero.set_z3_leaf_modules(model, ["Mixtral"])
    # A class also matches its subclasses. A class name matches only classes of that name.
    assert len(zero.set_z3_leaf_modules(nn.Sequential(Expert(2, 2)), [nn.Linear])) == 1
    with pytest.raises(ValueError, match="no modules of classes"):
        zero.set_z3_leaf_modules(nn.Sequential(Expert(2, 2)), ["Linear"])
    assert zero.set_z3_leaf_modules(model, ["Mixtral"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match=r"no modules \['7'\]"):
        zero.set_z3_leaf_modules_by_name(model, ["0", "7"])
    with pytest.raises(ValueError, match=r"whose names end with \['mlp'\]"):
        zero.set_z3_leaf_modules_by_suffix(model, ["mlp"])
    with pytest.raises(TypeError, match="expected classes of modules, or their names"):
        zero.set_z3_leaf_modules(model, [3])  # type: ignore[list-item]


def test_a_model_that_is_wrapped_has_its_units() -> None:
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, {"zero_optimization": {"stage": 3}})
    with pytest.raises(RuntimeError, match="after the model was wrapped"):
        zero.set_z3_leaf_modules(model, [Sparse])
    optimizer.close()


def test_marks_of_a_configuration_make_room_for_the_next_one_s() -> None:
    """Marks made by a configuration are removed by the next configuration; marks made by calls stay."""
    model = model_of()
    by_call = zero.set_z3_leaf_modules(model, [Sparse])
    name, before = "1", units(model)
    block = {"stage": 3, "leaf_module": {"names": [name]}}
    config = {"zero_optimization": block, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeropp.initialize(model=model, config=config)
    assert zero.z3_leaf_module(model.get_submodule(name))
    del engine, _
    gc.collect()
    # The mark stays although the engine is gone, but it is not used if the model is wrapped without this configuration.
    assert zero.z3_leaf_module(model.get_submodule(name)) and units(model) == before
    zeropp.initialize(model=model, config={**config, "zero_optimization": {"stage": 3}})
    assert not zero.z3_leaf_module(model.get_submodule(name)) and zero.get_z3_leaf_modules(model) == by_call
