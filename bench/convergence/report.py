"""Report of finished runs: paired confidence intervals, tables and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from bench.common.machine import describe, machine
from bench.convergence.arms import ARMS

REFERENCE, CODED = "plain", "zeropp"
FIRST, LAST = "<!-- measured -->", "<!-- end of measured -->"

# 0.975 quantiles of Student's t for 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Run = dict[str, object]


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, and half the width of its 95 % confidence interval (Student's t)."""

    mean: float
    half: float

    @property
    def separable(self) -> bool:
        """True if the interval does not contain zero."""
        return abs(self.mean) > self.half

    def text(self, digits: int, factor: float = 1.0) -> str:
        """Return the text "mean +- half" with a plus-minus sign, both times ``factor``."""
        return f"{factor * self.mean:.{digits}f} ± {factor * self.half:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values, one per seed, with half the width of its 95 % confidence interval.

    Raises:
        ValueError: there are fewer than two values, or more than T975 has quantiles for.
    """
    count = len(values)
    if not 2 <= count <= len(T975) + 1:
        raise ValueError(f"{count} values; an interval needs 2 to {len(T975) + 1}")
    return Interval(statistics.mean(values), T975[count - 2] * statistics.stdev(values) / math.sqrt(count))


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each arm, sorted by seed.

    Raises:
        ValueError: arms have different seeds or settings, so runs cannot be paired.
    """
    arms: dict[str, list[Run]] = {}
    for each in sorted(runs, key=lambda each: each["seed"]):
        arms.setdefault(each["arm"], []).append(each)
    seeds = {arm: [each["seed"] for each in own] for arm, own in arms.items()}
    if len({tuple(own) for own in seeds.values()}) > 1:
        raise ValueError(f"arms have different seeds: {seeds}")
    if len({json.dumps(each["settings"], sort_keys=True) for each in runs}) > 1:
        raise ValueError("runs have different settings")
    return {arm: arms[arm] for arm in ARMS if arm in arms}


def after_warmup(each: Run, key: str) -> float:
    """Return the mean of a run's samples after the warmup steps."""
    warmup = each["settings"]["warmup"]
    return statistics.mean(value for step, value in zip(each["step"], each[key], strict=True) if step > warmup)


def metric(own: Sequence[Run], key: str = "all") -> Interval:
    """Return the relative error of Adam's average of gradients, over seeds."""
    return interval([after_warmup(each, key) for each in own])


def times_below(base: Sequence[Run], own: Sequence[Run]) -> Interval:
    """Return the factor by which ``own``'s error is smaller than ``base``'s, in pairs of runs with equal seeds."""
    return interval([after_warmup(a, "all") / after_warmup(b, "all") for a, b in zip(base, own, strict=True)])


def loss_difference(base: Sequence[Run], own: Sequence[Run]) -> Interval:
    """Return ``own``'s final validation loss relative to ``base``'s, minus 1, in pairs of runs with equal seeds."""
    return interval([b["final"] / a["final"] - 1 for a, b in zip(base, own, strict=True)])


def verdict(found: Interval) -> str:
    """Return "worse", "better" or "not separable" for a difference of losses."""
    if not found.separable:
        return "not separable"
    return "worse" if found.mean > 0 else "better"


