"""Draws the pictures of the documentation: ``python -m docs.pictures [name ...]`` writes ``docs/images/<name>.png``.

Bytes come from `zeropp.plan.traffic` and fetches from `zeropp.order.prefetch.make_plan`. The times in schedules are
examples: they are constants of this file, not measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

import zeropp
from zeropp.order.prefetch import Limits, make_plan

__all__ = ["PICTURES", "main"]

FOLDER = Path(__file__).parent / "images"
UNIT_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK, PALE, LINE = "#222222", "#F1F1EE", "#8A8A85"
FONT, SMALL = 11.0, 9.5


def new_axes(width: float, height: float, xmax: float, ymax: float) -> tuple[Figure, Axes]:
    """An empty white drawing area; x goes from 0 to ``xmax`` and y from 0 (top) to ``ymax``."""
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, xmax)
    axes.set_ylim(ymax, 0)
    axes.axis("off")
    return figure, axes


def text(axes: Axes, x: float, y: float, words: str, **looks: Any) -> None:
    """Words, centred on (x, y) unless ``looks`` says otherwise."""
    axes.text(x, y, words, **{"ha": "center", "va": "center", "fontsize": FONT, "color": INK, **looks})


def box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str = PALE, words: str = "", **looks: Any
) -> None:
    """A rectangle with its upper left corner at (x, y) and words in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.2))
    if words:
        white = colour not in (PALE, "white", "#CFCFC9", UNIT_COLOURS[1], UNIT_COLOURS[4])
        text(
            axes,
            x + width / 2,
            y + height / 2,
            words,
            **{"color": "white" if white else INK, "fontsize": SMALL, **looks},
        )


def frame(axes: Axes, x: float, y: float, width: float, height: float, title: str) -> None:
    """A rounded outline with a title at its upper left."""
    looks: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.12",
        "facecolor": "none",
        "edgecolor": LINE,
        "linewidth": 1.2,
    }
    axes.add_patch(FancyBboxPatch((x, y), width, height, **looks))
    text(axes, x + 0.15, y + 0.25, title, ha="left", fontsize=SMALL, color=LINE, weight="bold")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK, **looks: Any) -> None:
    """A straight arrow."""
    style = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 1.6, "color": colour, **looks}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def draw_levels() -> Figure:
    """Units, a flat buffer, and the levels at which its weights are stored."""
    figure, axes = new_axes(11, 5.4, 22, 10.8)
    text(axes, 0.4, 0.5, "Model: each block is a unit", ha="left", weight="bold")
    names = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    for index, name in enumerate(names):
        box(axes, 0.4, 1.1 + 0.72 * index, 3.6, 0.6, UNIT_COLOURS[index] if index == 2 else PALE, name, fontsize=FONT)

    text(
        axes,
        5.6,
        0.5,
        "Flat buffer of unit blocks.1: every parameter starts on a block of 256 elements",
        ha="left",
        weight="bold",
    )
    parts = (("attention.qkv", 6.2), ("attention.out", 2.8), ("up", 3.3), ("down", 2.7), ("padding", 0.95))
    x = 5.6
    arrow(axes, (4.1, 2.85), (5.4, 1.75), UNIT_COLOURS[2])
    for name, width in parts:
        pad = name == "padding"
        box(
            axes,
            x,
            1.1,
            width,
            0.9,
            "#D8D8D3" if pad else UNIT_COLOURS[2],
            "0" if pad else name,
            color=INK if pad else "white",
        )
        x += width

    rows = (
        (3.4, "level 4: main weights and optimizer states", 4, "each rank has a quarter of the flat buffer"),
        (5.9, "level 2: secondary shard (hpZ), renewed once a step", 2, "each rank has a half; each node has one copy"),
        (8.4, "level 1: unsharded, only while the unit is used", 1, "each rank has all of it"),
    )
    owners = (0, 2, 1, 3)  # of the quarters, in the order of the buffer: piece index = rank with its digits reversed
    for y, title, level, note in rows:
        text(axes, 5.6, y, title, ha="left", weight="bold")
        text(axes, 21.55, y, note, ha="right", fontsize=SMALL, color=LINE)
        for node in (0, 1):
            for local in (0, 1):
                rank = 2 * node + local
                left = 5.6 + 4.0 * rank + 0.35 * node
                box(axes, left, y + 0.4, 3.6, 0.8, PALE)
                piece = {4: owners.index(rank), 2: local, 1: 0}[level]
                width = 3.6 / level
                words = {4: "1/4", 2: "1/2", 1: "whole"}[level]
                box(axes, left + piece * width, y + 0.4, width, 0.8, UNIT_COLOURS[2], words)
                text(axes, left + 1.8, y + 1.5, f"node {node}, rank {rank}", fontsize=SMALL)
    for y, words in ((5.1, "refresh\nbetween nodes"), (7.6, "gather\ninside a node")):
        arrow(axes, (4.9, y - 0.9), (4.9, y + 1.0))
        text(axes, 4.6, y, words, ha="right", fontsize=SMALL)
    return figure


