"""Query of Nsight Compute: the counters, the command line, the reading of its output, and a kernel's bottleneck."""

from __future__ import annotations

import csv
import io

__all__ = ["COUNTERS", "STALLS", "bound", "command", "parse", "stalls"]

COUNTERS = {
    "gpu__time_duration.sum": "us",  # reported in the base unit ns
    "dram__bytes.sum": "MB of DRAM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "launch__registers_per_thread": "registers",
}
"""Counter -> column of the table."""
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
"""Reasons for which warps wait. Each has a counter: waiting warps per issued instruction."""
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_BUSY = 60.0  # percent of the peak above which memory or computing bounds a kernel, as in Nsight Compute's advice


def command(tool: str, log: str) -> list[str]:
    """Return the profiler's part of a command line. Clocks stay unlocked, as in the runs for other tables."""
    metrics = ",".join([*COUNTERS, *map(_STALL.format, STALLS)])
    words = [tool, "--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    return [*words, "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics, "--log-file", log]


def parse(text: str) -> list[dict[str, str]]:
    """Return one row per kernel, with the profiler's column names.

    Args:
        text: the profiler's output.

    Raises:
        ValueError: the output contains no table.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table of counters, but {' '.join(lines[-3:])!r}")
    # Rows without an ID, such as the line of units below the header, are left out.
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))) if row["ID"]]


def number(row: dict[str, str], counter: str) -> float | None:
    """Return a counter's value; None if the profiler did not report it."""
    try:
        return float(row.get(counter, "").replace(",", ""))
    except ValueError:
        return None


def bound(row: dict[str, str]) -> str:
    """Return the bottleneck of a kernel: "memory", "computing", or "latency" if both are below 60 % of their peaks."""
    memory, computing = (number(row, name) or 0.0 for name in list(COUNTERS)[2:4])
    if max(memory, computing) < _BUSY:
        return "latency"
    return "memory" if memory >= computing else "computing"


def stalls(row: dict[str, str], most: int = 3) -> str:
    """Return the most frequent reasons for waiting, with the number of waiting warps per issued instruction."""
    found = {name: number(row, _STALL.format(name)) or 0.0 for name in STALLS}
    ordered = sorted(found, key=lambda name: -found[name])[:most]
    return ", ".join(f"{name} {found[name]:.1f}" for name in ordered)
