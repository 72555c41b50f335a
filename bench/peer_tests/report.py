"""A run as a table, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bench.peer_tests.outcomes import OUTCOMES, Outcome, count, file_of, passed

__all__ = ["last_line", "missed", "table"]


def table(there: Mapping[str, Outcome], here: Mapping[str, Outcome]) -> str:
    """Outcomes by file under both, in Markdown; and how many of those that pass there pass here."""
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
    """What passes there and not here, a line each, with the end of its error."""
    found = []
    for name in sorted(passed(there) - passed(here)):
        # A file that could not be imported has an outcome of its own, and its tests have none.
        outcome = here.get(name) or here.get(file_of(name)) or Outcome("not run")
        found.append(f"{name}: {outcome.outcome}: {last_line(outcome.why)}")
    return found


def last_line(why: str, most: int = 200) -> str:
    """The line that names an error: the first that pytest marks with an E, else the last that has a name of one."""
    lines: Sequence[str] = [line.strip() for line in why.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("E ")]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    chosen = (marked[:1] or named[-1:] or list(lines[-1:]) or [""])[0]
    # Where files lie on this machine is of no use to others.
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", chosen.removeprefix("E ").strip())[:most]
