"""Threads of the host's optimizer step: their work, their intra-op threads, the memory they keep; and divided steps."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from zeropp.optimizer import cpu_pool as module
from zeropp.optimizer.cpu_pool import CpuStepPool, spare_cores, step_slices
from zeropp.optimizer.fused import Rule, SliceStep, rule_of


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zeropp core ")]


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Set the number of intra-op threads of the process to 3 during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_everyone_works_at_once(count: int) -> None:
    """All threads, with the caller among them, run chunks at the same time, and every chunk runs once."""
    cores, meeting = CpuStepPool(count), threading.Barrier(count)
    found: list[int] = []

    def meet() -> None:
        meeting.wait(60)
        found.append(threading.get_ident())

    for _ in range(3):
        found.clear()
        cores.run_chunks([meet] * count)
        assert len(set(found)) == count and threading.get_ident() in found
    many: list[int] = []
    cores.run_chunks([partial(many.append, number) for number in range(100)])
    assert sorted(many) == list(range(100))
    cores.run_chunks([])
    cores.close()


def elsewhere(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in a new thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("count", [1, 3])
def test_intra_op_threads_stay_with_others(three_threads: None, count: int) -> None:
    """A chunk runs with one intra-op thread, also in the caller. The caller and all other threads keep their number."""
    cores, meeting = CpuStepPool(count), threading.Barrier(count)
    inside: list[tuple[int, bool, int]] = []

    def look() -> None:
        meeting.wait(60)
        inside.append((torch.get_num_threads(), torch.is_grad_enabled(), elsewhere(torch.get_num_threads)))

    for _ in range(2):
        cores.run_chunks([look] * count)
        assert torch.get_num_threads() == 3 and torch.is_grad_enabled()
        assert elsewhere(torch.get_num_threads) == 3
    assert inside == [(1, False, 3)] * 2 * count
    with pytest.raises(ZeroDivisionError):
        cores.run_chunks([lambda: 1 // 0])
    assert torch.get_num_threads() == 3
    cores.close()


@pytest.mark.parametrize("count", [1, 3])
def test_errors_come_after_all_have_run(count: int) -> None:
    """The first error is raised after all chunks have run, and the pool can be used again."""
    cores = CpuStepPool(count)
    failed, ran = threading.Event(), list[int]()

    def fail() -> None:
        failed.set()
        raise ValueError("the first")

    def fail_later() -> None:
        assert failed.wait(60)
        ran.append(0)
        raise KeyError("a later one")

    # A single thread takes the chunks in order. With several threads, the last chunk waits until the first has failed.
    with pytest.raises(ValueError, match="the first"):
        cores.run_chunks([fail, *[partial(ran.append, number) for number in range(1, 50)], fail_later])
    assert sorted(ran) == list(range(50))
    cores.run_chunks([partial(ran.append, 50)])
    assert ran[-1] == 50
    cores.close()


@pytest.mark.parametrize("fails", [False, True])
def test_no_tensor_stays(fails: bool) -> None:
    """Chunks and errors are freed without the garbage collector, so neither idle threads nor errors keep a tensor."""
    cores = CpuStepPool(3)
    meeting = threading.Barrier(3)

    def use(tensor: Tensor) -> None:
        meeting.wait(60)
        tensor.add_(1)
        if fails:
            raise ValueError("no")

    tensors = [torch.zeros(4) for _ in range(3)]
    watched = [weakref.ref(tensor) for tensor in tensors]
    gc.disable()
    try:
        try:
            cores.run_chunks([partial(use, tensor) for tensor in tensors])
        except ValueError:
            assert fails
        tensors.clear()
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()
        cores.close()


@pytest.mark.parametrize("count", [1, 3])
def test_chunks_are_let_go_before_the_caller_hears(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads drop their chunks before they report the end; a slow thread would otherwise keep tensors alive."""
    meeting, held = threading.Barrier(count), list[list[int]]()
    chunks = [partial(meeting.wait, 60) for _ in range(count)]

    class Watched(SimpleQueue[None]):
        def put(self, item: None, block: bool = True, timeout: float | None = None) -> None:
            meeting.wait(60)  # all chunks have run
            held.append([sys.getrefcount(chunk) for chunk in chunks])
            meeting.wait(60)  # all threads have counted references
            super().put(item)

    before = [sys.getrefcount(chunk) for chunk in chunks]
    monkeypatch.setattr(module, "SimpleQueue", Watched)
    cores = CpuStepPool(count)
    cores.run_chunks(chunks)
    assert held == [before] * count
    cores.close()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_threads_end(how: str) -> None:
    before = len(names())
    cores = CpuStepPool(3)
    cores.run_chunks([lambda: None] * 8)
    started = [t for t in threading.enumerate() if t.name.startswith("zeropp core ")]
    assert len(started) == before + 2 and all(thread.daemon for thread in started)
    if how == "closed":
        cores.close()
        found: list[int] = []
        cores.run_chunks([lambda: found.append(threading.get_ident())] * 5)
        assert set(found) == {threading.get_ident()}
    del cores
    for thread in started[before:]:
        thread.join(60)
    assert len(names()) == before


def test_one_core_needs_no_thread() -> None:
    before = threading.active_count()
    CpuStepPool(1).run_chunks([lambda: None] * 3)
    assert threading.active_count() == before