Span = tuple[float, float, str, int]
LANES = {
    "compute": "compute",
    "gather local": "gathers\ninside a node",
    "gather cross": "gathers\nbetween nodes",
    "reduce local": "reductions\ninside a node",
    "reduce cross": "reductions\nbetween nodes",
}


def simulate(units: int, forward: float, hop: dict[str, float], limits: Limits) -> dict[str, list[Span]]:
    """Return the times of one training step in stage 3 over two hops, (start, end, label, unit) for each stream.

    Args:
        units: number of equal blocks of the model, of one element each.
        forward: time of a block's forward; its backward takes twice as long.
        hop: time of a unit's message over each class of links, "cross" and "local".
        limits: limits of the prefetch plan, in units.
    """
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    free = dict.fromkeys(lanes, 0.0)

    def run(lane: str, after: float, time: float, label: str, unit: int) -> float:
        start = max(free[lane], after)
        lanes[lane].append((start, start + time, label, unit))
        free[lane] = start + time
        return free[lane]

    order = [*range(units)]
    live: frozenset[int] = frozenset()
    arrived: dict[int, float] = {}
    now = 0.0
    for backward in (False, True):
        uses = order[::-1] if backward else order
        plan = make_plan(uses, [] if backward else order[::-1], live, [1] * units, limits)
        live = plan.live
        for unit, issued in zip(uses, plan.issue, strict=True):
            for other in issued:
                crossed = run("gather cross", now, hop["cross"], "gather", other)
                arrived[other] = run("gather local", crossed, hop["local"], "gather", other)
            done = run("compute", arrived[unit], forward * (1 + backward), "backward" if backward else "forward", unit)
            if backward:
                summed = run("reduce local", done, hop["local"], "reduce", unit)
                run("reduce cross", summed, hop["cross"], "reduce", unit)
            now = lanes["compute"][-1][0]
    end = max(free.values())
    lanes["compute"].append((end, end + 0.8, "step", -1))
    return lanes


def draw_schedule() -> Figure:
    """One step on the compute stream and on the four comm streams."""
    lanes = simulate(5, 1.0, {"cross": 0.8, "local": 0.42}, Limits(prefetch=1, live=2, reuse=1))
    end = max(stop for spans in lanes.values() for _, stop, _, _ in spans)
    figure, axes = new_axes(12, 4.9, end + 3.3, 9.8)
    left = 2.6
    for row, (lane, title) in enumerate(LANES.items()):
        y = 1.1 + 1.5 * row
        text(axes, left - 0.2, y + 0.55, title, ha="right")
        axes.plot([left, left + end], [y + 1.2] * 2, color="#DDDDDA", linewidth=1)
        for start, stop, label, unit in lanes[lane]:
            colour = INK if unit < 0 else UNIT_COLOURS[unit]
            box(axes, left + start, y, stop - start, 1.1, colour, "step" if label == "step" else str(unit), fontsize=9)
    for label in ("forward", "backward"):
        spans = [(start, stop) for start, stop, name, _ in lanes["compute"] if name == label]
        text(axes, left + (spans[0][0] + spans[-1][1]) / 2, 0.55, label, weight="bold")
        axes.plot([left + spans[0][0], left + spans[-1][1]], [0.9] * 2, color=LINE, linewidth=1.2)
    arrow(axes, (left, 8.75), (left + end, 8.75), LINE, linewidth=1.0)
    text(axes, left + end / 2, 9.1, "time", fontsize=SMALL, color=LINE)
    words = "number: unit    limits: one unit gathered ahead of use; a unit stays unsharded only if it is used next"
    text(axes, left, 9.45, words, ha="left", fontsize=SMALL)
    return figure


def layers() -> torch.nn.Module:
    """A model of 0.2 B parameters that takes no memory."""
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 16)


