"""Outcomes of the tests, read from the JSON lines that ``inside/peer_record.py`` writes."""

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
    """Outcome of one test in one environment."""

    outcome: str
    """One of :data:`OUTCOMES`. A test that started and has no later record is a "timeout"."""
    why: str = ""
    """Last part of the error, or the reason of the skip."""


def read(path: Path) -> dict[str, Outcome]:
    """Return test id -> outcome from a file of JSON lines; empty if there is no file.

    The last line of a test counts, but a failure is never replaced: a test may pass and its teardown fail, or the other
    way round.
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
    """Return the file in a test id, relative to the checkout's ``tests``."""
    return name.partition("::")[0]


def count(outcomes: Mapping[str, Outcome]) -> dict[str, Counter[str]]:
    """Return file -> number of its tests by outcome."""
    files: dict[str, Counter[str]] = {}
    for name, outcome in outcomes.items():
        files.setdefault(file_of(name), Counter())[outcome.outcome] += 1
    return files
