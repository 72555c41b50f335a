"""Jobs of two ranks that save after every step and are killed at random moments. Each job resumes from the last one.

    python -m tests.support.saves_killed_at_random ROOT RUNS MOMENTS

One rank or both ranks are killed, by SIGKILL or SIGTERM; synchronous and asynchronous saves alternate. Every job
compares the loaded state with the state at the time of that save, bit for bit. A rank that is not killed must fail with
an error. The program prints the number of kills that hit a save, and the number of saved steps. For speed, ranks are
forked from a process that has imported all modules, and runs are concurrent.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.checkpoint_training import make_optimizer, moments, train, wrap
from tests.support.quantized_model import Model
from zeropp import checkpoint

WORLD = 2
PATIENCE = 90.0  # seconds
_SAVES, _SAVED, _ENDED, _FAILED = b"s", b"e", b"x", b"f"


def digest(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> str:
    """Return a hash of the full weights and of this rank's optimizer states."""
    found = hashlib.sha256()
    for name, value in sorted(zeropp.full_state(model).items()):
        found.update(name.encode() + value.contiguous().view(-1).numpy().tobytes())
    for name, (start, state) in sorted(moments(optimizer).items()):
        for key, value in sorted(state.items()):
            numbers = value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            found.update(f"{name} {start} {key}".encode() + numbers)
    return found.hexdigest()


def job(root: Path, rank: int, store: Path, told: int, background: bool, last: bool) -> None:
    """Run one rank: load the newest checkpoint, train, and save every step until the rank is killed.

    Args:
        root: folder of the run.
        rank: number of the rank.
        store: file for the rendezvous.
        told: file descriptor of the pipe to which the rank writes events.
        background: True to save asynchronously.
        last: True to return after one save.
    """
    say = lambda event: os.write(told, event)  # noqa: E731
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=PATIENCE))  # fmt: skip
    model, optimizer = wrap("stage 3")
    series = checkpoint.Series(root / "run", keep=2)
    loaded = series.load(model, optimizer)
    step = 0 if loaded is None else loaded[0]
    if loaded is not None and (root / f"{step}-{rank}").read_text() != digest(model, optimizer):
        raise AssertionError(f"step {step} is not what was saved")
    try:
        while True:
            step += 1
            train(model, optimizer, [step])
            (root / f"{step}-{rank}").write_text(digest(model, optimizer))
            say(_SAVES)
            series.save(step, model, optimizer, asynchronous=background)
            if not background:
                say(_SAVED)
            if last:
                checkpoint.wait()
                return
    except Exception as error:
        say(_ENDED + f"{type(error).__name__}: {error}".encode())


@dataclass
class Rank:
    """The process of a rank.

    Attributes:
        process: process id.
        pipe: file descriptor from which the rank's events are read.
        told: bytes that were read from the pipe so far.
    """

    process: int
    pipe: int
    told: bytes = b""

    def listen(self, until: bytes = b"", seconds: float = PATIENCE) -> None:
        """Read the pipe until ``until`` was read or the rank has ended.

        Args:
            until: the event to wait for; b"" waits for the end of the rank.
            seconds: limit, after which the call fails; 0 reads the available bytes without waiting.
        """
        deadline = time.monotonic() + seconds
        while not until or until not in self.told:
            if not select.select([self.pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                assert seconds == 0, f"a rank said {self.told!r}, and nothing more in {seconds:.0f} s"
                return
            more = os.read(self.pipe, 1 << 16)
            if not more:
                return
            self.told += more


def begin(root: Path, background: bool, last: bool = False) -> list[Rank]:
    store, ranks = Path(tempfile.mktemp(dir=root)), []
    for rank in range(WORLD):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            status = 0
            try:
                job(root, rank, store, writing, background, last)
            except BaseException:
                os.write(writing, _FAILED + traceback.format_exc().encode())
                status = 1
            # Leave without joining threads, because some wait for the other rank.
            os._exit(status)
        os.close(writing)
        ranks.append(Rank(process, reading))
    return ranks


def end(ranks: list[Rank]) -> None:
    try:
        for rank in ranks:
            rank.listen()
            assert not rank.told.startswith(_FAILED), rank.told.decode()
    finally:
        for rank in ranks:
            os.kill(rank.process, signal.SIGKILL)
            os.waitpid(rank.process, 0)
            os.close(rank.pipe)


def one_moment(root: Path, chosen: random.Random, number: int) -> bool:
    """Kill a job at a random moment, and return True if every killed rank was inside a save."""
    ranks = begin(root, background=number % 4 >= 2)
    victims = ranks if number % 3 else [chosen.choice(ranks)]
    try:
        for rank in ranks:
            rank.listen(_SAVES)
        # The longest delays let a save end and the next one begin.
        time.sleep(chosen.uniform(0, chosen.choice([0.03, 0.1, 0.3])))
        for rank in ranks:
            rank.listen(seconds=0)
            assert _ENDED not in rank.told, rank.told
        for rank in victims:
            os.kill(rank.process, signal.SIGTERM if number % 2 else signal.SIGKILL)
    finally:
        end(ranks)
    for rank in ranks:
        assert rank in victims or _ENDED in rank.told, f"one rank was killed, and the other said {rank.told!r}"
    return all(rank.told.endswith(_SAVES) for rank in victims)


def one_run(root: Path, moments: int, seed: int) -> None:
    root.mkdir()
    chosen, inside = random.Random(seed), 0
    for number in range(moments):
        inside += one_moment(root, chosen, number)
    ranks = begin(root, background=False, last=True)
    end(ranks)
    assert all(rank.told.endswith(_SAVED) for rank in ranks), ranks
    series = checkpoint.Series(root / "run")
    names = sorted(each.name for each in (root / "run").iterdir())
    assert names[-1].startswith("step-") and series.latest() == max(series.steps()), names
    left = [name for name in names if name.startswith(".")]
    assert not left and len(names) <= 3, names
    (root / "result").write_text(f"{inside} {series.latest()}")


def main(root: Path, runs: int, moments: int) -> None:
    # Import in the parent the modules that torch imports with the first optimizer; else every rank would import them.
    make_optimizer(Model())
    processes = []
    for number in range(runs):
        process = os.fork()
        if process == 0:
            try:
                one_run(root / str(number), moments, number)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        processes.append(process)
    failed = [process for process in processes if os.waitpid(process, 0)[1]]
    results = [list(map(int, path.read_text().split())) for path in root.glob("*/result")]
    assert not failed and len(results) == runs
    print(sum(inside for inside, _ in results), sum(latest for _, latest in results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
