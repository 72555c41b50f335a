"""Parameter groups after wrapping: one that is added, the same on every rank, and those that a load brings."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeropp.comm.agreement import ADDED
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import plain_settings
from zeropp.optimizer.slices import Slices, SliceStates

__all__ = ["add_group", "load_optimizer"]


def add_group(
    group: dict[str, Any], engine: Engine, optimizer: Optimizer, slices: Slices, apply_requires_grad: Callable[[], None]
) -> None:
    """Add a group to the wrapped optimizer, as its slices. Collective.

    Args:
        group: as torch takes it.
        engine: of the model.
        optimizer: the wrapped one.
        slices: in its groups.
        apply_requires_grad: takes over changes of ``requires_grad``.

    Raises:
        TypeError, ValueError: this rank's group is wrong.
        RuntimeError: another rank's is, or is another one.
    """
    # Before anything changes: a group that one rank refuses is added on none.
    _agree_on_group(group, engine, slices.in_groups)
    # What was unfrozen for this group must have its main weights before slices are cut.
    apply_requires_grad()
    # The object's own attribute refuses; see refuse_inner_group. torch gets the model's parameters, for its checks.
    type(optimizer).add_param_group(optimizer, group)
    before = set(slices.stepped)
    slices.put()
    for part in slices.stepped:
        # Gradients of parameters that were in no group have been reduced all the same, and can be stepped.
        if part not in before and part.arrived:
            part.show_gradient(True)
    slices.show_markers(any(part.shown for part in slices.stepped))


def _agree_on_group(group: dict[str, Any], engine: Engine, in_groups: Callable[[Tensor], bool]) -> None:
    """Refuse a group that cannot be added, on every rank. Collective.

    Args:
        group: as torch takes it; its ``params`` become a list.
        engine: of the model.
        in_groups: whether a parameter is in a group already.

    Raises:
        TypeError, ValueError: this rank's group is wrong.
        RuntimeError: another rank's is, or is another one.
    """
    error: Exception | None = None
    found = ""
    try:
        found = f"{_names(group, engine, in_groups)} with {plain_settings(group)}"
    except (TypeError, ValueError) as caught:
        error = caught
    # A rank that refuses says so, too: the others wait at this exchange.
    code = -1 if error is not None else zlib.crc32(found.encode())
    rows = engine.agreement.exchange(ADDED, [code], "at add_param_group()", "add_param_group()")
    if error is not None:
        raise error
    wrong = [rank for rank, row in enumerate(rows) if row != [code]]
    if wrong:
        raise RuntimeError(
            f"ranks {wrong} called add_param_group() with another group than rank {engine.comm.rank}, {found}, or with "
            "one that was refused there; nothing was added. Add the same group on every rank"
        )


def _names(group: dict[str, Any], engine: Engine, in_groups: Callable[[Tensor], bool]) -> list[str]:
    """The model's names of a group's parameters."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"param_group is {group!r}; expected a dict with 'params'")
    given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    if isinstance(given, (set, frozenset)):
        raise TypeError("params is a set, whose order may differ between ranks; give a list")
    # A generator would be empty the second time.
    group["params"] = list(given)
    names = {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}
    found = []
    for position, entry in enumerate(group["params"]):
        # Groups made from named_parameters() hold pairs.
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if id(parameter) not in names:
            raise ValueError(
                f"entry {position} of params, a {type(parameter).__name__}, is no parameter that zeropp partitioned; "
                "give parameters of the model that was wrapped, floating-point ones"
            )
        if in_groups(parameter) or names[id(parameter)] in found:
            raise ValueError(f"parameter {names[id(parameter)]!r} is in a group already, or twice in this one")
        found.append(names[id(parameter)])
    return found


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """As ``optimizer.load_state_dict(state)``, but its groups and its ``state`` stay the dicts that they were.

    torch puts new ones in their place. Where a scheduler holds them through another optimizer of the same dicts, as
    after Accelerate has put DeepSpeed's Adam in place of torch's, it would set learning rates that nobody reads.
    """
    groups, states = list(optimizer.param_groups), optimizer.state
    optimizer.load_state_dict(state)
    if isinstance(states, SliceStates) and optimizer.state is not states:
        states.clear()
        states.update(optimizer.state)
        optimizer.state = states
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups[:] = groups
