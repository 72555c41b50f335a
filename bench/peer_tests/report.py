"""Table of a run, and the tests that pass only under DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bench.peer_tests.outcomes import OUTCOMES, Outcome, count, file_of, passed

__all__ = ["last_line", "missed", "table"]


def table(there: Mapping[str, Outcome], here: Mapping[str, Outcome]) -> str:
    """Return a Markdown table of outcomes per file in both environments, with the number of tests that pass in both."""
    rows = [
        ["file", *(f"DeepSpeed {name}" for name in OUTCOMES), *(f"here {name}" for name in OUTCOMES), "both pass"],
        ["---", *["---:"] * (2 * len(OUTCOMES) + 1)],
    ]
    of_there, of_here, both = count(there), count(here), passed(there) & passed(here)
    for file in sorted({*of_there, *of_here}):
        cells = [of.get(file, {}).get(name, 0) for of in (of_there, of_here) for name in OUTCOMES]
        rows.append([file, *map(str, cells), str(sum(file_of(name) == file for name in both))])
    sums = [sum(int(row[column]) for row in rows[2:]) for column in range(1, len(rows[0]))]
    rows.append(["all", *map(str, sums)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def missed(there: Mapping[str, Outcome], here: Mapping[str, Outcome]) -> list[str]:
    """Return one line for each test that passes under DeepSpeed and not under zeropp, with the line of its error."""
    found = []
    for name in sorted(passed(there) - passed(here)):
        # If a file cannot be imported, only the file has a record, and not its tests.
        outcome = here.get(name) or here.get(file_of(name)) or Outcome("not run")
        found.append(f"{name}: {outcome.outcome}: {last_line(outcome.why)}")
    return found


def last_line(why: str, most: int = 200) -> str:
    """Return the line of a text that names the error: the first with pytest's mark E, else the last with "Error"."""
    lines: Sequence[str] = [line.strip() for line in why.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("E ")]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    chosen = (marked[:1] or named[-1:] or list(lines[-1:]) or [""])[0]
    # Remove the folders of paths, which only exist on this machine.
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", chosen.removeprefix("E ").strip())[:most]
