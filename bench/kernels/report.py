"""Table and bar chart of a result file of ``pytest bench/kernels --benchmark-json=FILE``.

python -m bench.kernels.report FILE...                # prints the table
python -m bench.kernels.report FILE... --save NAME    # also writes bench/results/<date>_NAME.{md,json,png}
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from bench.common.machine import describe, machine

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, object]


def rows_of(measured: dict) -> list[Row]:
    return [entry["extra_info"] for entry in measured["benchmarks"] if "operation" in entry.get("extra_info", {})]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one line per operation, contender and size."""
    if not rows:
        raise SystemExit("the file holds no measurements of bench/kernels")
    lines = [
        f"{rows[0]['device']}. {describe(machine('cpu' if 'CPU' in rows[0]['device'] else 'cuda'))} GB/s of bytes that "
        "must move; percent of a copy in that run.",
        "",
        "| operation | by | MiB of bf16 | us | GB/s | % of copy | target on a GPU |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        percent = f"{row['percent_of_copy']:.0f}" if row["percent_of_copy"] is not None else "-"
        has_target = row["target"] and row["contender"] == "zeropp_kernels" and "CPU" not in row["device"]
        target = f"{row['target']}" if has_target else ""
        lines.append(
            f"| {row['operation']} | {row['contender']} | {row['mebibytes']} | {1e6 * row['seconds']:.0f} "
            f"| {row['gigabytes_per_second']:.2f} | {percent} | {target} |"
        )
    return "\n".join(lines) + "\n"


def chart(rows: Sequence[Row], path: Path) -> None:
    """Draw bars of GB/s by operation and contender, and a line at the copy's GB/s.

    The chart shows one size: among those that most contenders were measured at, the largest.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contenders_at = {row["mebibytes"]: set() for row in rows}
    for row in rows:
        contenders_at[row["mebibytes"]].add(row["contender"])
    size = max(contenders_at, key=lambda mebibytes: (len(contenders_at[mebibytes]), mebibytes))
    shown = [row for row in rows if row["mebibytes"] == size]
    names = list(dict.fromkeys(row["operation"] for row in shown))
    contenders = list(dict.fromkeys(row["contender"] for row in shown))
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(names) + 1.5), layout="constrained")
    height = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        own = {row["operation"]: row["gigabytes_per_second"] for row in shown if row["contender"] == contender}
        places = [names.index(name) + index * height for name in own]
        axes.barh(places, list(own.values()), height=height, label=contender)
    copies = [row["gigabytes_per_second"] for row in shown if row["operation"] == "copy"]
    if copies:
        axes.axvline(copies[0], color="black", linewidth=0.8, linestyle="--", label="copy")
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(f"GB/s, {size} MiB of bfloat16 values, {shown[0]['device']}")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--save", metavar="NAME", default="")
    given = parser.parse_args(argv)
    rows = [row for file in given.files for row in rows_of(json.loads(file.read_text()))]
    rows.sort(key=lambda row: row["mebibytes"])
    text = table(rows)
    print(text)
    if given.save:
        base = RESULTS / f"{date.today()}_{given.save}"
        base.with_suffix(".md").write_text(text)
        base.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        chart(rows, base.with_suffix(".png"))


if __name__ == "__main__":
    main()
