"""Optimizers with two modes, whose ``train()`` and ``eval()`` edit weights: schedule-free ones (arXiv 2405.15682)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import plain_settings

__all__ = ["switch_mode"]


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
