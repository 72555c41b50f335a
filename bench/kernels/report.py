"""Table and charts of result files of ``pytest bench/kernels --benchmark-json=FILE`` or ``bench/gpu.sh kernels``.

python -m bench.kernels.report FILE...                # prints the table
python -m bench.kernels.report FILE... --save NAME    # also writes bench/results/<date>_NAME.{md,json,png}
                                                      # and <date>_NAME-shares.png: shares of a copy by size
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from bench.common.machine import describe, machine, memory_bandwidth

RESULTS = Path(__file__).resolve().parents[1] / "results"
TARGETED = 256  # MiB from which on targets are meant
Row = dict[str, object]


def rows_of(measured: dict) -> list[Row]:
    """Return the rows of a file that pytest-benchmark or ``bench/gpu.sh kernels`` wrote."""
    if "steps" not in measured:
        return [entry["extra_info"] for entry in measured["benchmarks"] if "operation" in entry.get("extra_info", {})]
    device = measured["machine"].get("card", "one CPU core")
    rows = [row for step in measured["steps"].values() for row in step["rows"]]
    return [
        {
            "operation": row["operation"],
            "contender": row["by"],
            "mebibytes": int(row["MiB"]),
            "seconds": 1e-6 * float(row["us"]),
            "gigabytes_per_second": float(row["GB/s"]),
            "percent_of_copy": None if row["% of copy"] == "-" else float(row["% of copy"]),
            "target": 0 if row["target"] == "-" else int(row["target"]),
            "device": device,
        }
        for row in rows
        if row.keys() >= {"operation", "% of copy"}
    ]


def percents(row: Row) -> dict[str, str]:
    """Return the cells with a row's bandwidth as percent of a copy's and of the data sheet's; "-" if unknown."""
    sheet = memory_bandwidth(row["device"])
    found = {
        "% of copy": row["percent_of_copy"],
        "% of data sheet": sheet and 100 * row["gigabytes_per_second"] / sheet,
    }
    return {name: "-" if percent is None else f"{percent:.0f}" for name, percent in found.items()}


def table(rows: Sequence[Row], about: dict) -> str:
    """Return a Markdown table with one line per operation, contender and size, below a description of the machine."""
    lines = [
        f"{rows[0]['device']}. {describe(about)} GB/s of bytes that must move; percent of a copy in that run, and of "
        "the memory's bandwidth in the card's data sheet.",
        "",
        "| operation | by | MiB of bf16 | us | GB/s | % of copy | % of data sheet | target on a GPU |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        has_target = row["target"] and row["contender"] == "zeropp_kernels" and "CPU" not in row["device"]
        target = f"{row['target']}" if has_target else ""
        lines.append(
            f"| {row['operation']} | {row['contender']} | {row['mebibytes']} | {1e6 * row['seconds']:.0f} "
            f"| {row['gigabytes_per_second']:.2f} | {' | '.join(percents(row).values())} | {target} |"
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


def cells(rows: Sequence[Row]) -> dict[tuple[str, int], tuple[float, bool]]:
    """Return percent of a copy, and True if a target is missed, by operation and MiB, of zeropp_kernels."""
    found = {}
    for row in rows:
        percent = row["percent_of_copy"]
        if row["contender"] == "zeropp_kernels" and row["operation"] != "copy" and percent is not None:
            targeted = "CPU" not in row["device"] and row["mebibytes"] >= TARGETED
            found[row["operation"], row["mebibytes"]] = percent, targeted and percent < row["target"]
    return found


def shares(rows: Sequence[Row], path: Path) -> None:
    """Draw the percent of a copy by operation and size, with a frame around each cell that misses its target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = cells(rows)
    names, sizes = list(dict.fromkeys(name for name, _ in found)), sorted({size for _, size in found})
    grid = [[found.get((name, size), (float("nan"), False))[0] for size in sizes] for name in names]
    figure, axes = plt.subplots(figsize=(3.5 + 0.7 * len(sizes), 0.35 * len(names) + 1.5), layout="constrained")
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="Blues", aspect="auto")
    for (name, size), (percent, missed) in found.items():
        column, line = sizes.index(size), names.index(name)
        axes.text(column, line, f"{percent:.0f}", ha="center", va="center", color="white" if percent > 60 else "black")
        if missed:
            corner = column - 0.46, line - 0.44
            axes.add_patch(plt.Rectangle(corner, 0.92, 0.88, fill=False, edgecolor="tab:red", linewidth=2))
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"MiB of bfloat16 values, {rows[0]['device']}")
    axes.set_title("Red frame: below the target", fontsize="small")
    figure.colorbar(image, label="% of a copy's bandwidth")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--save", metavar="NAME", default="")
    given = parser.parse_args(argv)
    measured = [json.loads(file.read_text()) for file in given.files]
    rows = [row for each in measured for row in rows_of(each)]
    if not rows:
        raise SystemExit("the file holds no measurements of bench/kernels")
    rows.sort(key=lambda row: row["mebibytes"])
    text = table(rows, measured[0].get("machine") or machine("cpu" if "CPU" in rows[0]["device"] else "cuda"))
    print(text)
    if given.save:
        base = RESULTS / f"{date.today()}_{given.save}"
        base.with_suffix(".md").write_text(text)
        base.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        chart(rows, base.with_suffix(".png"))
        if cells(rows):  # without a copy there are no shares
            shares(rows, Path(f"{base}-shares.png"))


if __name__ == "__main__":
    main()
