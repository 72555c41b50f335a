"""Seconds of each unit's step on the host, and the part of them that no order of work can hide."""

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
    """Context that yields a list; each unit's step on the host appends its seconds to the list."""
    seen: list[float] = []
    plain = HostStep._step

    def timed(*arguments: object) -> None:
        begin = time.perf_counter()
        plain(*arguments)  # type: ignore[arg-type]
        seen.append(time.perf_counter() - begin)

    with mock.patch.object(HostStep, "_step", timed):
        yield seen


def bound(rounds: Sequence[Sequence[float]], forward: float) -> float:
    """Return the unavoidable exposed seconds: max(0, max over i of (s_0 + ... + s_i - i * f)).

    Here s_i is the median time of unit i's step, and f is ``forward`` divided by the number of units.

    Args:
        rounds: seconds of each unit's step, measured without a forward beside it, for each round.
        forward: seconds of the whole forward; each unit is assumed to take the same part.
    """
    steps = [median(column) for column in zip(*rounds, strict=True)]
    return max([0.0, *(sum(steps[: i + 1]) - i * forward / len(steps) for i in range(len(steps)))])
