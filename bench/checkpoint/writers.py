"""Background writing of a checkpoint by threads or by another process: the time that training loses.

    python -m bench.checkpoint.writers --ranks 1 --mebibytes 768 --rounds 6 --save checkpoint-writers

Training steps run in three situations in turns: nothing is written; threads of the training process write (zeropp's
way); another process writes from shared memory. The cost of a save is the time of the save call and of the steps during
the save, minus the time of as many steps without a save. Steps are short and have many small modules, so most of their
time is Python code, which competes with writer threads. Most of the saved data are frozen weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from bench.checkpoint.ranks import WIDTH, layers
from bench.common import results
from bench.common.machine import machine
from zeropp import checkpoint
from zeropp.checkpoint import saving
from zeropp.checkpoint.boxes import Box, TensorBox
from zeropp.checkpoint.files import Written, write_files
from zeropp.checkpoint.metadata import Checksums
from zeropp.checkpoint.rank_sync import Progress
from zeropp.checkpoint.saving import background_of, backgrounds

ROOT = Path(__file__).resolve().parents[2]
SMALL = 200  # number of modules with a few elements, whose cost is Python's time
WAYS = ("nothing", "threads", "process")
Row = tuple[str, tuple[int, ...], Box, torch.dtype, int]


def serve(pipe: Connection, memory: Tensor) -> None:
    """Run the writing process: write parts of the shared memory for each request, until a request is None."""
    torch.set_num_threads(1)
    while True:
        asked = pipe.recv()
        if asked is None:
            return
        folder, stem, rows, algorithm, limit = asked
        parts = []
        for name, shape, box, dtype, begin in rows:
            nbytes = box.numel * dtype.itemsize
            parts.append(TensorBox(name, shape, box, memory[begin : begin + nbytes].view(dtype).view(box.sizes)))
        try:
            pipe.send(write_files(folder, stem, parts, Checksums.by_name(algorithm), limit))
        except OSError as error:
            pipe.send(error)


class Process:
    """A writing process, and the memory that it shares with this process."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8).share_memory_()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.memory))
        self._process.start()

    def write(
        self, folder: Path, stem: str, parts: Sequence[TensorBox], checks: Checksums, limit: int, progress: Progress
    ) -> Written:
        """Replace ``write_files``: the other process writes the parts, which must be in the shared memory."""
        del progress
        begin = self.memory.data_ptr()
        rows: list[Row] = [(p.name, p.shape, p.box, p.values.dtype, p.values.data_ptr() - begin) for p in parts]
        self._pipe.send((folder, stem, rows, checks.name, limit))
        answer = self._pipe.recv()
        if isinstance(answer, OSError):
            raise answer
        assert isinstance(answer, Written)
        return answer

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


class Tiny(nn.Module):
    """A multiplication by one parameter, as in a norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.mean()


class Model(nn.Module):
    """A model with many small modules, one matrix, and frozen matrices that are saved but not used."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(WIDTH, WIDTH // 4), *(Tiny() for _ in range(SMALL)))
        self.kept = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(frozen)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


