"""Plot of the results of ``bench.checkpoint``: seconds until the call returns, and until all bytes are on the disk.

python -m bench.checkpoint.plot bench/results/2026-11-25_checkpoint.json  # writes a .png beside the .json file
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

__all__ = ["draw"]

_WAITS, _WRITES = "#D55E00", "#E6C79A"


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Return a plot with bars of median times for each way, and at the right the additional memory of a rank."""
    warm = [row for row in rows if row["warm"]]
    ways = list(dict.fromkeys(row["way"] for row in warm))
    blocked, done = ([median(r[key] for r in warm if r["way"] == way) for way in ways] for key in ("blocked", "done"))
    peak = [max(row["peak"] for row in warm if row["way"] == way) for way in ways]
    figure = Figure(figsize=(11, 0.8 + 0.45 * len(ways)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    left.barh(ways, done, color=_WRITES, label="until all is on the disk")
    left.barh(ways, blocked, color=_WAITS, height=0.4, label="until the call returns")
    for place, (wait, end) in enumerate(zip(blocked, done, strict=True)):
        left.text(end, place, f" {wait:.2f}, {end:.2f}", va="center", fontsize=9)
    left.set_xlabel("seconds, of the slowest rank")
    left.margins(x=0.15)
    left.legend(fontsize=8, frameon=False)
    right.bar_label(right.barh(ways, peak, color="#0072B2"), fmt="%.0f", padding=3, fontsize=9)
    right.set_xlabel("MiB of a rank's memory, besides")
    right.margins(x=0.2)
    left.invert_yaxis()  # put the first way on top
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def main(path: Path) -> None:
    draw(json.loads(path.read_text())["rows"]).savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
