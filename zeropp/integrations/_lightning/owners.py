"""The strategy that has a model's engine: a model outlives trainers, and has one engine at a time."""

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
    """A strategy, seen from here."""

    @property
    def engine(self) -> Engine | None:
        """The engine that it trains or evaluates with."""
        ...

    def release(self) -> None:
        """Forget the engine and its optimizer; the model keeps its weights."""
        ...


# Both weakly: neither a model nor a strategy stays for the other's sake.
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OwningStrategy]] = weakref.WeakKeyDictionary()


def claim(model: nn.Module, owner: OwningStrategy) -> None:
    """Let ``owner`` be the one who wraps a model next; whoever has had it lets go of it."""
    former = _owner(model)
    for each in (former, owner):
        # One optimizer at a time: zeropp refuses a second one while the first lives.
        if each is not None:
            each.release()
    _owners[model] = weakref.ref(owner)
    core = core_of(model)
    if core is not None and core.listener is not None:
        # An optimizer in a cycle of references, as tracebacks of a failed run make them, is not gone by itself.
        gc.collect()


def core_of(model: nn.Module) -> Core | None:
    """The engine that gathers a model's weights; None if it is not partitioned."""
    try:
        return engine_of(model)
    except ValueError:
        return None


def current_engine(model: nn.Module) -> Engine | None:
    """The engine by which a model is partitioned, whichever strategy made it; None if it has none in use."""
    # A model that was wrapped by hand meanwhile has an engine that no strategy knows.
    owner = _owner(model)
    engine = None if owner is None else owner.engine
    return None if engine is None or engine.module is not model or engine.core.closed else engine


def _owner(model: nn.Module) -> OwningStrategy | None:
    reference = _owners.get(model)
    return None if reference is None else reference()