def table(runs: Sequence[Run]) -> str:
    """Return the Markdown report: settings, one line per arm, errors by class of parameter, and required bounds."""
    arms = by_arm(runs)
    settings, seeds = runs[0]["settings"], len(arms[REFERENCE])
    lines = [
        f"GPT of {runs[0]['numel'] / 1e6:.2f} M parameters ({settings['layers']} layers, width {settings['d_model']}), "
        f"{settings['steps']} steps, {seeds} seeds, {settings['nodes']} nodes x {settings['local']} ranks, "
        f"{settings['batch']} x {settings['seq_len']} bytes per rank and step. {_machine(runs)}",
        "",
        "| arm | bits per weight | bits per gradient: intra-node, inter-node | error of Adam's average, % "
        "| times lower than ZeRO++ | error of one step, % | validation loss | above plain, % | difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_row(name, arms) for name in arms]
    lines += ["", "| error of Adam's average, % | embeddings | matrices | vectors |", "|---|---:|---:|---:|"]
    for name, own in arms.items():
        cells = [metric(own, key).text(2, 100) for key in ("embedding", "2-D", "1-D")]
        lines.append("| " + " | ".join([ARMS[name].label, *cells]) + " |")
    return "\n".join([*lines, "", *_must_hold(arms)]) + "\n"


def _row(name: str, arms: dict[str, list[Run]]) -> str:
    own, base = arms[name], arms[REFERENCE]
    bits = statistics.mean(after_warmup(each, "weight_bits") for each in own)
    links = [f"{own[0]['gradient_bits'][link]:.2f}" for link in ("local", "cross") if link in own[0]["gradient_bits"]]
    width = f"16 or {bits:.2f}" if ARMS[name].weights == "lossless" else f"{bits:.2f}"
    cells = [ARMS[name].label, width, ", ".join(links), metric(own).text(2, 100)]
    cells.append(times_below(arms[CODED], own).text(2) if _compares(name, arms) else "")
    cells.append(f"{100 * statistics.mean(after_warmup(each, 'single') for each in own):.2f}")
    cells.append(f"{statistics.mean(each['final'] for each in own):.4f}")
    if name == REFERENCE:
        cells += ["", ""]
    else:
        found = loss_difference(base, own)
        cells += [found.text(2, 100), verdict(found)]
    return "| " + " | ".join(cells) + " |"


def _compares(name: str, arms: dict[str, list[Run]]) -> bool:
    """Return True if the arm's gradients are quantized and can be compared with the arm of plain ZeRO++."""
    return CODED in arms and name != CODED and "zero_quantized_gradients" in ARMS[name].zero


def _machine(runs: Sequence[Run]) -> str:
    step = statistics.mean(each["seconds"] / each["settings"]["steps"] for each in runs)
    hours = sum(each["seconds"] for each in runs) / 3600
    about = machine("cpu" if runs[0]["settings"]["device"] == "cpu" else "cuda")
    return (
        f"{about['date']}: {step:.2f} s per step, {hours:.1f} hours for all runs. "
        f"{describe({**about, 'torch': runs[0]['torch']})}"
    )


def _must_hold(arms: dict[str, list[Run]]) -> list[str]:
    """Return a table of the targets for error feedback, with the measured means; [] without arms with feedback.

    The error must be lower than that of ZeRO++ without feedback. With rotation it must also be lower than that of int4
    on both hops.
    """
    found = []
    for name in arms:
        if not name.startswith(("loco", "hadamard-loco")):
            continue
        bound = 4.0 if name.startswith("hadamard") else 2.0
        for base in (CODED, "int4") if bound == 4.0 else (CODED,):
            if base in arms:
                times = times_below(arms[base], arms[name])
                met = "met" if times.mean >= bound else "NOT MET"
                measured = f"error of Adam's average {times.text(2)} times lower than {ARMS[base].label}"
                found.append(f"| {ARMS[name].label} | {measured} | {bound:g} times | {met} |")
        loss = loss_difference(arms[REFERENCE], arms[name])
        met = "met" if not loss.separable or abs(loss.mean) <= 0.003 else "NOT MET"
        measured = f"validation loss {loss.text(2, 100)} % above plain"
        found.append(f"| {ARMS[name].label} | {measured} | the interval contains 0, or within 0.3 % | {met} |")
    return ["| arm | measured | target | |", "|---|---|---|---|", *found] if found else []


def chart(runs: Sequence[Run], path: Path) -> None:
    """Draw the error of Adam's average over steps, and the final validation losses with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = by_arm(runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    colours = {name: f"C{index % 10}" for index, name in enumerate(arms)}
    for index, (name, own) in enumerate(arms.items()):
        steps, curve = own[0]["step"], [statistics.mean(row) for row in zip(*(e["all"] for e in own), strict=True)]
        smooth = [statistics.mean(curve[max(0, i - 9) : i + 1]) for i in range(len(curve))]
        style = "-" if index < 10 else "--"
        left.plot(steps, [100 * v for v in smooth], style, color=colours[name], label=ARMS[name].label, linewidth=1.2)
    left.set(yscale="log", xlabel="step", ylabel="error of Adam's average of gradients, %")
    left.legend(fontsize="x-small")
    names = [name for name in arms if name != REFERENCE]
    for place, name in enumerate(names):
        found = loss_difference(arms[REFERENCE], arms[name])
        right.errorbar(100 * found.mean, place, xerr=100 * found.half, fmt="o", color=colours[name], capsize=3)
    right.axvline(0.0, color="black", linewidth=0.8)
    right.set_yticks(range(len(names)), [ARMS[name].label for name in names], fontsize="small")
    right.invert_yaxis()
    right.set_xlabel("validation loss above plain, %, with 95 % interval")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save(runs: Sequence[Run], root: Path, name: str) -> list[Path]:
    """Write the tables, the plot and the data; return their paths.

    Args:
        runs: finished runs.
        root: root of the repository.
        name: name of another comparison than that of the docs; its tables are written to bench/results. Empty to put
            the tables into docs/convergence.md, between its marks.

    Raises:
        ValueError: docs/convergence.md lacks the marks.
    """
    results = root / "bench" / "results"
    results.mkdir(parents=True, exist_ok=True)
    raw = results / f"{date.today()}_convergence{'-' + name if name else ''}.json"
    if name:
        page, picture, text = raw.with_suffix(".md"), raw.with_suffix(".png"), table(runs)
    else:
        page, picture = root / "docs" / "convergence.md", root / "docs" / "convergence.png"
        before, first, rest = page.read_text().partition(FIRST)
        _, last, after = rest.partition(LAST)
        if not first or not last:
            raise ValueError(f"{page} needs the marks {FIRST} and {LAST} around what was measured")
        text = f"{before}{FIRST}\n{table(runs)}{LAST}{after}"
    chart(runs, picture)
    page.write_text(text)
    raw.write_text(json.dumps([_short(each) for each in runs]) + "\n")
    return [page, picture, raw]


def _short(each: Run) -> Run:
    """Return a run with its samples rounded to five digits, which are enough for plots and means."""
    return {key: [_rounded(v) for v in value] if isinstance(value, list) else value for key, value in each.items()}


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
