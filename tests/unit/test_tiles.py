"""Steps sub-group by sub-group (tile by tile) do not reuse staging memory while a read or write still uses it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from zeropp.comm.streams import DONE, Event, ThreadStream
from zeropp.offload.read_ahead import Ring
from zeropp.offload.storage_tiers import Place
from zeropp.optimizer import sub_groups
from zeropp.optimizer.cpu_pool import CpuStepPool, step_slices
from zeropp.optimizer.fused import Rule, SettingsSnapshot, SliceStep, rule_of
from zeropp.optimizer.sub_groups import BufferStep, SubGroupSteps
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.wire_copy import Upload

NUMEL, TILE = 10_000, 1024  # the last sub-group is shorter than TILE
Told = Callable[[str, int], None]


@dataclass
class LateRow:
    """A stored tensor with delayed reads and writes, each on a thread of its own.

    Attributes:
        late: seconds by which each "read" and "write" is delayed.
        tell: called with the event ("read begins", ...) and its first element; called for ends in the thread of the
            copy.
    """

    tensor: Tensor
    reads: ThreadStream
    writes: ThreadStream
    late: dict[str, float]
    tell: Told = lambda what, start: None
    in_memory = at_hand = False
    place: Place = "disk"
    nbytes = 0

    def read(self, start: int, into: Tensor) -> Event:
        def work() -> None:
            time.sleep(self.late["read"])
            into.copy_(self.tensor[start : start + into.numel()])
            self.tell("read ends", start)

        self.tell("read begins", start)
        # Fill the target with NaN first, so that a step that does not wait for the read computes NaN.
        into.fill_(float("nan"))
        return self.reads.run(work)

    def write(self, start: int, values: Tensor) -> Event:
        def work() -> None:
            time.sleep(self.late["write"])
            self.tensor[start : start + values.numel()].copy_(values)
            self.tell("write ends", start)

        self.tell("write begins", start)
        return self.writes.run(work)


@pytest.fixture
def streams() -> Iterator[tuple[ThreadStream, ThreadStream]]:
    found = ThreadStream("reads"), ThreadStream("writes")
    yield found
    for stream in found:
        stream.close()


def job_of(
    rule: Rule,
    settings: SettingsSnapshot,
    main: LateRow,
    grad: LateRow,
    states: dict[str, LateRow],
    first: int,
    done: int,
) -> BufferStep:
    """Return a step of the elements from ``first`` on, which the host steps, after ``done`` earlier steps."""
    tiers = SimpleNamespace(device_numel=first)
    buffer: Any = SimpleNamespace(
        main=main, gradient=SimpleNamespace(row=grad), wire_copy=None, tiers=tiers, main_dtype=torch.float32
    )
    job = BufferStep(cast(FlatBuffer, buffer), states=cast(Any, states))
    moments = {name: each.tensor for name, each in states.items()}
    number = rule.begin_step(settings, main.tensor[first:], {"step": torch.tensor(float(done)), **moments})
    job.slices.append((first, SliceStep(main.tensor[first:], grad.tensor[first:], moments, settings, number)))
    return job


def step_units(
    ring: Ring, cores: CpuStepPool, rule: Rule, units: Sequence[Sequence[BufferStep]], **pipeline: bool
) -> None:
    """Step all units once, and wait for their writes, as HostStep does."""
    with contextlib.closing(SubGroupSteps(ring, None, cores, rule, units, **pipeline)) as steps:
        for _ in units:
            upload = Upload(None)
            upload.end(steps.step_unit(upload))
            upload.run()


@pytest.mark.parametrize("late", [{"read": 0.003, "write": 0.0}, {"read": 0.0, "write": 0.005}], ids=str)
@pytest.mark.parametrize(("read_ahead", "write_behind"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("first", [0, 2560])
def test_bits_of_one_call(
    read_ahead: bool, write_behind: bool, first: int, late: dict[str, float], streams: Any
) -> None:
    """The device steps the first ``first`` elements, so they have no states here, and their weights must not change."""
    torch.manual_seed(0)
    param, gradient = torch.randn(NUMEL), torch.randn(NUMEL)
    expected = param.clone().requires_grad_()
    expected.grad = gradient.clone()
    optimizer = AdamW([expected], lr=0.1, fused=True)
    optimizer.step()
    optimizer.step()

    row = partial(LateRow, reads=streams[0], writes=streams[1], late=late)
    main, grad = row(param.clone()), row(gradient.clone())
    states = {name: row(torch.zeros(NUMEL - first)) for name in ("exp_avg", "exp_avg_sq")}
    rule = rule_of(optimizer)
    assert rule is not None
    ring, cores = Ring(4, 3 * TILE * 4), CpuStepPool(2)
    for done in range(2):
        job = job_of(rule, rule.snapshot(optimizer.param_groups[0]), main, grad, states, first, done)
        step_units(ring, cores, rule, [[job]], read_ahead=read_ahead, write_behind=write_behind)
    cores.close()
    assert torch.equal(main.tensor[:first], param[:first])
    assert torch.equal(main.tensor[first:], expected.detach()[first:])
    for name, each in states.items():
        assert torch.equal(each.tensor, optimizer.state[expected][name][first:])


@pytest.mark.parametrize(("read_ahead", "write_behind"), list(itertools.product((False, True), repeat=2)))
def test_reads_and_writes_overlap_the_step_of_a_tile_if_enabled(
    read_ahead: bool, write_behind: bool, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sub-group is read (read_ahead) and the last one written (write_behind) during a step, if enabled."""
    log, stepped = list[tuple[str, int]](), [threading.Event() for _ in range(5)]

    def step(cores: CpuStepPool, rule: Rule, steps: Sequence[SliceStep], copies: Any) -> None:
        number = sum(event.is_set() for event in stepped)
        log.append(("steps", number))
        step_slices(cores, rule, steps, copies)
        log.append(("stepped", number))
        stepped[number].set()

    def tell(name: str, what: str, start: int) -> None:
        number = start // TILE
        if what == "write ends" and number + 1 < len(stepped):
            # With write_behind, end the write only after the next step. Otherwise delay it, so that a step that does
            # not wait for it shows.
            stepped[number + 1].wait(10 if write_behind else 0.05)
        log.append((f"{name}: {what}", number))

    def row(name: str) -> LateRow:
        still = {"read": 0.0, "write": 0.0}
        return LateRow(torch.ones(4 * TILE + 100), streams[0], streams[1], still, partial(tell, name))

    monkeypatch.setattr(sub_groups, "step_slices", step)
    rule = rule_of(AdamW([torch.ones(1)], fused=True))
    assert rule is not None
    settings = rule.snapshot(AdamW([torch.ones(1)], fused=True).param_groups[0])
    states = {name: row(name) for name in ("exp_avg", "exp_avg_sq")}
    units = [[job_of(rule, settings, row("main"), row("grad"), states, 0, 0)]]
    ring = Ring(4, (1 + read_ahead + write_behind) * TILE * 4)
    step_units(ring, CpuStepPool(1), rule, units, read_ahead=read_ahead, write_behind=write_behind)
    at = {entry: index for index, entry in enumerate(log)}
    assert len(at) == len(log) == 5 * (2 + 4 * 2 + 3 * 2)
    for number, name in itertools.product(range(4), ("main", "grad", "exp_avg", "exp_avg_sq")):
        begun = at[f"{name}: read begins", number + 1]
        if read_ahead:
            assert begun < at["steps", number]
            assert number == 0 or begun > at["stepped", number - 1], "only one sub-group may be read ahead"
        else:
            assert begun > at["stepped", number]
        # With read_ahead only, the last step does not wait for the write before it, because that wait is part of the
        # next read. The results are the same.
        if name != "grad" and (write_behind or not read_ahead or number < 3):
            ended = at[f"{name}: write ends", number]
            assert ended > at["stepped", number + 1] if write_behind else ended < at["steps", number + 1]


