"""Compiled modules that would replay CUDA graphs of weights that have moved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zeropp._compat import replays_cuda_graphs

__all__ = ["refuse_cuda_graphs"]


def refuse_cuda_graphs(model: nn.Module, device: torch.device, moves: Callable[[nn.Parameter], bool]) -> None:
    """Refuse modules that are compiled to CUDA graphs and use weights that every gather brings to another address.

    torch takes parameters to stay where they are, and records a graph anew when one has moved: at each pass, until it
    gives up and runs without.

    Args:
        model: with such modules, perhaps.
        device: it runs on; elsewhere than on a card these modes do nothing.
        moves: whether a parameter is gathered at each use.

    Raises:
        ValueError: which modules they are, and what to do.
    """
    if device.type != "cuda":
        return
    found = [
        path
        for path, module in model.named_modules()
        if replays_cuda_graphs(module) and any(map(moves, module.parameters()))
    ]
    if found:
        raise ValueError(
            f"modules {found[:5]}{'...' if found[5:] else ''} are compiled to CUDA graphs, which want weights to stay "
            "at one address, and stage 3 gathers theirs at another each time. Compile them with "
            'torch.compile(module) or mode="max-autotune-no-cudagraphs"; or let weights stay whole, in stage 1 or 2, '
            "or by stage3_param_persistence_threshold"
        )
