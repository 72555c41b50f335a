"""The wrapped optimizer's ``state``, by slice."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from zeropp.engine.engine import Engine
from zeropp.params.guard import handler_of, is_managed

__all__ = ["OwnStates", "SliceStates"]


class OwnStates(nn.Parameter):
    """A tensor of a group that stores its states itself, so that they are not saved with those of slices.

    Attributes:
        state: entries of ``optimizer.state`` for this tensor.
    """

    state: dict[str, Any]


class Slices(Protocol):
    """The methods of ShardedParams that its states call."""

    @property
    def markers(self) -> Sequence[Any]: ...

    def marker_state(self, marker: nn.Parameter) -> dict[str, Tensor]: ...

    def forget_state(self, parameter: nn.Parameter) -> None: ...


class SliceStates(defaultdict[Any, Any]):
    """The wrapped optimizer's ``state``. Its keys are slices; parameters of the model are refused as keys.

    A rank holds only a part of a parameter's states, so access by a parameter raises. The exception is ``del
    state[parameter]``, which drops this rank's part. ``__getitem__`` is not overridden, so a step's lookups are as fast
    as in a plain dict.

    Attributes:
        slices: weak reference to the slices whose states this is, set by their ShardedParams.
    """

    slices: weakref.ref[Slices] | None = None

    def __missing__(self, key: Any) -> Any:
        _refuse_of_model(key)
        if isinstance(key, OwnStates):
            owner = None if self.slices is None else self.slices()
            made = {} if owner is None else owner.marker_state(key)
            # Before the first step, slices have no states, so a marker gets none, either.
            for name in made.keys() & {name for state in self.values() for name in state}:
                key.state.setdefault(name, made[name])
            return key.state
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_of_model(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        owner = None if self.slices is None else self.slices()
        if isinstance(key, OwnStates):
            super().pop(key, None)
            return
        if owner is None or not _is_of_model(key):
            super().__delitem__(key)
            return
        engine = handler_of(key)
        if isinstance(engine, Engine):
            # The host may be stepping with the states. Offloaded states could not be told from deleted ones.
            engine.require_idle("del optimizer.state[parameter]", inside_gather=True, needs=["optim_states"])
        owner.forget_state(key)

    def __contains__(self, key: object) -> bool:
        _refuse_of_model(key)
        return super().__contains__(key) or (isinstance(key, OwnStates) and bool(self[key]))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a slice or marker, or ``default``; raise for a parameter of the model."""
        _refuse_of_model(key)
        return (self[key] or default) if isinstance(key, OwnStates) else super().get(key, default)

    def clear(self) -> None:
        """Remove the states of all slices and markers."""
        super().clear()
        owner = None if self.slices is None else self.slices()
        for marker in owner.markers if owner is not None else ():
            marker.parameter.state.clear()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of a slice, after setting it to ``default`` if it is missing."""
        _refuse_of_model(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return the state of a slice."""
        _refuse_of_model(key)
        return super().pop(key, *default)


def _is_of_model(key: object) -> bool:
    return isinstance(key, Tensor) and is_managed(key)


def _refuse_of_model(key: object) -> None:
    if _is_of_model(key):
        _refuse_state_of(key)


def _refuse_state_of(parameter: Any) -> NoReturn:
    engine = handler_of(parameter)
    name = ""
    if isinstance(engine, Engine):
        buffer, index = engine.unit_of[id(parameter)].place_of(parameter)
        name = f" {buffer.names[index]!r}"
    raise RuntimeError(
        f"optimizer.state was asked for the model's parameter{name}, and its keys are slices: this rank's parts of "
        "parameters, the tensors in optimizer.param_groups. For whole states there are, on every rank, "
        "zeropp.training.safe_get_full_optimizer_state(parameter, key) and safe_set_full_optimizer_state(parameter, "
        "value, key), with a key such as 'exp_avg'; del optimizer.state[parameter], on every rank, forgets its states"
    )
