"""Parts, their steps, and outcomes of steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bench.gpu.scale import Scale

__all__ = ["Ended", "Outcome", "Part", "Row", "State", "Step", "last_lines", "last_words", "missing"]

Row = dict[str, str]
"""A line of the table: text by column."""


class State(str, Enum):
    """How a step ended."""

    MEASURED = "measured"
    WRONG = "wrong"  # a result that is not what it must be, or a program that fails
    UNFINISHED = "unfinished"  # time ran out: to be started again
    ABSENT = "absent"  # the machine lacks something; starting again changes nothing


@dataclass(frozen=True)
class Ended:
    """A step's process, after its end.

    Attributes:
        code: its exit code; None if its time ran out.
        log: its output.
        folder: of its results.
        seconds: that it took.
    """

    code: int | None
    log: Path
    folder: Path
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        state: how it ended.
        rows: for the table.
        why: the reason if it is wrong, unfinished or absent; else empty.
        artefacts: files to keep beside the report.
    """

    state: State
    rows: list[Row]
    why: str = ""
    artefacts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One process, and the function that reads its results.

    Attributes:
        name: short; kept results are found by it.
        command: with ``{folder}`` in place of the folder that it writes to.
        seconds: that it may take.
        read: makes the outcome of what it left.
        environment: variables besides the caller's.
        lacks: why it cannot run here; then it is not started.
        together: True if it runs at the same time as its neighbours that say so, too: it times nothing.
    """

    name: str
    command: Sequence[str]
    seconds: float
    read: Callable[[Ended], Outcome]
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: str | None = None
    together: bool = False


@dataclass(frozen=True)
class Part:
    """A part of ``bench/gpu.sh``.

    Attributes:
        name: as on the command line.
        title: of its report.
        columns: of its table.
        steps: in the order of their worth.
        notes: how to read the table.
        needs: modules without which none of its steps can run.
        keeps_wrong: True if its report is written also where a step is wrong: its rows are no figures.
        seconds: that it may take, unless the command line says fewer; ``bench/gpu.sh`` ends it a little later.
    """

    name: str
    title: str
    columns: Sequence[str]
    steps: Callable[[Scale], list[Step]]
    notes: Sequence[str] = ()
    needs: Sequence[str] = ()
    keeps_wrong: bool = False
    seconds: float = 345.0


def missing(*modules: str) -> str | None:
    """The reason why a step cannot run that needs these modules; None if all are there."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def last_words(ended: Ended, lines: int = 4) -> str:
    """The way a process ended, and the last lines of its output."""
    how = "time ran out" if ended.code is None else f"exit code {ended.code}"
    return "; ".join([how, *last_lines(ended, lines)])


def last_lines(ended: Ended, lines: int) -> list[str]:
    """The last lines of a process's output that are not empty."""
    return [line.strip() for line in ended.log.read_text(errors="replace").splitlines() if line.strip()][-lines:]
