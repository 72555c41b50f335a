"""Classes for parts, steps and outcomes of steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bench.gpu.scale import Scale

__all__ = ["Ended", "Outcome", "Part", "Row", "State", "Step", "last_lines", "last_words", "missing"]

Row = dict[str, str]
"""A row of a table: column -> text."""


class State(str, Enum):
    """The way in which a step ended."""

    MEASURED = "measured"
    WRONG = "wrong"  # a result is not as expected, or the program failed
    UNFINISHED = "unfinished"  # time ran out; the part should be started again
    ABSENT = "absent"  # the machine lacks something; a new start does not help


@dataclass(frozen=True)
class Ended:
    """The process of a step, after it has ended.

    Attributes:
        code: exit code; None if time ran out.
        log: file with the process's output.
        folder: folder with its results.
        seconds: duration of the process.
    """

    code: int | None
    log: Path
    folder: Path
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        state: the way in which the step ended.
        rows: rows for the table.
        why: reason if the step is wrong, unfinished or absent; else empty.
        artefacts: files to copy beside the report.
    """

    state: State
    rows: list[Row]
    why: str = ""
    artefacts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One process, and the function that reads its results.

    Attributes:
        name: short name; also the folder of stored results.
        command: command line; ``{folder}`` stands for the step's folder.
        seconds: time limit.
        read: function that makes the outcome from the ended process.
        environment: additional environment variables.
        lacks: reason why the step cannot run here, so that it is not started; None if it can.
        together: True if the step runs at the same time as neighbours with ``together``; such steps measure no times.
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
        name: name on the command line.
        title: title of the report.
        columns: columns of the table.
        steps: function that returns the steps, most useful first.
        notes: explanations below the table.
        needs: modules without which no step can run.
        keeps_wrong: True to write the report even if a step is wrong, because its rows are not measurements.
        seconds: default time limit; ``bench/gpu.sh`` kills the part a little later.
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
    """Return a text that names missing modules; None if all are installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def last_words(ended: Ended, lines: int = 4) -> str:
    """Return a text with the way in which a process ended, and the last lines of its output."""
    how = "time ran out" if ended.code is None else f"exit code {ended.code}"
    return "; ".join([how, *last_lines(ended, lines)])


def last_lines(ended: Ended, lines: int) -> list[str]:
    """Return the last non-empty lines of a process's output."""
    return [line.strip() for line in ended.log.read_text(errors="replace").splitlines() if line.strip()][-lines:]
