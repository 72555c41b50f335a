"""``reasons.json``: reasons why tests that pass under DeepSpeed fail under zeropp, and a check against a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peer_tests.outcomes import file_of

__all__ = ["FILE", "KINDS", "Reason", "load", "problems"]

FILE = Path(__file__).with_name("reasons.json")

KINDS = {
    "private": "asserts or calls what is private to DeepSpeed, which the reason names",
    "refused": "needs what zeropp refuses by name",
    "gpu": "needs a GPU here",
    "bug": "holds a bug of DeepSpeed's to be right; here is the documented behaviour",
}


@dataclass(frozen=True)
class Reason:
    """Reason for one test, or for all tests whose ids have a common prefix."""

    tests: str
    """Test id, or prefix of test ids followed by ``*``."""
    kind: str
    """One of :data:`KINDS`."""
    why: str

    def covers(self, name: str) -> bool:
        return name.startswith(self.tests[:-1]) if self.tests.endswith("*") else name == self.tests


def load(path: Path = FILE) -> list[Reason]:
    """Return the reasons in a file.

    Raises:
        ValueError: an entry has an unknown kind, no text, or appears twice.
    """
    reasons = [Reason(**entry) for entry in json.loads(path.read_text())]
    for reason in reasons:
        if reason.kind not in KINDS or not reason.why.strip():
            raise ValueError(
                f"{path.name}: {reason.tests}: kind {reason.kind!r} must be one of {sorted(KINDS)}, with a why"
            )
    twice = {reason.tests for reason in reasons if sum(reason.tests == other.tests for other in reasons) > 1}
    if twice:
        raise ValueError(f"{path.name} has two reasons for {sorted(twice)}; keep one")
    return reasons


def problems(reasons: Sequence[Reason], expected: Iterable[str], here: set[str], least: float) -> list[str]:
    """Return the contradictions between a run and the list of reasons, one line each.

    Args:
        reasons: list of reasons.
        expected: ids of tests that pass under DeepSpeed.
        here: ids of tests that pass under zeropp.
        least: smallest accepted share of ``expected`` that passes under zeropp.
    """
    expected = set(expected)
    files = {file_of(name) for name in expected}
    found = [
        f"{name} does not pass here, and has no reason"
        for name in sorted(expected - here)
        if not any(reason.covers(name) for reason in reasons)
    ]
    for reason in reasons:
        covered = {name for name in expected if reason.covers(name)}
        passing = sorted(covered & here)
        if passing:
            found.append(f"{reason.tests} has a reason, but passes: {', '.join(passing)}")
        # Without this check, every reason for a file that was not run would be reported.
        elif not covered and file_of(reason.tests.removesuffix("*")) in files:
            found.append(f"{reason.tests} has a reason, but there is no such test that passes under DeepSpeed")
    share = len(expected & here) / len(expected) if expected else 0.0
    if share < least:
        found.append(f"{share:.1%} of the tests that pass under DeepSpeed pass here; at least {least:.0%} have to")
    return found
