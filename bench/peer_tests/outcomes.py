"""What became of each test, from the lines that ``inside/peer_record.py`` writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OUTCOMES", "Outcome", "count", "file_of", "passed", "read"]

OUTCOMES = ("passed", "failed", "skipped", "timeout")


@dataclass(frozen=True)
class Outcome:
    """What became of one test in one environment."""

    outcome: str
    """One of :data:`OUTCOMES`; of a test that was begun and never ended, "timeout"."""
    why: str = ""
    """An error's end, or the reason of a skip."""


def read(path: Path) -> dict[str, Outcome]:
    """Test id -> outcome, from a file of JSON lines; nothing from one that is not there.

    The last line of a test counts, except that nothing that follows makes good a failure: a test may pass, and what
    takes it down may fail, or the other way round.
    """
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        name, outcome = record["id"], record["outcome"]
        if name in found and found[name].outcome == "failed":
            continue
        found[name] = Outcome("timeout" if outcome == "started" else outcome, record.get("why", ""))
    return found


def passed(outcomes: Mapping[str, Outcome]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.outcome == "passed"}


def file_of(name: str) -> str:
    """The file, below the checkout's ``tests``, that a test id begins with."""
    return name.partition("::")[0]


def count(outcomes: Mapping[str, Outcome]) -> dict[str, Counter[str]]:
    """File -> how many of its tests had each outcome."""
    files: dict[str, Counter[str]] = {}
    for name, outcome in outcomes.items():
        files.setdefault(file_of(name), Counter())[outcome.outcome] += 1
    return files
