"""Random number generators of one rank: torch's on the CPU and the model's device, Python's, and numpy's if in use."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from zeropp.config.base import notify

__all__ = ["draw_anew", "random_state", "restore_random_state"]


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all of them, as values a checkpoint can keep; and the seed that torch's began with."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    # Where nobody has imported it, nobody draws from it.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # A dict, of whatever kind of generator there is.
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from states of the same rank."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        _restore_numpy(state["numpy"], state["seed"])


def _restore_numpy(state: dict[str, Any], seed: int) -> None:
    import numpy

    here, there = numpy.random.get_state(legacy=False)["bit_generator"], state["bit_generator"]
    if here == there:
        numpy.random.set_state(state)
        return
    notify(f"numpy's generator was a {there} when it was saved, and is a {here} here; it begins anew")
    numpy.random.seed(seed % 2**32)


def draw_anew(state: dict[str, Any], rank: int, world: int) -> None:
    """Begin with a seed made of the saved one, the rank and the number of ranks: each rank has another, every time."""
    seed = (int(state["seed"]) * 1_000_003 + rank * 8191 + world) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