def draw_hops() -> Figure:
    """Bytes that cross nodes in a step, as `zeropp.plan.traffic` counts them, for four configurations."""
    stage3: dict[str, Any] = {"stage": 3}
    hpz = {**stage3, "zero_hpz_partition_size": 8}
    gradients = {**hpz, "zero_quantized_gradients": True}
    plus = {**gradients, "zero_quantized_weights": True}
    delta4 = {"zero_optimization": gradients, "zeropp": {"weight_codec": "delta4"}}
    rows = (
        ("stage 3", {"zero_optimization": stage3}),
        ("hpZ: a second copy of\nthe weights in each node", {"zero_optimization": hpz}),
        ("ZeRO++: hpZ, int8 weights,\nint4 gradients", {"zero_optimization": plus}),
        ("delta4: 4-bit differences\nof weights, int4 gradients", delta4),
    )
    model = layers()
    figure, axes = new_axes(11, 5.6, 22, 11.2)
    text(axes, 11.0, 0.45, "Megabytes that each of two nodes of 8 GPUs sends to the other in a step", weight="bold")
    text(
        axes,
        11.0,
        1.0,
        "0.2 billion parameters, bf16, one micro-batch; counted by zeropp.plan.traffic",
        fontsize=SMALL,
        color=LINE,
    )
    totals = []
    for row, (name, config) in enumerate(rows):
        y = 1.7 + 2.35 * row
        text(axes, 5.0, y + 0.85, name, ha="right")
        for x in (5.5, 18.2):
            frame(axes, x, y, 3.4, 1.7, "node 0" if x < 10 else "node 1")
            for gpu in range(8):
                box(axes, x + 0.2 + 0.38 * gpu, y + 0.65, 0.33, 0.8, UNIT_COLOURS[0])
        plan = zeropp.plan.traffic(model, {**config, "bf16": {"enabled": True}}, 16, 8)
        sent = {False: 0, True: 0}
        for one in plan.rows:
            if one.way.link == "cross":
                sent[one.way.kind == "reduce"] += plan.local * one.nbytes * one.times
        totals.append(plan.between_nodes)
        widest = totals[0] / 7.8
        for line, reduced in enumerate((False, True)):
            width = sent[reduced] / widest
            colour = UNIT_COLOURS[2 if reduced else 1]
            place = y + 0.22 + 0.72 * line
            box(axes, 9.3, place, width, 0.5, colour)
            words = f"{'gradients' if reduced else 'weights'} {sent[reduced] / 1e6:,.0f}"
            text(axes, 9.3 + width + 0.15, place + 0.26, words, ha="left", fontsize=SMALL)
        arrow(axes, (9.0, y + 1.6), (18.1, y + 1.6), LINE, linewidth=1.2)
        text(axes, 17.9, y + 0.6, f"{totals[-1] / totals[0]:.2f} x", ha="right", weight="bold")
    return figure


def tiers_of(zero: dict[str, Any]) -> tuple[dict[str, float], ...]:
    """Bytes a parameter between steps in GPU memory, in host memory and in files, AdamW's states included."""
    model, ranks = layers(), 8
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}
    plan = zeropp.plan.memory(model, {"zero_optimization": zero, "bf16": {"enabled": True}}, ranks)
    shard = sum(parameter.numel() for parameter in model.parameters()) / ranks
    places = [{name: nbytes / shard for name, nbytes in terms.items()} for terms in (plan.terms, plan.host, plan.disk)]
    for terms in places:
        terms["staging"] = sum(nbytes for name, nbytes in terms.items() if name.endswith("_staging"))
    if "offload_optimizer" not in zero:
        places[0]["optimizer_states"] = 8.0  # the plan counts no states of an optimizer that steps on the GPU
    return tuple(places)


