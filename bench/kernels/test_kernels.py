"""Bandwidth of each operation, compared with a copy in the same run; measured by pytest-benchmark.

    pytest bench/kernels                                  # small sizes on one CPU core, or 1 MiB to 2 GiB on a GPU
    pytest bench/kernels --sizes 1,256 -k "int4"
    pytest bench/kernels --benchmark-disable --sizes 1    # only check that all run, and that eager code has equal bits
    pytest bench/kernels --benchmark-json=out.json && python bench/kernels/report.py out.json --save NAME

A size is in MiB of bfloat16 values. A round times several calls together, about 20 ms. On a GPU a round lies between
two synchronizations, so the host time of launches is hidden if kernels are long, and visible if they are short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from bench.common.machine import machine
from bench.kernels.operations import OPERATIONS, Operation, Run
from bench.kernels.peers import CODECS, PEERS, run_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ABOUT = machine(DEVICE)
ROUNDS = 7
ROUND_SECONDS = 0.02
SIZES = [1, 16, 64, 256, 1024, 2048] if DEVICE == "cuda" else [1, 16]
_copied: dict[int, float] = {}  # size in MiB -> bytes per second of the copy in this run
torch.set_num_threads(1)  # CPU results are for one core


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mebibytes" in metafunc.fixturenames:
        given = metafunc.config.getoption("--sizes")
        metafunc.parametrize("mebibytes", [int(size) for size in given.split(",")] if given else SIZES)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def calls_of(run: Run) -> int:
    """Return the number of calls that take about ROUND_SECONDS."""
    for _ in range(3):
        run()
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return max(1, math.ceil(ROUND_SECONDS / max(time.perf_counter() - begin, 1e-6)))


def seconds(benchmark: Callable[..., object], run: Run) -> float:
    """Return the median time of a call in seconds."""
    calls = calls_of(run)

    def several() -> None:
        for _ in range(calls):
            run()
        synchronize()

    benchmark.pedantic(several, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[attr-defined]
    return float(benchmark.stats.stats.median) / calls  # type: ignore[attr-defined]


def record(benchmark: Callable[..., object], operation: Operation, contender: str, mebibytes: int, run: Run) -> None:
    if benchmark.disabled:  # type: ignore[attr-defined]
        run()
        return
    taken = seconds(benchmark, run)
    numel = mebibytes << 19
    rate = operation.nbytes(numel) / taken
    if operation.name == "copy":
        _copied[mebibytes] = rate
    benchmark.extra_info.update(  # type: ignore[attr-defined]
        operation=operation.name,
        contender=contender,
        mebibytes=mebibytes,
        seconds=taken,
        gigabytes_per_second=rate / 1e9,
        percent_of_copy=100 * rate / _copied[mebibytes] if mebibytes in _copied else None,
        target=operation.target,
        device=torch.cuda.get_device_name() if DEVICE == "cuda" else "one CPU core",
        torch=torch.__version__,
        triton=ABOUT["triton"],
    )


NAMED = {operation.name: operation for operation in OPERATIONS}
HAND_WRITTEN = [operation.name for operation in OPERATIONS if operation.make(3072, "cpu").by_hand is not None]


def by_hand(name: str, mebibytes: int) -> Run:
    """Return the operation in plain torch, after checking that its results equal the kernel's bit for bit."""
    twin = NAMED[name].make(mebibytes << 19, DEVICE)
    assert twin.by_hand is not None
    for ours, theirs in zip(twin.ours(), twin.by_hand(), strict=True):
        assert torch.equal(ours, theirs.view(ours.shape)), f"{name} by hand has other results"
    return twin.by_hand


@pytest.mark.parametrize("name", NAMED)  # "copy" comes first, because the others are compared with it
def test_zeropp(benchmark: Callable[..., object], name: str, mebibytes: int) -> None:
    record(benchmark, NAMED[name], "zeropp_kernels", mebibytes, NAMED[name].make(mebibytes << 19, DEVICE).ours)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_eager(benchmark: Callable[..., object], name: str, mebibytes: int) -> None:
    record(benchmark, NAMED[name], "torch eager", mebibytes, by_hand(name, mebibytes))


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_compiled(benchmark: Callable[..., object], name: str, mebibytes: int) -> None:
    """The eager code with torch.compile; its bits may differ, because it skips roundings between operations."""
    torch._dynamo.reset()
    run = torch.compile(by_hand(name, mebibytes), dynamic=False)
    record(benchmark, NAMED[name], "torch.compile", mebibytes, run)


@pytest.mark.parametrize(("name", "by"), PEERS)
def test_peers(benchmark: Callable[..., object], name: str, by: str, mebibytes: int) -> None:
    codec = CODECS[by](name, mebibytes << 19, DEVICE)
    assert codec.is_right(), f"{by}'s values after {name} are too far from those before"
    record(benchmark, NAMED[name], by, mebibytes, run_of(name, codec))
