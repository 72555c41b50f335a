"""Runs of ``examples/train_gpt.py`` with a small model on the ranks of the pool: flags, metrics and signals."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import train_gpt

__all__ = ["DATA", "SMALL", "own_signals", "records", "trains"]

DATA = Path(train_gpt.__file__).parent
"""The folder of training data: the example's own sources."""

SMALL = [
    *("--layers=2", "--d-model=64", "--heads=2", "--seq-len=32", "--no-bf16"),
    *("--lr=3e-3", "--warmup=2", "--log-every=1", "--validate-windows=8"),
]


def trains(metrics: Path, flags: Sequence[str]) -> int:
    """Run the example on this rank and return its exit status. The rank must not have a process group yet."""
    with own_signals():
        return train_gpt.main([f"--metrics={metrics}", f"--data={DATA}", *SMALL, *flags])


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM at the end of the block, so that a pool process keeps its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def records(path: Path, event: str) -> list[dict]:
    """Return the records of one event in a metrics file; an incomplete last line is left out."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in map(json.loads, lines) if record["event"] == event]
