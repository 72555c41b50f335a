"""Changes of the parameter groups after wrapping, and the check that ranks agree on their numbers.

A group may be added or loaded, the same on every rank. Weights may be edited between steps: by the user, who edits the
slices in the groups (see [Note: edits of slices]), and by schedule-free optimizers (arXiv 2405.15682), in their
``train()`` and ``eval()``. Learning rates may be set: ranks that step their slices at different rates would silently
diverge, as after a ReduceLROnPlateau that each fed with its own loss. So a hash of all numbers travels with the step
sync.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.comm.agreement import ADDED, Agreement
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import plain_settings
from zeropp.optimizer.sharded_params import ShardedParams
from zeropp.params.unit import FlatBuffer, UnitState

__all__ = ["GroupSettings", "add_group", "fold", "switch_mode", "take_weight_edits"]


# Groups that are added, or loaded.


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


# Edits of weights in the groups.


@torch.no_grad()
def take_weight_edits(engine: Engine, slices: ShardedParams) -> list[str]:
    """Let a forward that begins compute with weights that the user has edited in the groups since the last one.

    Nothing travels where nothing was edited. See [Note: edits of slices].

    Returns:
        Names of parameters; some were edited in a way that other ranks may not know of, and the forward misses that.
    """
    if slices.take_replaced():
        engine.note_storages()
    edited = [buffer for buffer in slices.buffers if buffer.edited]
    by_groups = slices.edited_by_groups()
    if engine.refresh_is_delayed:
        # What is put off begins now, with weights as they are.
        known = True
    elif by_groups or (edited and not slices.divided):
        engine.agreement.require_same_call("a forward after an edit of weights in optimizer.param_groups")
        engine.weights_changed(engine.trainable_buffers)
        known = True
    else:
        known = False
    if by_groups:
        slices.accept_edits()
    for buffer in edited:
        buffer.accept_edits()
    return [] if known else [name for buffer in edited if _keeps_old_weights(engine, buffer) for name in buffer.names]


def _keeps_old_weights(engine: Engine, buffer: FlatBuffer) -> bool:
    """Tell whether the next forward computes with a copy of the weights, and gathers no new ones."""
    source = buffer.wire_copy
    kept = buffer.paths.refresh is not None or (source is not None and source.follows)
    return kept or engine.unit_of[id(buffer.parameters[0])].state is not UnitState.SHARDED


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


# The check that every rank's groups have the same numbers.

# As few as the hash of what is issued has: the square must be exact in float64.
_BITS = 24
# Any odd number, so that no bit is lost; less 2**64, since it multiplies int64.
_ODD = 0x9E3779B97F4A7C15 - 2**64
# What each rank has of its own: its slices, and their names.
_OWN = ("params", "param_names")


class GroupSettings:
    """Numbers in the groups of one optimizer.

    Args:
        groups: gives them as they are now.
        agreement: for naming what differs.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]], agreement: Agreement) -> None:
        self._groups = groups
        self._agreement = agreement

    def code(self) -> int | Tensor:
        """24 bits; an int64 scalar on a card if some setting is a tensor there, which the host must not wait for."""
        numbers = []
        tensors = []
        for name, value in self._numbers():
            if isinstance(value, Tensor):
                tensors.append(value)
                # Its place and kind are compared on the host, its bits on the device.
                numbers.append((name, "on a card"))
            else:
                numbers.append((name, _written(value)))
        # Not hash(), which Python salts for each process.
        host = zlib.crc32(repr(numbers).encode()) >> (32 - _BITS)
        return fold(host, tensors) if tensors else host

    def disagreement(self, *, late: bool = False) -> RuntimeError:
        """The error for codes that differ: which setting of which group, and what each rank has. Collective.

        Of a step that is over, ``late``, it has what this rank has, and is local: one rank alone may ask for it, in the
        middle of what the others do.
        """
        # There is an error already, and waiting for the device costs nothing any more.
        own = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._numbers()}
        if late:
            return self._late_disagreement(own)
        tables = self._agreement.exchange_objects(own, "comparing the settings of parameter groups")
        names = dict.fromkeys(name for table in tables for name in table)
        differing = [name for name in names if len({repr(table.get(name)) for table in tables}) > 1]
        given = {name: [table.get(name) for table in tables] for name in differing[:3]}
        if not differing:
            return RuntimeError(
                "parameter groups differed between ranks at the last step, which was left out for it, and are alike by "
                "now. Every rank must set the same numbers before it calls step()"
            )
        return RuntimeError(
            "parameter groups differ between ranks, and nothing was stepped: "
            + "; ".join(f"{name} is {_by_rank(values)}" for name, values in given.items())
            + ("; ..." if differing[3:] else "")
            + ". Every rank must set the same: give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _late_disagreement(self, own: dict[str, Any]) -> RuntimeError:
        # Rates first: they are what schedulers set, and there may be many groups.
        own = dict(sorted(own.items(), key=lambda each: not each[0].endswith(" lr")))
        shown = ", ".join(f"{name} is {value!r}" for name, value in [*own.items()][:8])
        return RuntimeError(
            "parameter groups differed between ranks at the last step, which was left out for it on every rank; rank "
            f"{self._agreement.comm.rank} has: {shown}{', ...' if len(own) > 8 else ''}. Every rank must set the same: "
            "give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """(group and key, number); tensors that the host can read at once count as numbers, too."""
        for index, group in enumerate(self._groups()):
            for key, value in group.items():
                if key not in _OWN:
                    yield from _numbers_in(f"group {index} {key}", value)


def fold(code: int, tensors: Sequence[Tensor]) -> Tensor:
    """A hash and the bits of tensors as another hash: an int64 scalar of 24 bits, on their device; nobody waits."""
    total: Tensor = torch.full((), code, dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        # In float64, so that one value has the same bits in every dtype that a rank may give it.
        for bits in tensor.detach().double().reshape(-1).view(torch.int64).unbind():
            total = (total ^ bits) * _ODD
    folded: Tensor = (total >> (64 - _BITS)) & (2**_BITS - 1)
    return folded


def _numbers_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.tolist() if value.is_cpu else value
    elif isinstance(value, (list, tuple)):
        for position, entry in enumerate(value):
            yield from _numbers_in(f"{name}[{position}]", entry)
    # Strings and objects were compared when ranks wrapped; numbers are what schedulers change. A bool is a number,
    # too.
    elif isinstance(value, Real):
        yield name, value


def _written(value: Any) -> str:
    """The value to nine digits, since mathematical libraries of different machines may differ in later ones."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.9g}" if isinstance(value, float) and math.isfinite(value) else repr(value)


def _by_rank(values: list[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on ranks {of[:4]}{'...' if of[4:] else ''}" for value, of in ranks.items())
