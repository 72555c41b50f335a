"""What Nsight Compute is asked for, how its answer is read, and what bounds a kernel by it."""

from __future__ import annotations

import csv
import io

__all__ = ["COUNTERS", "STALLS", "bound", "command", "parse", "stalls"]

COUNTERS = {
    "gpu__time_duration.sum": "us",  # asked for in base units, which are ns
    "dram__bytes.sum": "MB of DRAM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "launch__registers_per_thread": "registers",
}
"""Counters, and the columns that they become."""
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
"""What warps wait for: each a counter of warps that did, for each instruction issued."""
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_BUSY = 60.0  # percent of a peak from which on that bounds a kernel, as in Nsight Compute's own advice


def command(tool: str, log: str) -> list[str]:
    """The profiler's part of a command line. Clocks stay as they are, so that times are those of other tables."""
    metrics = ",".join([*COUNTERS, *map(_STALL.format, STALLS)])
    words = [tool, "--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    return [*words, "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics, "--log-file", log]


def parse(text: str) -> list[dict[str, str]]:
    """A row for each kernel, by the profiler's own columns.

    Raises:
        ValueError: there is no table.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table of counters, but {' '.join(lines[-3:])!r}")
    # Units are in the line below the names.
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))) if row["ID"]]


def number(row: dict[str, str], counter: str) -> float | None:
    """A counter's value; None where the profiler has none."""
    try:
        return float(row.get(counter, "").replace(",", ""))
    except ValueError:
        return None


def bound(row: dict[str, str]) -> str:
    """Which roof a kernel is under: "memory", "computing", or "latency" where neither is near its peak."""
    memory, computing = (number(row, name) or 0.0 for name in list(COUNTERS)[2:4])
    if max(memory, computing) < _BUSY:
        return "latency"
    return "memory" if memory >= computing else "computing"


def stalls(row: dict[str, str], most: int = 3) -> str:
    """The reasons that most warps waited for, with how many did for each instruction issued."""
    found = {name: number(row, _STALL.format(name)) or 0.0 for name in STALLS}
    ordered = sorted(found, key=lambda name: -found[name])[:most]
    return ", ".join(f"{name} {found[name]:.1f}" for name in ordered)