class Bench:
    """The measurements of one rank."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self.folder = folder
        self.model = Model(3 * layers(mebibytes))
        config = {"zero_optimization": {"stage": 3}}
        adam = torch.optim.AdamW(self.model.used.parameters(), lr=1e-4, fused=True)
        self.optimizer = zeropp.ZeroOptimizer(adam, self.model, config)
        self.steps(3)
        checkpoint.save(folder / "first", self.model, self.optimizer, asynchronous=True)
        checkpoint.wait()
        self.background = background_of(next(iter(backgrounds)))
        warm = self.background._memory
        assert warm is not None
        self.of_threads, self.process = warm, Process(warm.numel())
        shutil.rmtree(folder / "first", ignore_errors=True)

    def steps(self, count: int) -> list[float]:
        """Run ``count`` steps, and return the seconds of each."""
        found: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            self.optimizer.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(time.perf_counter() - start)
        return found

    @contextmanager
    def writer(self, way: str) -> Iterator[None]:
        own = way == "process"
        self.background._memory = self.process.memory if own else self.of_threads
        saving.write_files = self.process.write if own else write_files  # type: ignore[assignment]
        try:
            yield
        finally:
            saving.write_files = write_files

    def once(self, way: str) -> dict[str, Any]:
        """Save once in one way, and return the times of the save and of the steps during it.

        The way "nothing" runs 20 steps without a save; the times of the save are zero.
        """
        dist.barrier()
        if way == "nothing":
            return {"way": way, "steps": self.steps(20), "blocked": 0.0, "done": 0.0}
        with self.writer(way):
            start = time.perf_counter()
            checkpoint.save(self.folder / "here", self.model, self.optimizer, asynchronous=True)
            blocked = time.perf_counter() - start
            # All ranks must run the same number of steps, because steps are collective.
            found: list[float] = []
            while True:
                busy = torch.tensor(float(self.background.busy))
                dist.all_reduce(busy, dist.ReduceOp.MAX)
                if not busy.item():
                    break
                found += self.steps(1)
            done = time.perf_counter() - start
            checkpoint.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "here")
            os.sync()
        dist.barrier()
        return {"way": way, "steps": found, "blocked": blocked, "done": done}

    def run(self, rounds: int) -> list[dict[str, Any]]:
        rows = []
        for turn in range(rounds):
            order = WAYS if turn % 2 else (WAYS[0], *reversed(WAYS[1:]))
            rows += [{"round": turn, **self.once(way)} for way in order]
        self.process.end()
        return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Return the table of all rounds but the first: mean step times, median times of saves, quartiles of costs."""
    warm = [row for row in rows if row["round"] > 0]
    base = median(step for row in warm if row["way"] == "nothing" for step in row["steps"])
    lines = [f"A step with nothing being written: {base * 1e3:.1f} ms.", ""]
    lines += ["| written by | step beside it ms | blocked s | done s | a save costs s |", "|---|---|---|---|---|"]
    costs: dict[str, list[float]] = {}
    for way in WAYS[1:]:
        own = [row for row in warm if row["way"] == way]
        costs[way] = [row["blocked"] + sum(row["steps"]) - len(row["steps"]) * base for row in own]
        step = sum(sum(row["steps"]) for row in own) / sum(len(row["steps"]) for row in own)
        cells = [f"{median(row[key] for row in own):.2f}" for key in ("blocked", "done")]
        lines.append(f"| {way} | {step * 1e3:.1f} | {' | '.join(cells)} | {spread(costs[way])} |")
    pairs = [one - other for one, other in zip(costs["threads"], costs["process"], strict=True)]
    lines += [
        "",
        f"{args.ranks} ranks, {args.mebibytes} MiB each, {args.rounds} rounds without the first; medians, quartiles in "
        "brackets. A save costs what the call takes, and what the steps that it lies in take beyond as many with "
        f"nothing being written. Threads less process, by round: {spread(pairs)} s.",
    ]
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def rank(folder: str, mebibytes: str, rounds: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = Bench(Path(folder), int(mebibytes)).run(int(rounds))
    if dist.get_rank() == 0:
        (Path(folder) / "result.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Threads or a process as the writer of a checkpoint.")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mebibytes", type=int, default=768, help="MiB written by each rank")
    parser.add_argument("--rounds", type=int, default=6, help="number of rounds; the first is not reported")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary folder")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    args = parser.parse_args(argv)
    about = machine("cpu")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}",
                   "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                   "-m", "bench.checkpoint.writers", "rank", folder, str(args.mebibytes), str(args.rounds)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        rows = json.loads((Path(folder) / "result.json").read_text())
    text = results.page("Who writes a checkpoint", "bench.checkpoint.writers", argv, about, report(rows, args))
    print(text)
    if args.save:
        results.save({"machine": about, "rows": rows}, text, args.save)


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
