"""What a step takes on the host unit by unit, and what of it no order of work could hide."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from statistics import median
from unittest import mock

from zeropp.optimizer.host_step import HostStep

__all__ = ["bound", "unit_steps"]


@contextlib.contextmanager
def unit_steps() -> Iterator[list[float]]:
    """Seconds of each unit's step on the host, as they come."""
    seen: list[float] = []
    plain = HostStep._step

    def timed(*arguments: object) -> None:
        begin = time.perf_counter()
        plain(*arguments)  # type: ignore[arg-type]
        seen.append(time.perf_counter() - begin)

    with mock.patch.object(HostStep, "_step", timed):
        yield seen


def bound(rounds: Sequence[Sequence[float]], forward: float) -> float:
    """Seconds of a step that must show: max over i of (s_0 + ... + s_i - i f), or 0.

    Args:
        rounds: seconds of each unit's step, with nothing beside it.
        forward: seconds of the whole forward, of which each unit has the same part.
    """
    steps = [median(column) for column in zip(*rounds, strict=True)]
    return max([0.0, *(sum(steps[: i + 1]) - i * forward / len(steps) for i in range(len(steps)))])
