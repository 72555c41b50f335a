"""Steps tile by tile: memory that is still read into, or written from, is not used for something else."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from zeropp.comm.events import Event
from zeropp.comm.streams import ThreadStream
from zeropp.offload.home import Place
from zeropp.offload.ring import Ring
from zeropp.optimizer.cores import Cores, SliceStep
from zeropp.optimizer.fused import rule_of
from zeropp.optimizer.tiles import BufferStep, Tiles
from zeropp.params.flat_buffer import FlatBuffer

NUMEL, TILE = 10_000, 1024  # the last tile is a part of one


@dataclass
class LateRow:
    """A row that moves bytes only when its time has come, on a thread for each direction."""

    tensor: Tensor
    reads: ThreadStream
    writes: ThreadStream
    late: dict[str, float]
    in_memory = at_hand = False
    place: Place = "disk"
    nbytes = 0

    def read(self, start: int, into: Tensor) -> Event:
        def work() -> None:
            time.sleep(self.late["read"])
            into.copy_(self.tensor[start : start + into.numel()])

        # What is read must not have been there before.
        into.fill_(float("nan"))
        return self.reads.run(work)

    def write(self, start: int, values: Tensor) -> Event:
        def work() -> None:
            time.sleep(self.late["write"])
            self.tensor[start : start + values.numel()].copy_(values)

        return self.writes.run(work)


@pytest.fixture
def streams() -> Iterator[tuple[ThreadStream, ThreadStream]]:
    found = ThreadStream("reads"), ThreadStream("writes")
    yield found
    for stream in found:
        stream.close()


@pytest.mark.parametrize("late", [{"read": 0.003, "write": 0.0}, {"read": 0.0, "write": 0.005}], ids=str)
@pytest.mark.parametrize(("read_ahead", "write_behind"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("first", [0, 2560])
def test_bits_of_one_call(
    read_ahead: bool, write_behind: bool, first: int, late: dict[str, float], streams: Any
) -> None:
    """``first`` elements are the device's: their states are nowhere, and their weights stay."""
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
    homes = SimpleNamespace(device_numel=first)
    buffer: Any = SimpleNamespace(
        main=main, gradient=SimpleNamespace(row=grad), source=None, homes=homes, main_dtype=torch.float32
    )
    rule = rule_of(optimizer)
    assert rule is not None
    ring, cores = Ring(4, 3 * TILE * 4, pinned=False), Cores(2)
    for done in range(2):
        job = BufferStep(cast(FlatBuffer, buffer), states=cast(Any, states))
        settings = rule.snapshot(optimizer.param_groups[0])
        moments = {name: each.tensor for name, each in states.items()}
        number = rule.begin(settings, main.tensor[first:], {"step": torch.tensor(float(done)), **moments})
        job.slices.append((first, SliceStep(main.tensor[first:], grad.tensor[first:], moments, settings, number)))
        Tiles(ring, cores, rule, read_ahead=read_ahead, write_behind=write_behind).run([job])
    cores.close()
    assert torch.equal(main.tensor[:first], param[:first])
    assert torch.equal(main.tensor[first:], expected.detach()[first:])
    for name, each in states.items():
        assert torch.equal(each.tensor, optimizer.state[expected][name][first:])
