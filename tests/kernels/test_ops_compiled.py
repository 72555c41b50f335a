"""The registered operations inside torch.compile: one graph, the results of eager calls, and changing sizes."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

import zeropp_kernels as kernels
from tests.kernels.cases import values
from tests.kernels.operations import NAMES, NUMEL, listed, messages_for, real_messages, samples
from zeropp_kernels import block_table, message_layout, state_layout


@pytest.mark.parametrize("name", NAMES)
def test_inside_a_compiled_region(name: str) -> None:
    """The operation compiles without a graph break, and the compiled call writes the same outputs as the eager call."""
    operation = getattr(torch.ops.zeropp, name)

    def run(*arguments: object) -> None:
        operation(*arguments)

    # All operations share the code object of ``run``, and recompiling it for each would exceed Dynamo's limit.
    torch._dynamo.reset()
    plain, compiled = samples()[name], samples()[name]
    run(*plain)
    torch.compile(run, fullgraph=True, backend="aot_eager")(*compiled)
    changed = 0
    for before, left, right in zip(samples()[name], plain, compiled, strict=True):
        for old, a, b in zip(listed(before), listed(left), listed(right), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
            changed += not torch.equal(old.nan_to_num(), a.nan_to_num())
    assert changed, "the operation wrote nothing"


def test_public_functions_compile_whole() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def round_trip(x: Tensor, message: Tensor, out: Tensor) -> Tensor:
        kernels.quantize_(x * 2, message)
        kernels.dequantize_(message, out)
        return out + 1

    x, message = values(NUMEL, torch.float32).clamp(-9, 9), messages_for(NUMEL, 8)
    found = round_trip(x, message, torch.zeros(NUMEL))
    assert (found - 1 - 2 * x).abs().max() < 0.1


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_scale_in_a_tensor_may_change() -> None:
    """A scale in a tensor gives one graph for all values, with the results of eager calls with a number."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    table, messages = block_table([NUMEL]), real_messages(NUMEL, 8, 2)
    plain, source = torch.randn(2 * NUMEL), [torch.randn(NUMEL)]

    def results() -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        return *torch.zeros(2, NUMEL), torch.zeros(table.numel), messages_for(NUMEL, 4), [torch.zeros(NUMEL)]

    def work(
        out: Tensor, total: Tensor, flat: Tensor, again: Tensor, back: list[Tensor], scale: float | Tensor
    ) -> None:
        kernels.reduce_(messages, out, count=2, scale=scale)
        kernels.sum_(plain, total, count=2, scale=scale)
        kernels.gather_(source, table, flat, scale=scale)
        kernels.scatter_(flat, back, table, scale=scale)
        kernels.reduce_quantize_(messages, again, numel=NUMEL, count=2, scale=scale)

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    for step in range(12):
        expected, found = results(), results()
        work(*expected, 0.1 * step)
        compiled(*found, torch.tensor(0.1 * step))
        assert all(map(torch.equal, (*found[:4], *found[4]), (*expected[:4], *expected[4])))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_layouts_inside_a_compiled_region() -> None:
    """The compiler traces layouts with symbolic sizes, and gives no warning about their lru_cache."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def room_for(x: Tensor) -> Tensor:
        nbytes = message_layout(x.numel(), 8).nbytes + state_layout(x.numel(), 4).nbytes
        return x.new_empty(nbytes, dtype=torch.uint8)

    for numel in (10, 200, 3000, 40_000):
        expected = message_layout(numel, 8).nbytes + state_layout(numel, 4).nbytes
        assert room_for(torch.ones(numel)).numel() == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_default_compiler() -> None:
    """Inductor plans memory itself; the tensors that operations write must still hold the results."""
    table, norms = block_table([100, 300], [0, 256], NUMEL), torch.empty(3)

    def step(x: Tensor, message: Tensor, state: Tensor, out: Tensor, targets: list[Tensor]) -> Tensor:
        kernels.quantize_(x * 2, message, bits=4, rotate=True, state=state)
        kernels.dequantize_(message, out, bits=4, rotate=True)
        kernels.scatter_(out * 3, targets, table, norms=norms)
        return out + 1

    found = []
    for run in (step, torch.compile(step, fullgraph=True)):
        x, message = values(NUMEL, torch.float32), messages_for(NUMEL, 4)
        state = torch.zeros(state_layout(NUMEL, 4).nbytes, dtype=torch.uint8)
        out, targets = torch.empty(NUMEL), [torch.empty(100), torch.empty(300)]
        found.append([run(x, message, state, out, targets), message, state, out, *targets, norms.clone()])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_sizes_may_change_inside_a_compiled_region() -> None:
    """Sizes and counts become symbols of the compiler, so 11 calls with changing sizes need at most 6 graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def pass_on(x: Tensor, message: Tensor, out: Tensor, count: int) -> None:
        kernels.quantize_(x, message, count=count)
        kernels.reduce_quantize_(message, out, numel=x.numel() // count, count=count)

    compiled = torch.compile(pass_on, fullgraph=True, backend="aot_eager")
    for step in range(1, 12):
        numel, count = 256 * step, step % 3 + 1
        x = values(numel * count, torch.float32)
        given = [(x, messages_for(numel, 8, count), messages_for(numel, 4), count) for _ in range(2)]
        pass_on(*given[0])
        compiled(*given[1])
        assert torch.equal(given[0][2], given[1][2])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
