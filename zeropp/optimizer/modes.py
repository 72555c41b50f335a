"""Edits of weights between steps: by the user, and by optimizers with two modes.

Schedule-free optimizers (arXiv 2405.15682) edit weights in their ``train()`` and ``eval()``. The user edits the slices
in the parameter groups: see [Note: edits of slices].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import plain_settings
from zeropp.optimizer.slices import Slices
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.unit import UnitState

__all__ = ["switch_mode", "take_weight_edits"]


@torch.no_grad()
def switch_mode(engine: Engine, optimizer: Optimizer, name: str) -> None:
    """Call ``train`` or ``eval`` of a wrapped optimizer; what it makes of this rank's slices are new weights.

    Every rank calls it, as often as it likes: nothing travels unless the mode changes, which such optimizers note in
    their groups. Where it does, the ranks make sure that they all are here.
    """
    engine.require_idle(f"{name}() of the optimizer")
    # A refresh under way still reads the main weights, which the optimizer is about to edit.
    engine.refresh.wait()
    before = _state(optimizer)
    getattr(optimizer, name)()
    # Asked after the fact: only the optimizer knows whether a mode is on already, and such a call must cost nothing.
    if _state(optimizer) != before:
        engine.agreement.require_same_call(f"{name}() of the optimizer")
        engine.weights_changed(engine.trainable_buffers, for_now=True)


def _state(optimizer: Optimizer) -> list[Any]:
    """Settings of the groups; and versions of the slices, of an optimizer that keeps its mode elsewhere."""
    versions = [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
    return [*(plain_settings(group) for group in optimizer.param_groups), versions]


@torch.no_grad()
def take_weight_edits(engine: Engine, slices: Slices) -> list[str]:
    """Let a forward that begins compute with weights that the user has edited in the groups since the last one.

    Nothing travels where nothing was edited. See [Note: edits of slices].

    Returns:
        Names of parameters; some were edited in a way that other ranks may not know of, and the forward misses that.
    """
    if slices.take_replaced():
        engine.note_storages()
    edited = [buffer for buffer in slices.buffers if buffer.edited]
    by_groups = slices.edited_by_groups()
    if engine.refresh.is_put_off:
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
    source = buffer.source
    kept = buffer.paths.refresh is not None or (source is not None and source.follows)
    return kept or engine.unit_of[id(buffer.parameters[0])].state is not UnitState.SHARDED