@pytest.mark.parametrize("count", [0, -1])
def test_no_cores_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        CpuStepPool(count)
    with pytest.raises(ValueError, match="at least 1"):
        spare_cores(count)


NUMELS = (1, 255, 256, 3 * 512 + 17, 7 * 512, 0)


def make(kind: Callable[..., Optimizer], **options: Any) -> tuple[Optimizer, list[nn.Parameter], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(numel, generator=generator)) for numel in NUMELS]
    grads = [torch.randn(numel, generator=generator) for numel in NUMELS]
    return kind(params, fused=True, **options), params, grads


def steps_of(rule: Rule, optimizer: Optimizer, params: list[nn.Parameter], grads: list[Tensor]) -> list[SliceStep]:
    settings = rule.snapshot(optimizer.param_groups[0])
    return [
        SliceStep(p, g, state, settings, rule.begin_step(settings, p.detach(), state), torch.tensor(2.0))
        for p, g in zip(params, grads, strict=True)
        for state in [optimizer.state[p]]
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options"), [(AdamW, {"amsgrad": True}), (SGD, {"momentum": 0.9})])
def test_rows_step_like_torch(
    kind: Callable[..., Optimizer], options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMEL", 512)
    theirs, whole, grads = make(kind, **options)
    ours, cut, _ = make(kind, **options)
    rule, cores = rule_of(ours), CpuStepPool(count)
    assert rule is not None
    for _ in range(3):
        own = [grad.clone() for grad in grads]
        step_slices(cores, rule, steps_of(rule, ours, cut, own))
        for param, grad in zip(whole, grads, strict=True):
            param.grad = grad / 2
        theirs.step()
        assert all(torch.equal(grad, param.grad) for grad, param in zip(own, whole, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(cut, whole, strict=True))
    for a, b in zip(cut, whole, strict=True):
        assert all(torch.equal(ours.state[a][key], value) for key, value in theirs.state[b].items())
    cores.close()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("grad", torch.ones(511)),
        ("grad", torch.ones(512, dtype=torch.float64)),
        ("grad", torch.ones(1024)[::2]),
        ("grad", torch.ones(512, device="meta")),
        ("param", torch.ones(16, 32)),
        ("exp_avg", torch.ones(8)),
        ("exp_avg", None),
        ("grad_scale", torch.ones(1, dtype=torch.float64)),
        ("grad_scale", torch.ones(2)),
    ],
)
def test_rows_that_kernels_would_misread_are_refused(name: str, bad: Tensor | None) -> None:
    """The error is raised before any slice is stepped, because kernels would read and write beyond the tensors."""
    optimizer = AdamW([nn.Parameter(torch.ones(512))])
    rule = rule_of(optimizer)
    assert rule is not None
    settings = rule.snapshot(optimizer.param_groups[0])
    good = torch.ones(512)
    state: dict[str, Any] = {}
    step = rule.begin_step(settings, good, state)
    fields = {"param": torch.ones(512), "grad": torch.ones(512), "grad_scale": None} | {name: bad}
    other = {key: fields.pop(key, value) for key, value in state.items()}
    states = {key: value for key, value in other.items() if value is not None}
    bad_step = SliceStep(states=states, settings=settings, step=step, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"(?s){name}.*(expected a|call the rule)"):
        step_slices(CpuStepPool(1), rule, [SliceStep(good, torch.ones(512), state, settings, step), bad_step])
    assert torch.equal(good, torch.ones(512))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the number of cores and the seconds of successive runs, by number of threads."""

    def script(cores: int, times: dict[int, list[float]]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr(module, "_trial", lambda numel: lambda cores: None)
        monkeypatch.setattr(module, "_seconds", lambda step, cores: times[cores.count].pop(0))
        module._useful.cache_clear()

    yield script  # type: ignore[misc]
    module._useful.cache_clear()


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: 8.0, 2: 4.0, 4: 3.9, 7: 3.8}, 2),
        ({1: 8.0, 2: 4.0, 4: 2.0, 7: 1.2}, 7),
        ({1: 8.0, 2: 8.1, 4: 9.0, 7: 9.0}, 1),
    ],
)
def test_as_many_cores_as_help(scripted: Callable[..., None], times: dict[int, float], expected: int) -> None:
    """16 cores for 2 ranks leave 7 beside each training thread. The measurement runs once."""
    scripted(16, {count: [9 * seconds, seconds, 1.1 * seconds, seconds] for count, seconds in times.items()})
    assert [spare_cores(2), spare_cores(2)] == [expected] * 2


def test_noise_is_not_believed(scripted: Callable[..., None]) -> None:
    """If one of four runs is much faster, the runs prove nothing, and all cores of the rank are used."""
    scripted(6, {1: [8.0] * 4, 2: [8.0, 3.0, 7.0, 6.0], 4: [7.0] * 4, 5: [7.0] * 4})
    assert spare_cores(1) == 5


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 1), (8, 8), (8, 9), (15, 8)])
def test_a_single_core_is_not_measured(scripted: Callable[..., None], cores: int, ranks: int) -> None:
    scripted(cores, {})
    assert spare_cores(ranks) == 1


def test_the_measurement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real measurement gives 1 or 2 for two cores, and leaves no thread running."""
    monkeypatch.setattr(module, "_ALIKE", float("inf"))
    before = len(names())
    assert module._useful.__wrapped__(2) in (1, 2)
    assert len(names()) == before
