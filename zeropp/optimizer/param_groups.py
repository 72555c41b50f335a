"""Changes of the wrapped optimizer after wrapping: groups that are added, and switches between train and eval mode.

All ranks must add the same groups. Schedule-free optimizers (arXiv 2405.15682) edit weights in their ``train()`` and
``eval()``, so a switch counts as a change of weights.
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
from zeropp.optimizer.sharded_params import ShardedParams, show_gradients

__all__ = ["add_group", "switch_mode"]


def add_group(
    group: dict[str, Any],
    engine: Engine,
    optimizer: Optimizer,
    slices: ShardedParams,
    apply_requires_grad: Callable[[], None],
) -> None:
    """Add a parameter group to the wrapped optimizer, with slices in place of its parameters. Collective.

    Args:
        group: parameter group as ``torch.optim.Optimizer.add_param_group`` takes it.
        engine: engine of the model.
        optimizer: the wrapped optimizer.
        slices: this rank's slices in the optimizer's groups.
        apply_requires_grad: function that applies pending changes of ``requires_grad``.

    Raises:
        TypeError, ValueError: this rank's group is invalid.
        RuntimeError: another rank's group is invalid or differs from this rank's.
    """
    # Check on all ranks before any change: if one rank refuses the group, no rank adds it.
    _agree_on_group(group, engine, slices.in_groups)
    # Parameters that were unfrozen for this group need main weights before slices are cut.
    apply_requires_grad()
    # Call the class's method, because refuse_inner_group replaces it on the object. Pass the model's parameters, so
    # that torch can check them.
    type(optimizer).add_param_group(optimizer, group)
    before = set(slices.stepped)
    slices.assign()
    for part in slices.stepped:
        # Gradients of trained parameters are reduced even if the parameters are in no group, so they can be stepped
        # now.
        if part not in before and part.source is not None and part.source.arrived:
            show_gradients([part], [True])
    slices.show_markers(any(part.shown for part in slices.stepped))


def _agree_on_group(group: dict[str, Any], engine: Engine, in_groups: Callable[[Tensor], bool]) -> None:
    """Raise on every rank if some rank's group cannot be added or differs from the others. Collective.

    Args:
        group: parameter group as torch takes it; its ``params`` are replaced by a list.
        engine: engine of the model.
        in_groups: function that returns True if a parameter is already in a group.

    Raises:
        TypeError, ValueError: this rank's group is invalid.
        RuntimeError: another rank's group is invalid or differs from this rank's.
    """
    error: Exception | None = None
    found = ""
    try:
        found = f"{_names(group, engine, in_groups)} with {plain_settings(group)}"
    except (TypeError, ValueError) as caught:
        error = caught
    # A rank with an invalid group takes part in the exchange, because the other ranks wait for it there.
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
    """Return the model's names of a group's parameters, and raise if the group is invalid."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"param_group is {group!r}; expected a dict with 'params'")
    given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    if isinstance(given, (set, frozenset)):
        raise TypeError("params is a set, whose order may differ between ranks; give a list")
    # Store a list, because a generator could be read only once.
    group["params"] = list(given)
    names = {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}
    found = []
    for position, entry in enumerate(group["params"]):
        # Entries are (name, parameter) pairs if the group was made from named_parameters().
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
    """Call ``train`` or ``eval`` of the wrapped optimizer, and count a change of mode as new weights.

    Every rank calls it. A call that does not change the mode sends nothing. A call that changes it checks that all
    ranks make the same call. Schedule-free optimizers record the mode in their groups.

    Args:
        engine: engine of the model.
        optimizer: the wrapped optimizer.
        name: "train" or "eval".
    """
    engine.require_idle(f"{name}() of the optimizer")
    # A refresh in flight reads the main weights, which the optimizer may edit now.
    engine.wait_for_refresh()
    before = _mode_of(optimizer)
    getattr(optimizer, name)()
    # Compare the mode after the call: only the optimizer can decide if the call changes anything, and a call without a
    # change must send nothing.
    if _mode_of(optimizer) != before:
        engine.agreement.require_same_call(f"{name}() of the optimizer")
        engine.weights_changed(engine.trainable_buffers, delay_refresh=True)


def _mode_of(optimizer: Optimizer) -> list[Any]:
    """Return a value that changes when ``train()`` or ``eval()`` switches the mode of a schedule-free optimizer.

    The mode is in the settings of the groups. For optimizers that store it elsewhere, the value has the autograd
    version counters of the slices, which increase when a switch edits the weights.
    """
    versions = [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
    return [*(plain_settings(group) for group in optimizer.param_groups), versions]
