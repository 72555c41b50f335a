"""Parts, their steps, and what comes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bench.gpu.scale import Scale

__all__ = ["Ended", "Outcome", "Part", "Row", "State", "Step", "last_words"]

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
        log: what it printed.
        folder: where it wrote its results.
    """

    code: int | None
    log: Path
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What a step has come to.

    Attributes:
        state: how it ended.
        rows: for the table.
        why: what is wrong, unfinished or absent; empty if nothing is.
        artefacts: files to keep beside the report.
    """

    state: State
    rows: list[Row]
    why: str = ""
    artefacts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One process and how its results are read.

    Attributes:
        name: short; kept results are found by it.
        command: with ``{folder}`` in place of the folder that it writes to.
        seconds: that it may take.
        read: makes the outcome of what it left.
        environment: variables besides the caller's.
        lacks: why it cannot run here; then it is not started.
    """

    name: str
    command: Sequence[str]
    seconds: float
    read: Callable[[Ended], Outcome]
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: str | None = None


@dataclass(frozen=True)
class Part:
    """One of the five.

    Attributes:
        name: as on the command line.
        title: of its report.
        columns: of its table.
        steps: in the order of their worth.
        notes: how to read the table.
        needs: modules without which none of its steps can run.
    """

    name: str
    title: str
    columns: Sequence[str]
    steps: Callable[[Scale], list[Step]]
    notes: Sequence[str] = ()
    needs: Sequence[str] = ()


def last_words(ended: Ended, lines: int = 4) -> str:
    """How a process ended, and what it said last."""
    how = "time ran out" if ended.code is None else f"exit code {ended.code}"
    said = [line.strip() for line in ended.log.read_text(errors="replace").splitlines() if line.strip()]
    return "; ".join([how, *said[-lines:]])
