"""The registered operations on a GPU: streams, graphs, devices, pinned memory, and no wait of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

import zeropp_kernels as kernels
from tests.kernels.cases import same_bits, values
from tests.kernels.operations import NAMES, listed, samples, written
from zeropp_kernels import block_table, message_layout
from zeropp_kernels.dispatch import GPU_WAYS, Launches, operation

triton = pytest.importorskip("triton", reason="Triton comes for Linux only")
pytestmark = pytest.mark.gpu
NUMELS, OFFSETS, NUMEL = [300, 4096, 7], [0, 512, 4608], 4864


def on_card(name: str, device: str = "cuda") -> tuple[object, ...]:
    """Return the arguments of one call, moved to ``device`` except for the table's host tensor."""

    def moved(argument: object) -> object:
        if isinstance(argument, list):
            return [moved(each) for each in argument]
        is_host = isinstance(argument, Tensor) and argument.shape == (3, 2) and argument is arguments[host]
        return argument.to(device) if isinstance(argument, Tensor) and not is_host else argument

    arguments = samples()[name]
    schema = [each.name for each in getattr(torch.ops.zeropp, name).default._schema.arguments]
    host = schema.index("host") if "host" in schema else 0
    return tuple(moved(argument) for argument in arguments)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error if an operation inside makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_on_cpu_and_no_wait(name: str) -> None:
    plain, fast = samples()[name], on_card(name)
    outputs = written(name, fast)
    before = [each._version for each in outputs]
    operation = getattr(torch.ops.zeropp, name)
    operation(*plain)
    with no_waiting():
        operation(*fast)
    for index, (a, b) in enumerate(zip(plain, fast, strict=True)):
        for left, right in zip(listed(a), listed(b), strict=True):
            is_table = left.dtype == torch.int64 and "lossless" not in name
            assert is_table or same_bits(left, right), f"argument {index} differs"
    assert all(each._version > old for each, old in zip(outputs, before, strict=True))


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_prepared_launches_give_the_same_bits(name: str, public: bool) -> None:
    """The second call has tensors at other addresses, and Triton takes no part in its launch."""
    first, fast, general = on_card(name), on_card(name), on_card(name)
    repeated: list[tuple[bool, dict[str, bool]]] = []
    real = Launches.repeat

    def repeat(self: Launches, arguments: tuple[object, ...], **options: bool) -> bool:
        repeated.append((real(self, arguments, **options), options))
        return repeated[-1][0]

    with mock.patch.object(Launches, "repeat", repeat):
        run = operation(name) if public else getattr(torch.ops.zeropp, name)
        run(*first)
        with mock.patch.object(triton.runtime.JITFunction, "run", side_effect=AssertionError("Triton launches")):
            run(*fast)
    assert repeated[-1] == (True, {} if public else {"dispatched": True})
    GPU_WAYS[name][1](*general)
    for left, right in zip(written(name, fast), written(name, general), strict=True):
        is_table = left.dtype == torch.int64 and "lossless" not in name
        assert is_table or same_bits(left, right)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zeropp, name).default, on_card(name))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_device_that_is_not_current(name: str) -> None:
    first, second = on_card(name, "cuda:0"), on_card(name, "cuda:1")
    for arguments in (first, second):
        getattr(torch.ops.zeropp, name)(*arguments)
    assert torch.cuda.current_device() == 0
    for left, right in zip(written(name, first), written(name, second), strict=True):
        assert left.dtype == torch.int64 or same_bits(left, right)


def test_launched_on_the_current_stream() -> None:
    """The kernels run on the current stream, after its earlier work; the host does not wait for a busy stream."""
    side, x = torch.cuda.Stream(), torch.zeros(1 << 22, device="cuda")
    message = torch.empty(message_layout(x.numel(), 8).nbytes, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    for _ in range(2):  # compile the kernels first, because compiling takes longer than the sleep
        kernels.quantize_(x, message)
        kernels.dequantize_(message, out)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(127.0)
        kernels.quantize_(x, message)
        kernels.dequantize_(message, out)
        done = side.record_event()
    assert not done.query(), "the host waited"
    torch.cuda.current_stream().wait_event(done)
    assert bool((out == 127.0).all())


def parts(numels: Sequence[int] = NUMELS) -> list[Tensor]:
    return [values(numel, torch.float32, index).cuda() for index, numel in enumerate(numels)]


def test_pinned_memory_both_ways() -> None:
    """The buffer has 147 tiles, and 32 programs copy them in a loop."""
    numels, offsets, numel = [300, 600_000, 7], [0, 512, 600_576], 600_832
    table, given = block_table(numels, offsets, numel, device="cuda"), parts(numels)
    flat = torch.full((numel,), float("nan"), pin_memory=True)
    kernels.gather_(given, table, flat)
    back = [torch.full_like(each, float("nan")) for each in given]
    kernels.scatter_(flat, back, table)
    torch.cuda.synchronize()
    for tensor, copy, offset in zip(given, back, offsets, strict=True):
        assert same_bits(tensor, copy) and same_bits(flat[offset : offset + tensor.numel()], tensor)


def test_pageable_memory_and_mixed_devices_are_refused() -> None:
    table, given = block_table(NUMELS, OFFSETS, NUMEL, device="cuda"), parts()
    with pytest.raises(ValueError, match="flat is in pageable memory"):
        kernels.gather_(given, table, torch.empty(NUMEL))
    with pytest.raises(ValueError, match=r"tensors\[1\] is on cpu; expected cuda:0"):
        kernels.gather_([given[0], given[1].cpu(), given[2]], table, torch.empty(NUMEL, device="cuda"))
    with pytest.raises(ValueError, match="entries is on cpu; expected cuda:0"):
        kernels.gather_(given, block_table(NUMELS, OFFSETS, NUMEL), torch.empty(NUMEL, device="cuda"))
    with pytest.raises(ValueError, match="messages is on cpu; expected cuda:0"):
        kernels.quantize_(given[0], torch.empty(message_layout(300, 8).nbytes, dtype=torch.uint8))


def test_in_a_graph() -> None:
    """A replay reads the tensors' current values. A capture with new tensors is refused.

    The captured graph would send the addresses of the capture at every replay.
    """
    table, given = block_table(NUMELS, OFFSETS, NUMEL, device="cuda"), parts()
    flat = torch.empty(NUMEL, device="cuda")
    message = torch.empty(message_layout(NUMEL, 4).nbytes, dtype=torch.uint8, device="cuda")
    kernels.gather_(given, table, flat)
    kernels.quantize_tensors_(given, table, message, bits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gather_(given, table, flat)
        kernels.quantize_tensors_(given, table, message, bits=4)
    for each in given:
        each.mul_(0.5)
    graph.replay()
    assert torch.equal(flat[512:4608], given[1])
    expected = torch.empty_like(message)
    kernels.quantize_(flat, expected, bits=4)
    assert torch.equal(message, expected)
    others = parts()
    with pytest.raises(RuntimeError, match="other addresses"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels.gather_(others, table, flat)


def test_staging_of_addresses_survives_a_busy_stream() -> None:
    """Many queued calls use different tensors, and no call may read the addresses that a later call sends."""
    table = block_table(NUMELS, OFFSETS, NUMEL, device="cuda")
    several = [[torch.full((numel,), float(call), device="cuda") for numel in NUMELS] for call in range(50)]
    flats = [torch.empty(NUMEL, device="cuda") for _ in several]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    with no_waiting():
        for given, flat in zip(several, flats, strict=True):
            kernels.gather_(given, table, flat)
    for call, flat in enumerate(flats):
        assert bool((flat[512:4608] == call).all())
