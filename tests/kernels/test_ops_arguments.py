"""The operations refuse wrong arguments, and the error names the argument."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch

import zeropp_kernels as kernels
from tests.kernels.cases import values
from tests.kernels.operations import NAMES, NUMEL, messages_for, samples, written
from zeropp_kernels import MOST_ESCAPES, block_table, lossless_layout, message_layout


def quantize(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"x": torch.ones(NUMEL), "messages": messages_for(NUMEL, 8), **changes}
    return lambda: kernels.quantize_(**arguments)  # type: ignore[arg-type]


def gather(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"tensors": [torch.ones(9)] * 2, "table": TABLE, "flat": torch.ones(600)}
    return lambda: kernels.gather_(**{**arguments, **changes})  # type: ignore[arg-type]


def reduce(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"messages": messages_for(NUMEL, 8, 2), "out": torch.ones(NUMEL), "count": 2}
    return lambda: kernels.reduce_(**{**arguments, **changes})  # type: ignore[arg-type]


def total(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"messages": torch.ones(2 * NUMEL), "out": torch.ones(NUMEL), "count": 2}
    return lambda: kernels.sum_(**{**arguments, **changes})  # type: ignore[arg-type]


TABLE = block_table([9, 9], [0, 256], NUMEL)
BF16 = torch.ones(NUMEL, dtype=torch.bfloat16)
ROOMS = {"room8": 0, "room16": 0}
WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "dtype of x": (quantize(x=torch.ones(NUMEL, dtype=torch.float64)), "x is float64; expected float32 or bfloat16"),
    "shape of x": (quantize(x=torch.ones(20, 30)), r"x has shape \(20, 30\).*one contiguous dimension"),
    "strides of x": (quantize(x=torch.ones(2 * NUMEL)[::2]), r"x has shape.*strides \(2,\).*contiguous"),
    "count": (quantize(count=7), "x has 600 elements, which count=7 does not divide"),
    "scale past float32": (reduce(scale=1e39), "scale is 1e\\+39; expected a number that float32 can hold"),
    "beta without a state": (quantize(beta=5.0), "beta is 5.0; expected 0 <= beta < 1"),
    "count of nothing": (quantize(count=0), "count is 0; expected 1 to 65535"),
    "bits": (quantize(bits=5), "bits is 5; expected 4 or 8"),
    "dtype of messages": (quantize(messages=torch.ones(896)), "messages is float32; expected uint8"),
    "size of messages": (quantize(messages=messages_for(NUMEL + 256, 8)), "messages has 1152 bytes; expected 896: 1 x"),
    "alignment of messages": (quantize(messages=messages_for(NUMEL + 256, 8)[8:904]), "messages starts at an address"),
    "size of state": (quantize(state=messages_for(10, 8)), "state has 384 bytes; expected 896.*state_layout"),
    "beta": (quantize(state=messages_for(NUMEL, 8), beta=1.0), "beta is 1.0; expected 0 <= beta < 1"),
    "device": (quantize(x=torch.ones(NUMEL, device="meta")), "messages is on cpu; expected meta like the other"),
    "dtype of out": (reduce(out=torch.ones(NUMEL, dtype=torch.int32)), "out is int32"),
    "accumulate in 16 bits": (reduce(out=BF16, accumulate=True), "out is bfloat16; expected float32"),
    "norms in 16 bits": (reduce(out=BF16, norms=torch.ones(3)), "out is bfloat16; expected float32"),
    "flag in 16 bits": (reduce(out=BF16, flag=torch.ones(1)), "out is bfloat16; expected float32"),
    "norms of a sum of codes": (reduce(norms=torch.ones(2)), "norms has 2 elements; expected 3"),
    "plain sum in 16 bits": (total(out=BF16), "out is bfloat16; expected float32"),
    "plain sum of 64 bits": (total(messages=torch.ones(2 * NUMEL).double()), "messages is float64; expected float32"),
    "size of a plain sum": (total(count=3), "out has 600 elements; expected 400"),
    "count of a plain sum": (total(count=7), "messages has 1200 elements, which count=7 does not divide"),
    "scale of a plain sum": (total(scale=math.inf), "scale is inf"),
    "norms of a plain sum": (total(norms=torch.ones(2)), "norms has 2 elements; expected 3"),
    "flag of a plain sum": (total(flag=torch.ones(1)), "flag is float32; expected int32"),
    "copy added in 16 bits": (gather(flat=BF16, accumulate=True), "flat is bfloat16; expected float32"),
    "size of what is summed": (reduce(count=3), "messages has 1792 bytes; expected 2688: 3 x 896"),
    "parts of a sum": (
        lambda: kernels.reduce_quantize_(
            messages_for(NUMEL, 8), messages_for(300, 4, 2), numel=NUMEL, count=1, out_count=2
        ),
        "numel // out_count is 300; expected a multiple of 256",
    ),
    "several messages off blocks": (
        lambda: kernels.quantize_tensors_([], block_table([], [], 600), messages_for(300, 8, 2), count=2),
        "table.numel // count is 300; expected a multiple of 256",
    ),
    "offset off a block": (
        lambda: block_table([9, 9], [0, 100], 600),
        r"offsets\[1\] is 100; expected a multiple of 256",
    ),
    "overlap": (lambda: block_table([300, 9], [0, 256], 600), r"offsets\[1\] is 256; .*at least 300"),
    "past the end": (
        lambda: block_table([9, 9], [0, 768], 600),
        "tensor 1 would end at element 777; the flat buffer has 600",
    ),
    "number of offsets": (lambda: block_table([9, 9], [0], 600), "numels has 2 entries and offsets 1"),
    "scale of a copy": (gather(scale=math.inf), "scale is inf; expected a number that float32"),
    "scale of a sum": (reduce(scale=math.nan), "scale is nan; expected a number that float32"),
    "dtype of a scale": (total(scale=torch.ones(1).double()), "scale is float64; expected .* a tensor of float32"),
    "dtype of a copy's scale": (gather(scale=torch.ones(1, dtype=torch.bfloat16)), "scale is bfloat16; expected"),
    "elements of a scale": (reduce(scale=torch.ones(2)), "scale has 2 elements; expected a number, or a tensor of one"),
    "device of a scale": (total(scale=torch.ones((), device="meta")), "scale is on meta; expected cpu like the other"),
    "no tensor": (quantize(x=None), "x is NoneType; expected a dense tensor"),
    "sizes that are none": (lambda: block_table([3.5]), r"numels is \[3.5\]; expected integers"),
    "a layout of less than nothing": (lambda: message_layout(-1, 8), "numel is -1; a message holds 0 or more"),
    "a layout of a fraction": (lambda: message_layout(10.5, 8), "numel is 10.5; expected an integer"),
    "a lossless layout of less": (lambda: lossless_layout(-1, 0, 0), "numel is -1; a message holds 0 or more"),
    "less than nothing": (lambda: block_table([-9], [0], 600), r"numels\[0\] is -9; expected 0 or more"),
    "another size": (gather(tensors=[torch.ones(9), torch.ones(8)]), r"tensors\[1\] has 8 elements; .* made for 9"),
    "too few tensors": (
        gather(tensors=[torch.ones(9)]),
        r"table.host is int64 \[3, 2\]; expected int64 \[3, 1\]",
    ),
    "a longer buffer": (gather(flat=torch.ones(900)), r"table.owners is int32 \[3\]; expected int32 \[4\].*of flat"),
    "a buffer that ends early": (
        gather(tensors=[torch.ones(9), torch.ones(200)], table=block_table([9, 200], [0, 512], 768)),
        "end at element 712; the flat buffer has 600",
    ),
    "two dtypes": (gather(tensors=[torch.ones(9), BF16[:9]]), r"tensors\[1\] is bfloat16 and tensors\[0\] float32"),
    "tensor with gaps": (gather(tensors=[torch.ones(9, 9).t()[:3]] * 2), r"tensors\[0\] has shape \(3, 9\).*gaps"),
    "tensor that overlaps": (gather(tensors=[torch.ones(1).expand(9)] * 2), r"tensors\[0\] has shape \(9,\).*gaps"),
    "norms": (gather(norms=torch.ones(2)), "norms has 2 elements; expected 3"),
    "flag": (gather(flag=torch.ones(1)), "flag is float32; expected int32"),
    "shard": (lambda: kernels.delta_encode_(BF16, BF16.clone(), messages_for(NUMEL, 4)), "shard is bfloat16"),
    "reference": (lambda: kernels.delta_apply_(messages_for(NUMEL, 4), torch.ones(NUMEL)), "reference is float32"),
    "starts": (
        lambda: kernels.lossless_count_(BF16, BF16, torch.zeros(2, 3, dtype=torch.int64)),
        r"starts has shape \(2, 3\); expected \(2, 2\)",
    ),
    "dtype of starts": (lambda: kernels.lossless_count_(BF16, BF16, torch.zeros(2, 2)), "starts is float32; .*int64"),
    "room that places do not reach": (
        lambda: lossless_layout(1 << 40, MOST_ESCAPES + 1, 0),
        f"room8 is {MOST_ESCAPES + 1}; expected 0 to {MOST_ESCAPES} escapes",
    ),
    "room that decoding does not reach": (
        lambda: kernels.lossless_decode_(messages_for(NUMEL, 4), BF16, BF16, room8=0, room16=1 << 31),
        "room16 is 2147483648; expected 0 to",
    ),
    "room": (
        lambda: kernels.lossless_encode_(
            BF16, BF16, torch.zeros(2, 2, dtype=torch.int64), messages_for(NUMEL, 8), **ROOMS
        ),
        "message has 896 bytes; expected 512.*room8=0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, pattern = WRONG[name]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def test_another_device_is_refused_by_name() -> None:
    from zeropp_kernels.dispatch import _unsupported

    elsewhere = [torch.ones(1, device="meta")]
    with pytest.raises(ValueError, match=r"zeropp.gather_ runs on dense CPU, CUDA and ROCm tensors; got one on meta"):
        _unsupported("gather_", elsewhere, torch.ones(1), elsewhere[0])
    with pytest.raises(ValueError, match=r"zeropp.quantize_ runs on dense .*got a torch.sparse_coo one"):
        kernels.quantize_(torch.ones(NUMEL).to_sparse(), messages_for(NUMEL, 8))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_that_autograd_watches_are_refused(name: str) -> None:
    """Autograd would compute a backward with overwritten values. Under no_grad, outputs are plain memory."""
    arguments = samples()[name]
    outputs = [each for each in written(name, arguments) if each.is_floating_point()]
    for output in outputs:
        output.requires_grad_()
        with pytest.raises(ValueError, match=r"requires grad and would be overwritten; call under torch.no_grad\(\)"):
            getattr(torch.ops.zeropp, name)(*arguments)
        with torch.no_grad():
            getattr(torch.ops.zeropp, name)(*arguments)
        output.requires_grad_(False)


def test_starts_of_other_values_are_refused() -> None:
    x, reference = values(NUMEL, torch.bfloat16), values(NUMEL, torch.bfloat16, 1)
    message = torch.empty(lossless_layout(NUMEL, NUMEL, NUMEL).nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="call lossless_count_ with the same values"):
        kernels.lossless_encode_(x, reference, torch.zeros(2, 2, dtype=torch.int64), message, room8=NUMEL, room16=NUMEL)