@pytest.mark.parametrize("bad", ["main", "grad", "exp_avg", "exp_avg_sq"])
def test_after_an_error_nothing_is_under_way(bad: str, streams: Any) -> None:
    """After the error, other code may use the ring's memory, so no read into it may be in flight."""
    log, other = list[str](), ThreadStream("bad")

    def tell(name: str, what: str, start: int) -> None:
        if what == "read ends" and name == bad:
            raise OSError(f"{bad} cannot be read")
        log.append(what)

    def row(name: str) -> LateRow:
        late = {"read": 0.0 if name == bad else 0.1, "write": 0.0}
        return LateRow(
            torch.ones(4 * TILE), other if name == bad else streams[0], streams[1], late, partial(tell, name)
        )

    rule = rule_of(AdamW([torch.ones(1)], fused=True))
    assert rule is not None
    settings = rule.snapshot(AdamW([torch.ones(1)], fused=True).param_groups[0])
    states = {name: row(name) for name in ("exp_avg", "exp_avg_sq")}
    job = job_of(rule, settings, row("main"), row("grad"), states, 0, 0)
    with pytest.raises(OSError, match=f"{bad} cannot be read"):
        step_units(Ring(4, 2 * TILE * 4), CpuStepPool(1), rule, [[job]], read_ahead=True, write_behind=False)
    begun, ended = log.count("read begins"), log.count("read ends")
    # The failing row began one read for each sub-group, and ended none. The other three rows ended all reads.
    assert begun - ended in (1, 2) and ended == begun // 4 * 3
    other.close()


