"""A table of the strategy that owns a model's engine. A model can outlive its Trainer and has one engine at a time."""

from __future__ import annotations

import gc
import weakref
from typing import Protocol

from torch import nn

from zeropp.deepspeed.training_engine import Engine
from zeropp.engine.engine import Engine as Core
from zeropp.engine.engine import engine_of

__all__ = ["OwningStrategy", "claim", "core_of", "current_engine"]


class OwningStrategy(Protocol):
    """The part of a strategy that this module uses."""

    @property
    def engine(self) -> Engine | None:
        """The engine that the strategy trains or evaluates with; None if it has no engine."""
        ...

    def release(self) -> None:
        """Drop the references to the engine and its optimizer; the model keeps its weights."""
        ...


# Model -> owner. Both references are weak, so that the table keeps neither models nor strategies alive.
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OwningStrategy]] = weakref.WeakKeyDictionary()


def claim(model: nn.Module, owner: OwningStrategy) -> None:
    """Make ``owner`` the strategy that wraps a model next; the former owner drops its engine and optimizer."""
    former = _owner(model)
    for each in (former, owner):
        # zeropp refuses to wrap a model while an earlier optimizer of the model is alive.
        if each is not None:
            each.release()
    _owners[model] = weakref.ref(owner)
    core = core_of(model)
    if core is not None and core.listener is not None:
        # The earlier optimizer may be part of a reference cycle, such as the traceback of a failed run.
        gc.collect()


def core_of(model: nn.Module) -> Core | None:
    """Return the core engine that manages a model's weights; None if the model is not sharded."""
    try:
        return engine_of(model)
    except ValueError:
        return None


def current_engine(model: nn.Module) -> Engine | None:
    """Return the engine of a model, whichever strategy made it; None if the model has no usable engine."""
    # If the user has wrapped the model without a strategy in the meantime, no strategy has the model's engine.
    owner = _owner(model)
    engine = None if owner is None else owner.engine
    return None if engine is None or engine.module is not model or engine.core.closed else engine


def _owner(model: nn.Module) -> OwningStrategy | None:
    reference = _owners.get(model)
    return None if reference is None else reference()