def draw_tiers() -> Figure:
    """The storage tier of each tensor for four configurations, as `zeropp.plan.memory` counts them."""
    figure, axes = new_axes(11.5, 4.9, 23, 9.8)
    columns = ((4.6, 6.0, "GPU memory"), (10.9, 6.0, "host memory"), (17.2, 5.4, "NVMe files"))
    for x, width, name in columns:
        text(axes, x + width / 2, 0.5, name, weight="bold")
    looks = {
        "wire_weights": ("bf16\nshard", UNIT_COLOURS[4], 0.95),
        "main_weights": ("main\nweights", UNIT_COLOURS[0], 1.2),
        "gradients": ("grad-\nients", UNIT_COLOURS[2], 1.0),
        "optimizer_states": ("Adam\nstates", UNIT_COLOURS[1], 1.5),
        "staging": ("stag-\ning", "#CFCFC9", 0.8),
    }
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local_nvme", "max_in_cpu": 0}
    files = {"offload_optimizer": {key: nvme[key] for key in ("device", "nvme_path")}, "offload_param": nvme}
    rows: tuple[tuple[str, dict[str, Any]], ...] = (
        ("no offload", {}),
        ("offload_optimizer: cpu", {"offload_optimizer": cpu}),
        ("offload_optimizer: cpu\noffload_param: cpu", {"offload_optimizer": cpu, "offload_param": cpu}),
        ("offload_optimizer: nvme\noffload_param: nvme,\nmax_in_cpu: 0", files),
    )
    for row, (name, zero) in enumerate(rows):
        y = 1.0 + 2.0 * row
        text(axes, 4.3, y + 0.85, name, ha="right")
        for place, ((x, width, _), terms) in enumerate(zip(columns, tiers_of(zero), strict=True)):
            box(axes, x, y, width, 1.75, "#FAFAF8")
            left = x + 0.15
            if place == 0:
                box(
                    axes, left, y + 0.2, 2.0, 1.35, "#E4E4DF", "unsharded\nunits,\nactivations", fontsize=8.0, color=INK
                )
                left += 2.0
            for term, (words, colour, wide) in looks.items():
                nbytes = terms.get(term, 0.0)
                if nbytes >= 0.5:
                    box(axes, left, y + 0.2, wide, 1.35, colour, f"{words}\n{nbytes:.3g}", fontsize=8.0)
                    left += wide
    words = "Numbers: bytes for each parameter of a rank's shard (bf16, AdamW), counted by zeropp.plan.memory"
    text(axes, 0.3, 9.35, words, ha="left", fontsize=SMALL)
    return figure


def draw_hidden_step() -> Figure:
    """The optimizer step on the host: waited for, and hidden behind the next forward."""
    units, forward, step, backward, decides = 5, 1.0, 0.85, 2.0, 0.5
    figure, axes = new_axes(12, 4.6, 25.6, 9.2)
    left = 3.0

    def panel(y: float, title: str, *, hidden: bool) -> float:
        text(axes, 0.2, y - 0.15, title, ha="left", weight="bold")
        for down, lane in ((0.5, "GPU"), (1.75, "host steps")):
            text(axes, left - 0.2, y + down + 0.5, lane, ha="right")
        box(axes, left, y + 0.5, backward, 1.0, LINE, "backward")
        box(axes, left + backward, y + 0.5, decides, 1.0, INK)
        clock = begin = left + backward + decides
        stepped = [begin + step * (unit + 1) for unit in range(units)]
        for unit, end in enumerate(stepped):
            box(axes, end - step, y + 1.75, step, 1.0, UNIT_COLOURS[unit], str(unit))
            start = max(clock, end if hidden else stepped[-1])
            if start > clock:
                looks: dict[str, Any] = {"facecolor": "none", "edgecolor": LINE, "hatch": "////", "linewidth": 0}
                axes.add_patch(Rectangle((clock, y + 0.5), start - clock, 1.0, **looks))
                text(axes, (clock + start) / 2, y + 0.28, "exposed", fontsize=SMALL, color=LINE)
            box(axes, start, y + 0.5, forward, 1.0, UNIT_COLOURS[unit], f"F{unit}")
            clock = start + forward
        box(axes, clock, y + 0.5, 2 * forward * units, 1.0, LINE, "backward")
        return clock + 2 * forward * units

    waits = panel(0.7, '"lazy_step": false: step() returns when all units are stepped', hidden=False)
    hides = panel(4.6, "The default: the forward of a unit waits for the step of that unit", hidden=True)
    arrow(axes, (waits, 8.0), (hides, 8.0), UNIT_COLOURS[5])
    text(axes, hides - 0.1, 8.0, "saved in each step", ha="right", fontsize=SMALL, color=UNIT_COLOURS[5])
    words = "black: step() computes norm, clipping and skip    number: unit    F: forward    "
    words += "exposed = max(0, max_i(step[0..i] - forward[0..i-1]))"
    text(axes, 0.2, 8.8, words, ha="left", fontsize=SMALL)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "levels": draw_levels,
    "schedule": draw_schedule,
    "hops": draw_hops,
    "offload-tiers": draw_tiers,
    "hidden-step": draw_hidden_step,
}


def main(names: list[str]) -> None:
    """Write the pictures of these names, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        PICTURES[name]().savefig(FOLDER / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1:])
