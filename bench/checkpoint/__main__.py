"""What saving costs: how long training waits, how fast the disk is written, how much memory it takes.

    python -m bench.checkpoint --ranks 2 --mebibytes 1024 --folder /somewhere/on/the/disk --save checkpoint

Every round writes the same bytes by each way, one after the other, since disks differ from minute to minute: the raw
write of the disk (aligned buffers past the page cache, as many threads, synced), zeropp at once and asynchronous,
torch.distributed.checkpoint of FSDP2 at once, and torch.save of whole states on the first rank.
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
    parser = argparse.ArgumentParser(description="What saving a checkpoint costs.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of main weights and states, on each rank")
    parser.add_argument("--rounds", type=int, default=4, help="the first one warms up, and is reported apart")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: a temporary one")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md, .json and .png")
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.rounds < 2 or args.mebibytes < 12:
        parser.error("--ranks must be at least 1, --rounds 2 and --mebibytes 12")
    return args


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all ranks' ways and rounds."""
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
    """The table: medians of rounds after the first, and the first round's blocked times."""
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
    """The picture."""
    from bench.checkpoint import plot  # which needs matplotlib

    return plot.draw(rows)


if __name__ == "__main__":
    main()
