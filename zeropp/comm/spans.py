"""Named ranges for torch.profiler, around what the engine issues; free of cost while nothing is recorded."""

from __future__ import annotations

import contextlib

import torch

from zeropp._compat import profiler_enabled

__all__ = ["span"]

_NOTHING = contextlib.nullcontext()


def span(what: str, unit: str) -> contextlib.AbstractContextManager[object]:
    """A range ``zeropp::<what> <unit>`` in a profile that is being recorded."""
    return torch.profiler.record_function(f"zeropp::{what} {unit}") if profiler_enabled() else _NOTHING
