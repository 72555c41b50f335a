"""run_ranks: results, failures, timeouts, captured output, and the state of a rank between two calls."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import rank_pool
from tests.support.rank_pool import RankError, RankFailure, RankTimeout, run_ranks, some


class Unpicklable(ValueError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def total(value: float) -> tuple[int, torch.Tensor]:
    tensor = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return dist.get_world_size(), tensor


def variables(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def raise_on(ranks: list[int]) -> str:
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} was told to")
    return "fine"


def raise_while_peers_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.all_reduce(torch.zeros(4))


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def failing_assert() -> None:
    left_side = 41
    assert left_side == 42


def sleep_on(rank: int, seconds: float) -> int:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    return os.getpid()


def processes_of(pids: list[int]) -> list[subprocess.Popen[bytes]]:
    """Return the pool's process objects with these pids.

    A test keeps the objects instead of the pids, because the kernel may reuse a pid after its process has ended.
    """
    by_pid = {worker.process.pid: worker.process for worker in rank_pool._get_pool().workers}
    return [by_pid[pid] for pid in pids]


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def big(numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int64) + dist.get_rank()


def speak(text: str) -> None:
    print(text)


def skip_here() -> None:
    pytest.skip("ranks do not want to")


def initialise_by_hand() -> tuple[bool, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return before, int(tensor)


def leave_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def spoil_global_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["ZEROPP_TEST_SPOILT"] = "1"
    torch.rand(5)


def global_state() -> tuple[torch.dtype, bool, str | None, float]:
    variable = os.environ.get("ZEROPP_TEST_SPOILT")
    return torch.get_default_dtype(), torch.is_grad_enabled(), variable, float(torch.rand(1))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_in_rank_order(world: int) -> None:
    expected = torch.full((3,), 0.5 * world * (world + 1) / 2)
    for size, tensor in run_ranks(world, total, 0.5):
        assert size == world
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_workers_are_reused() -> None:
    assert run_ranks(2, sleep_on, 0, seconds=0.0) == run_ranks(2, sleep_on, 0, seconds=0.0)


def test_environment() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA"]
    assert run_ranks(4, variables, names, local_world_size=2, env={"EXTRA": "x"}) == [
        [str(rank), "4", str(rank % 2), "2", "1", "x"] for rank in range(4)
    ]
    assert run_ranks(2, variables, names) == [[str(rank), "2", str(rank), "2", "1", None] for rank in range(2)]


def test_exception_on_one_rank_names_the_rank() -> None:
    with pytest.raises(RankError, match=r"raise_on failed on rank\(s\) \[1\] of 2") as caught:
        run_ranks(2, raise_on, [1])
    (failure,) = caught.value.failures
    assert failure.rank == 1
    assert failure.is_a(ValueError) and not failure.is_a(KeyError)
    assert isinstance(failure.exception, ValueError)
    assert "raise ValueError" in failure.text


def test_catch_returns_failures_in_place_of_results() -> None:
    first, second = run_ranks(2, raise_on, [0, 1], catch=True)
    assert [(f.type_name, f.message) for f in (first, second)] == [
        ("ValueError", "rank 0 was told to"),
        ("ValueError", "rank 1 was told to"),
    ]
    good, bad = run_ranks(2, raise_on, [1], catch=True)
    assert good == "fine"
    assert isinstance(bad, RankFailure)


def test_a_failed_rank_wakes_the_ones_that_wait_for_it() -> None:
    start = time.monotonic()
    waiting, failed = run_ranks(2, raise_while_peers_wait, catch=True, timeout=30)
    assert failed.is_a(KeyError)
    assert waiting.is_a(RuntimeError)
    assert time.monotonic() - start < 10


def test_exception_that_cannot_be_pickled() -> None:
    (failure,) = run_ranks(1, raise_unpicklable, catch=True)
    assert failure.type_name == "Unpicklable"
    assert failure.message == "1 and 2"
    assert failure.is_a(ValueError)
    assert failure.exception is None


def test_assertion_shows_values() -> None:
    with pytest.raises(RankError, match="left_side = 41"):
        run_ranks(1, failing_assert)


class SlowToImport:
    """An argument that takes five seconds to unpickle, like a slow import on a busy machine."""

    def __reduce__(self) -> object:
        return time.sleep, (5.0,)


def ignore(argument: object) -> None:
    pass


@pytest.mark.campaign
def test_time_for_imports_of_ranks_does_not_count_for_the_timeout() -> None:
    assert run_ranks(2, ignore, SlowToImport(), timeout=4) == [None, None]


@pytest.mark.parametrize("world", some([1, 2], 2))
def test_timeout_kills_and_recovers(world: int) -> None:
    before = run_ranks(world, sleep_on, 0, 0.0)
    processes = processes_of(before)
    start = time.monotonic()
    with pytest.raises(RankTimeout, match=rf"rank\(s\) \[{world - 1}\] had not finished") as caught:
        # Two seconds per rank leave the ranks that do not hang enough time on a busy machine.
        run_ranks(world, sleep_on, world - 1, 600.0, timeout=2 * world)
    assert time.monotonic() - start < 15
    assert "sleep_on" in caught.value.failures[0].text  # the Python stack of the rank that hung
    after = run_ranks(world, sleep_on, 0, 0.0)
    assert not set(before) & set(after)
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * world


@pytest.mark.parametrize("world", some([1, 2], 2))
def test_death_of_a_process_is_reported_and_survived(world: int) -> None:
    with pytest.raises(RankError, match=rf"rank {world - 1} died \(signal SIGKILL\)"):
        run_ranks(world, die, world - 1)
    assert len(run_ranks(world, sleep_on, 0, 0.0)) == world


def test_large_results() -> None:
    for rank, tensor in enumerate(run_ranks(2, big, 3_000_000)):
        assert tensor.numel() == 3_000_000
        assert int(tensor[-1]) == 2_999_999 + rank


def test_output_of_ranks_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, speak, "hello there")
    assert capsys.readouterr().out.splitlines() == ["[rank 0] hello there", "[rank 1] hello there"]


def test_skip_inside_ranks_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="do not want to"):
        run_ranks(2, skip_here)


def test_group_made_by_the_function_itself() -> None:
    assert run_ranks(2, initialise_by_hand, init=False) == [(False, 2), (False, 2)]


def test_global_state_does_not_leak_into_the_next_call() -> None:
    clean = run_ranks(1, global_state)
    run_ranks(1, spoil_global_state)
    assert run_ranks(1, global_state) == clean
    assert clean[0][:3] == (torch.float32, True, None)


@pytest.mark.campaign
def test_ranks_with_many_threads_are_replaced() -> None:
    few, same = (run_ranks(2, leave_threads, 3) for _ in range(2))
    assert few == same
    assert run_ranks(2, leave_threads, rank_pool.MANY_THREADS) == same
    assert not set(run_ranks(2, leave_threads, 0)) & set(same)


def test_functions_that_cannot_be_imported_are_refused() -> None:
    def local() -> None:
        """A local function, which other processes cannot import. It is never called."""

    for fn in (local, lambda: None):
        with pytest.raises(TypeError, match="top level of a test module"):
            run_ranks(1, fn)
    with pytest.raises(TypeError, match="cannot send"):
        run_ranks(1, total, lambda: None)


def test_local_world_size_must_divide_world() -> None:
    with pytest.raises(ValueError, match="must divide"):
        run_ranks(4, total, 1.0, local_world_size=3)


def test_shutdown_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """shutdown ends all processes of the pool.

    The test replaces the pool, so that the processes of other tests stay.
    """
    monkeypatch.setattr(rank_pool, "_pool", None)
    processes = processes_of(run_ranks(1, sleep_on, 0, 0.0))
    rank_pool.shutdown()
    assert [process.poll() for process in processes] == [0]
