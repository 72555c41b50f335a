"""Plots of ``bench.offload``: comparison with other systems, hidden part of a step, and timeline of a step.

python -m bench.offload.plot bench/results/2026-11-25_offload-peers-one-rank.json  # writes a .png beside the .json file
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from bench.offload.peers_report import visible

__all__ = ["hidden", "peers", "timeline"]

_COMPUTES, _STEPS, _WAITS, _MEMORY, _DISK = "#0072B2", "#D55E00", "#E6C79A", "#56B4E9", "#009E73"


def peers(measured: dict[str, Any]) -> Figure:
    """Return a plot with bars of each system's step time, and at the right its memory and files, if measured."""
    systems = measured["systems"]
    names = list(systems)
    seen = [max(median(visible(name, systems)), 0.0) for name in names]
    whole = [median(systems[name]["step_s"]) for name in names]
    rest = [total - part for total, part in zip(whole, seen, strict=True)]
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    left.barh(names, rest, color=_COMPUTES, label="forward and backward")
    left.bar_label(
        left.barh(names, seen, left=rest, color=_STEPS, label="of the step, visible"),
        [f"{total:.2f}" for total in whole], padding=3, fontsize=9,
    )  # fmt: skip
    left.set_xlabel("seconds a step")
    left.margins(x=0.12)
    memory, disk = ([systems[name].get(key, 0) / 2**20 for name in names] for key in ("peak_bytes", "disk_bytes"))
    right.barh(names, memory, color=_MEMORY, height=0.5, align="edge", label="memory of a rank")
    right.barh(names, disk, color=_DISK, height=-0.3, align="edge", label="files of all ranks")
    right.set_xlabel("MiB")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    left.invert_yaxis()  # put the first system on top
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def hidden(measured: dict[str, Any]) -> Figure:
    """Return a plot with bars of ``step()`` and the next forward, eager and lazy, and lines for forward and bound."""
    figures = {name: 1000 * seconds for name, seconds in measured["figures"].items()}
    ways = ["eager", "lazy"]
    steps = [figures[f"{way}: step() alone"] for way in ways]
    wholes = [figures[f"{way}: step() and the next forward"] for way in ways]
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axis = figure.subplots()
    axis.barh(ways, steps, color=_STEPS, height=0.5, label="step()")
    forwards = axis.barh(
        ways, [whole - step for whole, step in zip(wholes, steps, strict=True)], left=steps, color=_WAITS, height=0.5,
        label="the forward after it",
    )  # fmt: skip
    axis.bar_label(forwards, [f"{whole:.1f}" for whole in wholes], padding=3, fontsize=9)
    alone = figures["a forward with nothing to wait for"]
    axis.axvline(alone, color="black", linewidth=1, label="a forward alone")
    axis.axvline(alone + figures["that and a tenth of the step"], color="black", linestyle=":", label="the bound")
    axis.set_xlabel("milliseconds")
    axis.margins(x=0.12)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def timeline(measured: dict[str, Any]) -> Figure:
    """Return a plot with one axis per way: the parts of the last period on their resources, and its bound."""
    lines = {"cores": ("step on host",), "bus up": ("copy up",), "bus down": ("copy down",)}
    colours = {"forward": _COMPUTES, "backward": _MEMORY, "step on host": _STEPS, "copy up": _DISK, "copy down": _WAITS}
    lines["device"] = ("backward", "forward")
    ways = measured["ways"]
    figure = Figure(figsize=(10, 0.6 + 1.5 * len(ways)), layout="constrained")
    for axis, (way, found) in zip(
        figure.subplots(len(ways), sharex=True, squeeze=False)[:, 0], ways.items(), strict=True
    ):
        for row, kinds in enumerate(lines.values()):
            for kind in kinds:
                parts = [(1000 * a, 1000 * (b - a)) for what, a, b in found["spans"] if what == kind]
                axis.broken_barh(
                    parts, (row - 0.4, 0.8), color=colours[kind], edgecolor="white", linewidth=0.3, label=kind
                )
        axis.axvline(1000 * found["marks"][0], color="black", linewidth=0.8, label="step() is called")
        if (least := measured["figures"][way]["bound"]) is not None:
            axis.axvline(1000 * least, color="black", linestyle=":", label="bound of the period")
        axis.set_yticks(range(len(lines)), list(lines))
        axis.set_title(way, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("milliseconds from the start of a backward to the start of the next one")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def main(path: Path) -> None:
    measured = json.loads(path.read_text())
    draw = peers if "systems" in measured else timeline if "ways" in measured else hidden
    figure = draw(measured)
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