def test_the_next_unit_is_read_during_the_step_of_a_unit(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With read-ahead, units that fit into one sub-group each are pipelined, too."""
    log = list[str]()

    def step(cores: CpuStepPool, rule: Rule, steps: Sequence[SliceStep], copies: Any) -> None:
        log.append("stepped")
        step_slices(cores, rule, steps, copies)

    def row(unit: str) -> LateRow:
        tell = lambda what, start: log.append(f"{unit} {what}")  # noqa: E731
        return LateRow(torch.ones(TILE), *streams, {"read": 0.0, "write": 0.0}, tell)

    monkeypatch.setattr(sub_groups, "step_slices", step)
    optimizer = AdamW([torch.ones(1)], fused=True)
    rule = rule_of(optimizer)
    assert rule is not None
    settings = rule.snapshot(optimizer.param_groups[0])
    units = [
        [job_of(rule, settings, row(unit), row(unit), {name: row(unit) for name in ("exp_avg", "exp_avg_sq")}, 0, 0)]
        for unit in ("first", "second", "third")
    ]
    step_units(Ring(4, 2 * TILE * 4), CpuStepPool(1), rule, units, read_ahead=True, write_behind=False)
    stepped = [at for at, entry in enumerate(log) if entry == "stepped"]
    assert log.index("second read begins") < stepped[0] < log.index("third read begins") < stepped[1]


def new_weights(log: list[Any], fails: bool = False) -> Any:
    """Return a stand-in for a WireCopy that logs the values that it takes."""

    def take(start: int, values: Tensor) -> Event:
        if fails:
            raise RuntimeError("the device is gone")
        log.append((start, values.tolist()))
        return DONE

    return SimpleNamespace(take_new_weights=take, finish_taking=lambda: log.append("finished"))


def test_an_upload_copies_in_order_and_returns_each_buffer() -> None:
    log, ring = list[Any](), Ring(1, 4096)
    upload, thread = Upload(ring), ThreadStream("upload")
    done = thread.run(upload.run)
    for start in range(3):
        buffer = upload.take_buffer()  # waits for the copy of the one before, because there is one buffer
        values = buffer[:8].view(torch.float32).fill_(start)
        upload.send(new_weights(log), start, values, buffer, last=start == 2)
    upload.end([])
    assert done.wait(10) and log == [(0, [0, 0]), (1, [1, 1]), (2, [2, 2]), "finished"]
    thread.close()


def test_an_upload_that_fails_ends_the_waits_of_the_step() -> None:
    ring = Ring(1, 4096)
    upload, thread = Upload(ring), ThreadStream("upload")
    buffer = upload.take_buffer()
    upload.send(new_weights([], fails=True), 0, buffer[:8].view(torch.float32), buffer, last=True)
    done = thread.run(upload.run)
    with pytest.raises(RuntimeError, match="staging buffers were closed"):
        upload.take_buffer()
    with pytest.raises(RuntimeError, match="the device is gone"):
        done.wait(10)
    thread.close()


def test_an_upload_raises_the_error_of_the_step_and_of_writes() -> None:
    late, bad = ThreadStream("writes"), OSError("the disk is gone")

    def write() -> None:
        raise bad

    for end in (lambda upload: upload.fail(bad), lambda upload: upload.end([DONE, late.run(write)])):
        upload = Upload(None)
        end(upload)
        with pytest.raises(OSError, match="the disk is gone"):
            upload.run()
    late.close()
