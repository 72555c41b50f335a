"""After a rank is killed, stopped or raises, all other ranks end with an error soon after ``hang_timeout``.

The ranks are programs without torchrun, and rank 0's process keeps the job's store: see
:mod:`tests.support.failing_rank_job`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.failing_rank_job import WHAT, WHERE

ROOT = Path(__file__).resolve().parents[3]
HANG_TIMEOUT = 3.0
GRACE = 5.0  # seconds that a rank may take to report the error and to end
STARTING = 90.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def started(folder: Path, world: int, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one process per rank, and kill the processes at the end.

    Args:
        folder: folder for the files ``out<rank>`` and ``err<rank>`` with the output of each process.
        world: number of ranks.
        arguments: arguments of the program.
    """
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    env.update(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE=str(world // 2))
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = []
    try:
        for rank in range(world):
            with open(folder / f"out{rank}", "wb") as out, open(folder / f"err{rank}", "wb") as err:
                command = [sys.executable, "-m", "tests.support.failing_rank_job", *arguments]
                env.update(RANK=str(rank), LOCAL_RANK=str(rank))
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err))
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def ends(world: int, what: str, where: str, victim: int, folder: Path) -> dict[int, tuple[float, str]]:
    """Run the program until all ranks but the victim have ended.

    Args:
        world: number of ranks.
        what: kind of the victim's end, a key of WHAT: "killed", "stopped" or "raises".
        where: place in the program at which the victim ends, an entry of WHERE.
        victim: rank that ends.
        folder: folder for the output of the processes.

    Returns:
        For each other rank, the seconds from the victim's end to the rank's end, and the rank's standard error.
    """
    ended: dict[int, float] = {}
    with started(folder, world, what, where, str(victim), str(HANG_TIMEOUT)) as processes:
        limit, begun = time.monotonic() + STARTING, 0.0
        while len(ended) < world - 1 and time.monotonic() < limit:
            if not begun and (folder / f"out{victim}").read_text().startswith("ends"):
                begun = time.monotonic()
                limit = begun + HANG_TIMEOUT + 4 * GRACE
            for rank, process in enumerate(processes):
                if rank != victim and rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic()
            time.sleep(0.02)
        assert begun, f"rank {victim} never reached its end:\n{(folder / f'err{victim}').read_text()}"
        assert all(process.poll() != 0 for process in processes), "a rank ended with exit status 0"
    texts = {rank: (folder / f"err{rank}").read_text() for rank in range(world) if rank != victim}
    late = [rank for rank in texts if rank not in ended]
    assert not late, f"ranks {late} still run {HANG_TIMEOUT + 4 * GRACE} s after rank {victim} was {what} in {where}"
    return {rank: (ended[rank] - begun, text) for rank, text in texts.items()}


def check(world: int, what: str, where: str, victim: int) -> None:
    # While a model is wrapped, ranks exchange errors, so the message names the victim's error. Later the ranks only
    # find that the victim is missing.
    told = f"failed on rank {victim}: " if (what, where) == ("raises", "wrapping") else "no longer in step"
    with tempfile.TemporaryDirectory() as folder:
        for rank, (seconds, text) in ends(world, what, where, victim, Path(folder)).items():
            last = [line for line in text.splitlines() if "RuntimeError: " in line][-1:]
            assert last and told in last[0], f"rank {rank}: {text}"
            assert seconds < HANG_TIMEOUT + GRACE, f"rank {rank} took {seconds:.1f} s to say {last[0]}"


CASES = [(what, where) for what in WHAT for where in WHERE if where != "random"]
CHOSEN = {("killed", "forward", 0)}


@pytest.mark.parametrize(
    ("what", "where", "victim"),
    [
        pytest.param(*case, victim, marks=() if (*case, victim) in CHOSEN else pytest.mark.campaign)
        for case in CASES
        for victim in (0, 1)
    ],
)
def test_one_of_two(what: str, where: str, victim: int) -> None:
    check(2, what, where, victim)


@pytest.mark.campaign
def test_the_store_of_four_stands_still() -> None:
    check(4, "stopped", "forward", 0)


@pytest.mark.campaign
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize(("what", "where"), CASES)
def test_one_of_four(what: str, where: str, victim: int) -> None:
    check(4, what, where, victim)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_at_random_moments() -> None:
    draw = random.SystemRandom()
    for _ in range(100):
        world = draw.choice([2, 4])
        check(world, draw.choice(["killed", "stopped"]), "random", draw.randrange(world))
