"""Changes of the wrapped optimizer after wrapping: groups that are added, and switches of its mode.

A group may be added or loaded, the same on every rank. Schedule-free optimizers (arXiv 2405.15682) edit weights in
their ``train()`` and ``eval()``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.comm.agreement import ADDED
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import plain_settings
from zeropp.optimizer.sharded_params import ShardedParams

__all__ = ["add_group", "switch_mode"]


def add_group(
    group: dict[str, Any],
    engine: Engine,
    optimizer: Optimizer,
    slices: ShardedParams,
    apply_requires_grad: Callable[[], None],
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
    slices.assign()
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


@torch.no_grad()
def switch_mode(engine: Engine, optimizer: Optimizer, name: str) -> None:
    """Call ``train`` or ``eval`` of a wrapped optimizer; what it makes of this rank's slices are new weights.

    Every rank calls it, as often as it likes: nothing travels unless the mode changes, which such optimizers note in
    their groups. Where it does, the ranks make sure that they all are here.
    """
    engine.require_idle(f"{name}() of the optimizer")
    # A refresh under way still reads the main weights, which the optimizer is about to edit.
    engine.wait_for_refresh()
    before = _mode_of(optimizer)
    getattr(optimizer, name)()
    # Asked after the fact: only the optimizer knows whether a mode is on already, and such a call must cost nothing.
    if _mode_of(optimizer) != before:
        engine.agreement.require_same_call(f"{name}() of the optimizer")
        engine.weights_changed(engine.trainable_buffers, for_now=True)


def _mode_of(optimizer: Optimizer) -> list[Any]:
    """Settings of the groups; and versions of the slices, of an optimizer that keeps its mode elsewhere."""
    versions = [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
    return [*(plain_settings(group) for group in optimizer.param_groups), versions]
