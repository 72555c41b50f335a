"""Nothing outlives its use: graphs are gone after their backward, and the engine with its model and optimizer."""

from __future__ import annotations

import gc
import weakref

import pytest

import zeropp
from tests.distributed.models import MODELS
from tests.distributed.parity import Recipe, build, continue_zero, make_optimizer
from zeropp.engine.hooks import BackwardCall


def live_calls() -> int:
    """Calls of modules that some graph still knows."""
    gc.collect()
    return sum(type(found) is BackwardCall for found in gc.get_objects())


def train(model: str) -> list[weakref.ref[object]]:
    """Two steps of one rank without a process group; what must be gone afterwards."""
    recipe = Recipe(model=model, steps=2)
    module = build(recipe, seed=7)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, module), module, recipe.config())
    before = live_calls()
    continue_zero(recipe, module, optimizer, range(2), 0)
    assert live_calls() == before, "graphs outlive their backward"
    engine = optimizer.engine
    return [weakref.ref(thing) for thing in (module, optimizer, engine, engine.comm, *engine.units, *engine.buffers)]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left(model: str) -> None:
    left = train(model)
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []
