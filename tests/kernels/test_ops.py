"""The registered operations as torch uses them: schemas, written tensors, empty inputs, memory layouts and flags."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import zeropp_kernels as kernels
from tests.kernels.cases import BITS, DTYPES, values
from tests.kernels.fast import device
from tests.kernels.operations import NAMES, NUMEL, messages_for, real_messages_of, samples, written
from zeropp_kernels import block_table, message_layout, reference


def test_every_operation_has_a_sample() -> None:
    assert sorted(NAMES) == sorted(name for name in kernels.__all__ if name.endswith("_") and name != "__version__")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zeropp, name).default, samples()[name])


@pytest.mark.parametrize("name", NAMES)
def test_outputs_count_as_written(name: str) -> None:
    """Operations raise the version of outputs, so autograd refuses a backward through a value overwritten since."""
    arguments = samples()[name]
    outputs = written(name, arguments)
    # Outputs that stay unchanged are left out: the reference stores no addresses in a table, and the flag stays 0.
    outputs = [each for each in outputs if name.startswith("lossless") or each.dtype not in (torch.int64, torch.int32)]
    before = [each._version for each in outputs]
    getattr(torch.ops.zeropp, name)(*arguments)
    assert outputs and all(each._version > old for each, old in zip(outputs, before, strict=True))


def test_after_inference_mode_and_with_gradients() -> None:
    """Scratch memory made in inference mode can be used outside; inputs that require gradients are only read."""

    def round_trip(x: Tensor) -> Tensor:
        message, out = messages_for(x.numel(), 4), torch.empty(x.numel())
        kernels.quantize_(x, message, bits=4, rotate=True)
        kernels.dequantize_(message, out, bits=4, rotate=True)
        return out

    found = []

    def work() -> None:
        x = values(NUMEL, torch.float32)
        with torch.inference_mode():
            found.append(round_trip(x))
        found.append(round_trip(x))
        found.append(round_trip(x.clone().requires_grad_()))
        targets = [torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(300))]
        with torch.no_grad():
            kernels.scatter_(x.clone(), targets, block_table([100, 300], [0, 256], NUMEL))
        found.append(torch.cat([target.detach() for target in targets]))

    thread = threading.Thread(target=work)  # a new thread, because scratch memory is kept per thread
    thread.start()
    thread.join()
    assert len(found) == 4 and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[3][:100], values(NUMEL, torch.float32)[:100])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_inputs(dtype: torch.dtype, bits: int) -> None:
    nothing, message = torch.empty(0, dtype=dtype), messages_for(0, bits)
    kernels.quantize_(nothing, message, bits=bits)
    kernels.dequantize_(message, nothing, bits=bits)
    kernels.reduce_(message, nothing, count=2, bits=bits)
    kernels.reduce_quantize_(message, message, numel=0, count=3, source_bits=bits, bits=bits)
    full = messages_for(512, bits).fill_(7)
    kernels.quantize_tensors_([], block_table([], [], 512), full, bits=bits)
    assert (full[: message_layout(512, bits).codes_nbytes] == 0).all()
    kernels.gather_([nothing], block_table([0], [0], 300), flat := torch.ones(300, dtype=dtype))
    assert (flat == 0).all()
    kernels.scatter_(nothing, [nothing], block_table([0], [0], 0))
    starts = torch.full((2, 1), 5)
    if dtype == torch.bfloat16:
        kernels.lossless_count_(nothing, nothing, starts)
        kernels.lossless_encode_(nothing, nothing, starts, messages_for(0, 4), room8=0, room16=0)
        kernels.lossless_decode_(messages_for(0, 4), nothing, nothing, room8=0, room16=0)
        assert (starts == 0).all()
        kernels.delta_encode_(torch.empty(0), nothing, messages_for(0, 4))
        kernels.delta_apply_(messages_for(0, 4), nothing)


def test_tensors_are_read_in_the_order_of_their_memory() -> None:
    """channels_last, transposed and size-1 tensors are accepted, as is every tensor without gaps in memory."""
    x = torch.arange(2 * 3 * 4 * 5.0)
    shapes = [x.view(2, 4, 5, 3).permute(0, 3, 1, 2), x.view(30, 4).t(), x.view(1, 120, 1)]
    table = block_table([120] * 3)
    flat, message = torch.empty(table.numel), messages_for(table.numel, 8)
    kernels.gather_(shapes, table, flat)
    kernels.quantize_tensors_(shapes, table, message)
    for offset in (0, 256, 512):
        assert torch.equal(flat[offset : offset + 120], x) and not flat[offset + 120 : offset + 256].any()
    expected = messages_for(table.numel, 8)
    kernels.quantize_(flat, expected)
    assert torch.equal(message, expected)
    for each in (back := [torch.zeros_like(shape) for shape in shapes]):
        assert not each.any()
    kernels.scatter_(flat, back, table)
    assert all(map(torch.equal, back, shapes))


def test_the_flag_is_set_for_non_finite_written_values() -> None:
    table, flag = block_table([4]), torch.zeros(1, dtype=torch.int32)
    for value, dtype, expected in [
        (65519.0, torch.float16, 0), (65520.0, torch.float16, 1), (3.39e38, torch.bfloat16, 0),
        (3.4e38, torch.bfloat16, 1), (3.4e38, torch.float32, 0),
    ]:  # fmt: skip
        flag.zero_()
        flat = torch.empty(256, dtype=dtype)
        kernels.gather_([torch.full((4,), value)], table, flat, flag=flag)
        assert int(flag) == expected == int(not flat.isfinite().all())


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_a_scale_on_the_device_that_is_not_finite_shows(factor: float) -> None:
    """The host cannot refuse an Inf or NaN scale without waiting. Flags are set, and gaps of the buffer stay zero."""
    scale, table, x = torch.tensor(factor), block_table([100, 100]), torch.ones(100)
    for place in (reference, device):
        flat, out, flags = torch.ones(512), torch.ones(100), torch.zeros(3, 1, dtype=torch.int32)
        places = (table.host, table.entries, table.owners)
        place.gather_([x, x], *places, flat, 1.0, None, flags[0], False, scale)
        place.sum_(torch.cat([x, x]), out, 2, 1.0, False, None, flags[1], scale)
        place.reduce_(real_messages_of(x), out, 1, 8, False, 1.0, False, None, flags[2], scale)
        assert flags.all() and not flat.view(2, 256)[:, 100:].any()
        assert not flat.view(2, 256)[:, :100].isfinite().any() and not out.isfinite().any()


def test_a_sum_that_passes_the_largest_number_shows() -> None:
    """A float32 sum becomes Inf, which the next hop encodes as NaN; 16-bit results are clamped to the largest value."""
    messages = torch.cat([real_messages_of(torch.full((256,), 3e38)) for _ in range(3)])
    out, small = torch.empty(256), torch.empty(256, dtype=torch.bfloat16)
    kernels.reduce_(messages, out, count=3)
    kernels.reduce_(messages, small, count=3)
    assert out.isinf().all() and (small == torch.finfo(torch.bfloat16).max).all()
    again = messages_for(256, 4)
    kernels.reduce_quantize_(messages, again, numel=256, count=3)
    kernels.dequantize_(again, out, bits=4)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotated_sum_that_passes_the_largest_number_shows(dtype: torch.dtype) -> None:
    """Exactly the 32 elements that are rotated together become NaN. A clamped rotation would look finite."""
    x = torch.zeros(256)
    x[32:48] = x[96:112] = 3e38
    out = torch.empty(256, dtype=dtype)
    kernels.reduce_(torch.cat([real_messages_of(x, rotate=True)] * 3), out, count=3, rotate=True)
    assert out.isnan().tolist() == (x != 0).tolist()


def test_a_table_packs_by_default() -> None:
    table = block_table(iter([300, 0, torch.Size([7]).numel()]))
    assert table.host[2].tolist() == [0, 512, 512] and table.numel == 768
    assert block_table([]).numel == 0 and block_table([5], [512]).numel == 768
