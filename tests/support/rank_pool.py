"""Runs a function on several ranks, in processes that stay alive between tests.

    def gathered(n: int) -> list[int]:            # module level: the ranks import it by name
        ...                                       # torch.distributed is up (gloo), torchrun's variables are set
    assert run_ranks(2, gathered, 5) == [..., ...]  # one result per rank

Each call has its own process group. Ranks are reused while calls succeed. After an unexpected failure, a timeout or a
crash, the ranks of the call are replaced, so that no test can affect the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.rank_worker import Call, RankFailure

__all__ = ["RankError", "RankFailure", "RankTimeout", "run_ranks", "shutdown", "some", "spread"]

ROOT = Path(__file__).resolve().parents[2]
SPAWN_SECONDS = 100.0
TEARDOWN_SECONDS = 15.0
GRACE_SECONDS = 5.0  # seconds that other ranks may continue after one has failed unexpectedly
# Ranks with more threads are replaced: threads of process groups that a cache keeps alive wake a hundred times a
# second.
MANY_THREADS = 40


def spread(rows: Iterable[str], columns: Iterable[str], every: int) -> list[Any]:
    """Return pairs of a row and a column for parametrize.

    Each ``every``-th pair, shifted from row to row, runs always. All other pairs run in the campaign.
    """
    chosen = [(row, column, (i + j) % every == 0) for i, row in enumerate(rows) for j, column in enumerate(columns)]
    return [pytest.param(r, c, marks=() if here else pytest.mark.campaign) for r, c, here in chosen]


def some(rows: Iterable[object], every: int) -> list[Any]:
    """Return rows for parametrize. Each ``every``-th row runs always; all other rows run in the campaign."""
    return [pytest.param(row, marks=() if i % every == 0 else pytest.mark.campaign) for i, row in enumerate(rows)]


class RankError(RuntimeError):
    """The error of a call in which at least one rank failed; `failures` lists them in order of rank."""

    def __init__(self, message: str, failures: list[RankFailure]) -> None:
        super().__init__(message)
        self.failures = failures


class RankTimeout(RankError):
    """The error of a call in which a rank did not finish in time; the message has every rank's Python stack."""


