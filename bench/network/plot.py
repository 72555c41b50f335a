"""Plot of the results: bars of bytes, and tokens per second as bars (one rate) or as lines (several rates)."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.network.measured import BASE, Measured, rate_name

__all__ = ["LOOKS", "colour", "draw", "label"]

# Name and colour of each system, equal in all plots. The colours also differ for red-green colour blindness. There are
# too many colours to match with a legend, so bars have their names beside them, and lines have markers.
LOOKS = {
    "ddp": ("DDP", "#000000"),
    "ddp_zero1": ("DDP + ZeroRedundancyOptimizer", "#EABBBB"),
    "fsdp2": ("FSDP2", "#0072B2"),
    "hsdp": ("FSDP2, sharded inside nodes (HSDP)", "#56B4E9"),
    "fsdp2_hpz": ("FSDP2 (resharded to the node)", "#009CEA"),
    "fsdp2_a2a": ("FSDP2 (reduce-scatter by all-to-all)", "#BBCBEA"),
    "fsdp2_two_hop": ("FSDP2, with two-hop collectives", "#5D75EA"),
    "fsdp2_pp": ("FSDP2 with zeropp.fsdp2: int8, int4", "#004EEA"),
    "deepspeed": ("DeepSpeed ZeRO-3", "#7F6E4C"),
    "deepspeed_hpz": ("DeepSpeed ZeRO-3 + hpZ", "#BECC7A"),
    "zeropp": ("zeropp stage 3, nodes as launched", "#EA5D75"),
    "zeropp_s0": ("zeropp stage 0", "#A5A542"),
    "zeropp_s1": ("zeropp stage 1", "#2EEA4E"),
    "zeropp_s2": ("zeropp stage 2", "#CC00AA"),
    "zeropp_s3": ("zeropp stage 3", "#D55E00"),
    "zeropp_mics": ("zeropp MiCS", "#CC0022"),
    "zeropp_hpz": ("zeropp, a second copy in each node (hpZ)", "#E69F00"),
    "zeropp_pp": ("zeropp ZeRO++: int8 weights, int4 gradients", "#009E73"),
    "zeropp_pp_loco": ("zeropp ZeRO++ with error feedback (LoCo)", "#CC79A7"),
    "zeropp_delta4": ("zeropp delta4: 4-bit weight differences", "#EA004E"),
    "zeropp_lossless": ("zeropp lossless: exact weight differences", "#7F4C6E"),
}
_MARKERS = "osD^v<>"
_INCHES = 0.3  # height of a bar with its gap


def _parts(system: str) -> tuple[str, int]:
    """Return a system's base name and its number of micro-batches: "zeropp_pp_x4" has four."""
    base, _, times = system.partition("_x")
    return base, int(times or 1)


def label(system: str) -> str:
    """Return the displayed name of a system."""
    base, times = _parts(system)
    return LOOKS[base][0] + (f", {times} micro-batches" if times > 1 else "")


def colour(system: str) -> str:
    """Return the color of a system; more micro-batches make it darker."""
    base, times = _parts(system)
    channels = (int(LOOKS[base][1][start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel / times**0.4):02X}" for channel in channels)


def _bars(axis: Axes, systems: list[str], values: list[float], form: str) -> None:
    """Draw one bar per system, from top to bottom, with its value at its end."""
    drawn = axis.barh([label(name) for name in systems], values, color=[colour(name) for name in systems])
    for bar, name in zip(drawn, systems, strict=True):
        bar.set_hatch("///" if _parts(name)[1] > 1 else "")
        bar.set_edgecolor("white")
    axis.bar_label(drawn, fmt=form, padding=3, fontsize=9)
    axis.margins(x=0.14, y=0.02)


def _lines(axis: Axes, systems: list[str], rates: list[float], speeds: dict[str, list[float]]) -> None:
    """Draw one line per system; the legend has the order of the lines at the lowest rate."""
    for name in sorted(systems, key=lambda name: -speeds[name][0]):
        base, times = _parts(name)
        marker = _MARKERS[list(LOOKS).index(base) % len(_MARKERS)]
        style = "--" if times > 1 else "-"
        axis.plot(rates, speeds[name], color=colour(name), marker=marker, linestyle=style, label=label(name))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=90)
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("Mbit/s between nodes")
    axis.set_ylabel("tokens a second, all ranks")
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9, frameon=False)


def draw(measured: Measured) -> Figure:
    """Return the plot. If no rate was limited, it shows the speeds without a limit."""
    systems = measured.systems("free", None)
    limited = sorted((rate, kind) for kind, rate in measured.kinds if rate is not None)
    several = len(limited) > 1
    height = 1.5 + _INCHES * len(systems)
    figure = Figure(figsize=(17, max(height, 4)) if several else (13, height), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=not several)
    sent = [measured.found["counted"][name]["device"] / measured.unit for name in systems]
    _bars(left, systems, sent, "%.2f")
    left.invert_yaxis()  # put the first system on top
    left.set_xlabel("bytes that a node sends in a step, in units of M (n-1)/n\nless is better")
    if several:
        speeds = {name: [measured.speed(kind, rate, name) for rate, kind in limited] for name in systems}
        _lines(right, systems, [rate for rate, _ in limited], speeds)
    else:
        rate, kind = limited[0] if limited else (None, "free")
        _bars(right, systems, [measured.speed(kind, rate, name) for name in systems], "%.0f")
        right.tick_params(axis="y", left=False, labelleft=False)
        right.set_xlabel(f"tokens a second, all ranks; more is better\n{rate_name(kind, rate, label(BASE))}")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    s = measured.settings
    size = f"{measured.found['numel'] / 1e6:.1f} M parameters in {s['dtype']}"
    title = f"{s['nodes']} nodes of {s['local']} CPU ranks, {size}; TCP's congestion control: {measured.found['tcp']}"
    figure.suptitle(title, fontsize=10)
    return figure
