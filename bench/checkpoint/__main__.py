"""Cost of saving a checkpoint: seconds that training waits, speed of writing, and memory.

    python -m bench.checkpoint --ranks 2 --mebibytes 1024 --folder /somewhere/on/the/disk --save checkpoint

Each round writes the same number of bytes in each way, one after another, because disk speed changes within minutes.
The
ways are: raw writes (aligned buffers that bypass the page cache, several threads, synced), zeropp synchronous and
asynchronous, torch.distributed.checkpoint with FSDP2, and torch.save of full states on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.common import results
from bench.common.machine import machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("way", "blocked s", "done s", "GB/s", "/ disk", "peak MiB")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the cost of saving a checkpoint.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=1024, help="MiB of main weights and states on each rank")
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds; the first is reported separately")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary folder")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md, .json and .png")
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.rounds < 2 or args.mebibytes < 12:
        parser.error("--ranks must be at least 1, --rounds 2 and --mebibytes 12")
    return args


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks, and return one row per way and round."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", "--master-port=0",
                   "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                   "-m", "bench.checkpoint.ranks", folder, str(args.mebibytes), str(args.rounds)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        result = Path(folder) / "result.json"
        if code or not result.exists():
            raise SystemExit(f"the ranks ended with exit code {code}; nothing to report")
        found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return the table with medians of the warm rounds, and the blocked time of the first round."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    disk = median(row["rate"] for row in rows if row["way"] == "disk" and row["warm"])
    for way in ways:
        own = [row for row in rows if row["way"] == way and row["warm"]]
        ratios = [row["rate"] / next(r["rate"] for r in rows if r["way"] == "disk" and r["round"] == row["round"])
                  for row in own]  # fmt: skip
        cells = [f"{median(row[key] for row in own):.3f}" for key in ("blocked", "done")]
        cells += [f"{median(row['rate'] for row in own):.2f}", f"{median(ratios):.2f}"]
        lines.append(f"| {way} | {' | '.join(cells)} | {max(row['peak'] for row in own):.0f} |")
    begin = {row["way"]: row["blocked"] for row in rows if row["round"] == 0}
    copies = [row["copy"] for row in rows if row["way"] == "zeropp asynchronous" and row["warm"]]
    blocked = [row["blocked"] for row in rows if row["way"] == "zeropp asynchronous" and row["warm"]]
    lines += [
        "",
        f"{args.ranks} ranks, {args.mebibytes} MiB each; the disk was written with {disk:.2f} GB/s by all. Blocked: "
        "until the call returned, of the slowest rank; done: until all was on the disk. Ratios are by round. "
        "Peak: largest growth of a rank's memory above what it had before.",
        "",
        f"A copy of the same bytes by one thread into warm memory took {median(copies):.3f} s, an asynchronous save "
        f"{median(b / c for b, c in zip(blocked, copies, strict=True)):.2f} times that; the first one, whose memory is "
        f"fresh, {begin['zeropp asynchronous']:.3f} s.",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    about = machine("cpu")
    rows = measure(args)
    text = results.page("Saving a checkpoint", "bench.checkpoint", argv, about, report(rows, args))
    print(text)
    if args.save:
        results.save({"machine": about, "rows": rows}, text, args.save, partial(drawn, rows))


def drawn(rows: list[dict[str, Any]]) -> Figure:
    """Return the plot of the results."""
    from bench.checkpoint import plot  # imported here because it needs matplotlib

    return plot.draw(rows)


if __name__ == "__main__":
    main()