class _Worker:
    """One process and the pipe to it. Its output goes to a file, which failure messages quote."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        env = dict(os.environ)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        env["OMP_NUM_THREADS"] = "1"
        env["PYTHONUNBUFFERED"] = "1"
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve would stop gloo
        code = f"from tests.support.rank_worker import main; main({theirs.fileno()}, {os.getpid()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pipe = Connection(ours.detach())
        self._seen = 0

    def send(self, message: object) -> None:
        self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[str, Any]:
        answer: tuple[str, Any] = pickle.loads(self.pipe.recv_bytes())
        return answer

    def new_output(self) -> str:
        """Return the output of the process since the last call of this method."""
        raw = os.pread(self.log.fileno(), 1 << 20, self._seen)
        self._seen += len(raw)
        return raw.decode(errors="replace")

    def dump_stacks(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def stop(self, *, kill: bool) -> None:
        if not kill:
            with contextlib.suppress(OSError):
                self.send("exit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.log.close()


class _Pool:
    """The ranks of this test session, which are started when first needed."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def ensure(self, world: int) -> list[_Worker]:
        """Return `world` live workers, and start missing ones concurrently."""
        dead = [worker for worker in self.workers if worker.process.poll() is not None]
        self.drop(dead)
        new = [_Worker() for _ in range(world - len(self.workers))]
        self.workers += new
        deadline = time.monotonic() + SPAWN_SECONDS
        for worker in new:
            try:
                if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"a rank process did not start in {SPAWN_SECONDS:.0f} s", [])
                worker.receive()
            except (EOFError, OSError):
                output = worker.new_output()
                self.drop(new)
                raise RankError(f"a rank process could not start:\n{output}", []) from None
            except BaseException:
                self.drop(new)
                raise
        return self.workers[:world]

    def drop(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.stop(kill=True)
        self.workers = [worker for worker in self.workers if worker not in workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.stop(kill=False)
        self.workers = []


_pool: _Pool | None = None


def _get_pool() -> _Pool:
    global _pool
    if _pool is None:
        _pool = _Pool()
        atexit.register(shutdown)
    return _pool


def shutdown() -> None:
    """Stop all rank processes. The next `run_ranks` starts new ones."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def _pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    if "<locals>" in name or "<lambda>" in name or getattr(fn, "__module__", None) == "__main__":
        raise TypeError(
            f"run_ranks needs a function that other processes can import, got {name!r}; "
            "define it at the top level of a test module and pass what it needs as arguments"
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(f"cannot send {name!r} and its arguments to the ranks: {error}") from error


class _Run:
    """One call in progress: results, failures and released ranks so far."""

    def __init__(self, pool: _Pool, workers: list[_Worker], catch: bool, timeout: float) -> None:
        self.pool = pool
        self.workers = workers
        self.catch = catch
        self.timeout = timeout
        self.results: dict[int, Any] = {}
        self.failures: dict[int, RankFailure] = {}
        self.released: set[int] = set()
        self.crowded: list[_Worker] = []

    def collect(self) -> None:
        """Wait until every rank has a result or a failure."""
        deadline = time.monotonic() + SPAWN_SECONDS + self.timeout
        while len(self.results) + len(self.failures) < len(self.workers):
            open_ranks = self.open_ranks()
            pipes = [self.workers[rank].pipe for rank in open_ranks]
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                self.give_up(open_ranks, "had not finished")
            for rank in open_ranks:
                if self.workers[rank].pipe not in ready:
                    continue
                kind, value = self.answer(rank)
                if kind == "begun":
                    # The time limit starts here, because a new rank first imports the test's modules, which may take a
                    # minute.
                    if self.catch or not self.failures:
                        deadline = time.monotonic() + self.timeout
                    continue
                if kind == "ok":
                    self.results[rank] = value
                    continue
                self.failures[rank] = value
                self.release(rank)  # the rank closes its sockets, so peers that wait for it fail instead of hanging
                if not self.catch:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def open_ranks(self) -> list[int]:
        done = self.results.keys() | self.failures.keys()
        return [rank for rank in range(len(self.workers)) if rank not in done]

    def answer(self, rank: int) -> tuple[str, Any]:
        worker = self.workers[rank]
        try:
            return worker.receive()
        except (EOFError, OSError):
            code = worker.process.wait(timeout=10)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            failure = RankFailure(rank, "ProcessDied", f"the process ended with {how}", worker.new_output())
            self.failures[rank] = failure
            self.pool.drop(self.workers)
            raise RankError(self.report(f"rank {rank} died ({how})"), self.sorted_failures()) from None

    def release(self, rank: int) -> None:
        self.released.add(rank)
        with contextlib.suppress(OSError):
            self.workers[rank].send("release")

    def teardown(self) -> None:
        """Let all ranks destroy their process groups, and wait for it."""
        for rank in range(len(self.workers)):
            if rank not in self.released:
                self.release(rank)
        deadline = time.monotonic() + TEARDOWN_SECONDS
        waiting = list(range(len(self.workers)))
        while waiting:
            ready = wait([self.workers[rank].pipe for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.give_up(waiting, "had finished its function but hung while its process group was destroyed")
            for rank in [rank for rank in waiting if self.workers[rank].pipe in ready]:
                _, threads = self.answer(rank)
                waiting.remove(rank)
                if threads > MANY_THREADS:
                    self.crowded.append(self.workers[rank])

    def give_up(self, late: list[int], what: str) -> None:
        for rank in late:
            self.workers[rank].dump_stacks()
        time.sleep(0.3)
        for rank in late:
            output = self.workers[rank].new_output()
            self.failures.setdefault(rank, RankFailure(rank, "Timeout", f"rank {rank} {what}", output))
        self.pool.drop(self.workers)
        title = f"rank(s) {late} {what} (timeout {self.timeout:g} s)"
        raise RankTimeout(self.report(title), self.sorted_failures())

    def sorted_failures(self) -> list[RankFailure]:
        return [self.failures[rank] for rank in sorted(self.failures)]

    def report(self, title: str) -> str:
        parts = [title]
        for failure in self.sorted_failures():
            parts.append(f"--- rank {failure.rank}: {failure.type_name}: {failure.message}\n{failure.text}")
        return "\n".join(parts)

    def pass_on_output(self) -> None:
        """Print the ranks' output from this process, so that pytest captures it."""
        for rank, worker in enumerate(self.workers):
            for line in worker.new_output().splitlines():
                print(f"[rank {rank}] {line}")


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    local_world_size: int | None = None,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    catch: bool = False,
    init: bool = True,
    **kw: Any,
) -> list[Any]:
    """Call `fn(*args, **kw)` on `world` ranks and return the results in order of rank.

    Inside, `torch.distributed` is initialised with gloo and exactly `world` ranks, and RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set; RNGs are seeded with 0. Results and arguments travel as plain
    pickles, so tensors arrive as copies.

    Args:
        world: number of ranks.
        fn: a function at module level, which the ranks import.
        args: positional arguments of `fn`.
        local_world_size: ranks per simulated node; `world` by default. It must divide `world`.
        timeout: seconds for the call, without the start of processes and the imports of the ranks. After that, all
            Python stacks are dumped, the ranks are killed, and `RankTimeout` is raised.
        env: additional environment variables during the call.
        catch: True to return a `RankFailure` as the result of a rank that raised, instead of raising.
        init: False leaves the process group to `fn`; `init_process_group("gloo")` finds a working `env://`.
        kw: keyword arguments of `fn`.

    Raises:
        RankError: some rank raised (unless `catch`), or its process died. All ranks' tracebacks are in the message.
        RankTimeout: some rank did not finish; also with `catch`.
        TypeError: `fn` cannot be imported by other processes, or an argument or result cannot be pickled.
    """
    nodes, rest = divmod(world, local_world_size or world)
    if world < 1 or rest or nodes < 1:
        raise ValueError(f"local_world_size must divide world, got {local_world_size} and {world}")
    payload = _pack(fn, args, kw)
    pool = _get_pool()
    workers = pool.ensure(world)
    run = _Run(pool, workers, catch, timeout)
    # Each call has its own store, because gloo would read the addresses of the previous group from a shared one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    try:
        for rank, worker in enumerate(workers):
            call = Call(
                rank=rank,
                world=world,
                local_world_size=local_world_size or world,
                store_port=store.port,
                timeout=timeout,
                init=init,
                env=env or {},
                payload=payload,
            )
            worker.send(call)
        run.collect()
        run.teardown()
    except BaseException:  # an interrupt or pytest's timeout leaves these ranks in an unknown state
        pool.drop([worker for worker in workers if worker in pool.workers])
        raise
    run.pass_on_output()
    pool.drop([worker for worker in run.crowded if worker in pool.workers])
    return _outcome(run, fn)


def _outcome(run: _Run, fn: Callable[..., Any]) -> list[Any]:
    """Return the results, or raise the error of the call. A skip on any rank skips the test."""
    failures = run.sorted_failures()
    for failure in failures:
        if failure.is_a(pytest.skip.Exception):
            pytest.skip(failure.message)
    if failures and not run.catch:
        run.pool.drop(run.workers)
        ranks = [failure.rank for failure in failures]
        raise RankError(run.report(f"{fn.__qualname__} failed on rank(s) {ranks} of {len(run.workers)}"), failures)
    return [run.failures.get(rank, run.results.get(rank)) for rank in range(len(run.workers))]
