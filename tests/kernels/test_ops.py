"""The registered operations: what torch asks of them, and what they ask of their arguments."""

from __future__ import annotations

import math
import re
import shutil
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zeropp_kernels as kernels
from tests.kernels.cases import BITS, DTYPES, values
from zeropp_kernels import block_table, lossless_layout, message_layout, state_layout

NUMEL = 600


def messages_for(numel: int, bits: int, count: int = 1) -> Tensor:
    return torch.zeros(message_layout(numel, bits).nbytes * count, dtype=torch.uint8)


def real_messages(numel: int, bits: int, count: int = 1) -> Tensor:
    messages = messages_for(numel, bits, count)
    kernels.quantize_(values(numel * count, torch.float32, 3), messages, count=count, bits=bits)
    return messages


def samples() -> dict[str, tuple[object, ...]]:
    """Arguments of one call of each operation, as torch.ops sees them."""
    x = values(NUMEL, torch.bfloat16)
    state = torch.zeros(state_layout(NUMEL, 4).nbytes, dtype=torch.uint8)
    held = values(NUMEL, torch.bfloat16, 1)
    offsets = torch.zeros(2, 4, dtype=torch.int64)
    kernels.lossless_count_(x, held, offsets)
    lossless = torch.zeros(lossless_layout(NUMEL, NUMEL, NUMEL).nbytes, dtype=torch.uint8)
    tensors, table = [values(100, torch.float32), values(300, torch.float32)], block_table([100, 300], [0, 256], NUMEL)
    places = (table.host, table.entries, table.owners)
    shard, flat = values(NUMEL, torch.float32).clone(), torch.zeros(NUMEL)
    norms, flag = torch.zeros(3), torch.zeros(1, dtype=torch.int32)
    return {
        "quantize_": (x, messages_for(NUMEL, 4), 1, 4, True, state, 0.8, False),
        "quantize_tensors_": (tensors, *places, NUMEL, messages_for(NUMEL, 8), 1, 8, False, None, 0.0, False),
        "reduce_quantize_": (
            real_messages(NUMEL, 8, 2), NUMEL, 2, 8, 0.5, messages_for(NUMEL, 4), 1, 4, False, state, 0.8, True,
        ),
        "dequantize_": (real_messages(NUMEL, 8), torch.zeros(NUMEL), 1, 8, False),
        "reduce_": (real_messages(NUMEL, 8, 3), torch.zeros(NUMEL), 3, 8, False, 0.5, True),
        "delta_encode_": (shard, held.clone(), messages_for(NUMEL, 4), True),
        "delta_apply_": (real_messages(NUMEL, 4), held.clone(), 1),
        "lossless_count_": (x, held, torch.zeros_like(offsets)),
        "lossless_encode_": (x, held, offsets, lossless, NUMEL, NUMEL),
        "lossless_decode_": (lossless, held, torch.zeros_like(held), offsets[None].clone(), 1, NUMEL, NUMEL),
        "gather_": (tensors, *places, flat, 1.0, norms, flag),
        "scatter_": (shard, [tensor.clone() for tensor in tensors], *places, 2.0, None, None),
    }  # fmt: skip


NAMES = list(samples())


def test_every_operation_has_a_sample() -> None:
    assert sorted(NAMES) == sorted(name for name in kernels.__all__ if name.endswith("_"))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zeropp, name).default, samples()[name])


def written(name: str, arguments: tuple[object, ...]) -> list[Tensor]:
    """The tensors that an operation says it writes."""
    declared = getattr(torch.ops.zeropp, name).default._schema.arguments
    pairs = zip(declared, arguments, strict=True)
    return [t for each, value in pairs if each.alias_info and each.alias_info.is_write for t in listed(value)]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_count_as_written(name: str) -> None:
    """Autograd refuses a backward through a value that an operation has overwritten since."""
    arguments = samples()[name]
    outputs = written(name, arguments)
    if name in ("gather_", "scatter_", "quantize_tensors_"):  # plain torch needs no addresses, and the flag stays 0
        outputs = [each for each in outputs if each.dtype not in (torch.int64, torch.int32)]
    before = [each._version for each in outputs]
    getattr(torch.ops.zeropp, name)(*arguments)
    assert outputs and all(each._version > old for each, old in zip(outputs, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_inside_a_compiled_region(name: str) -> None:
    """One graph, and the same results; the compiler sees through to the operation and its outputs."""
    operation = getattr(torch.ops.zeropp, name)

    def run(*arguments: object) -> None:
        operation(*arguments)

    torch._dynamo.reset()  # one function serves all operations, and compiles anew for each
    plain, compiled = samples()[name], samples()[name]
    run(*plain)
    torch.compile(run, fullgraph=True, backend="aot_eager")(*compiled)
    changed = 0
    for before, left, right in zip(samples()[name], plain, compiled, strict=True):
        for old, a, b in zip(listed(before), listed(left), listed(right), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
            changed += not torch.equal(old.nan_to_num(), a.nan_to_num())
    assert changed, "the operation wrote nothing"


def listed(argument: object) -> list[Tensor]:
    """The tensors of an argument."""
    found = argument if isinstance(argument, list) else [argument]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def test_after_inference_mode_and_with_gradients() -> None:
    """Memory that calls share was first made in inference mode; inputs that require gradients are only read."""

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

    thread = threading.Thread(target=work)  # shared memory belongs to a thread
    thread.start()
    thread.join()
    assert len(found) == 4 and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[3][:100], values(NUMEL, torch.float32)[:100])


def test_public_functions_compile_whole() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def round_trip(x: Tensor, message: Tensor, out: Tensor) -> Tensor:
        kernels.quantize_(x * 2, message)
        kernels.dequantize_(message, out)
        return out + 1

    x, message = values(NUMEL, torch.float32).clamp(-9, 9), messages_for(NUMEL, 8)
    found = round_trip(x, message, torch.zeros(NUMEL))
    assert (found - 1 - 2 * x).abs().max() < 0.1


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_default_compiler() -> None:
    """Through inductor, which plans memory anew: what operations write stays where they write it."""
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
    offsets = torch.full((2, 1), 5)
    if dtype == torch.bfloat16:
        kernels.lossless_count_(nothing, nothing, offsets)
        kernels.lossless_encode_(nothing, nothing, offsets, messages_for(0, 4), room8=0, room16=0)
        kernels.lossless_decode_(messages_for(0, 4), nothing, nothing, offsets[None], room8=0, room16=0)
        assert (offsets == 0).all()
        kernels.delta_encode_(torch.empty(0), nothing, messages_for(0, 4))
        kernels.delta_apply_(messages_for(0, 4), nothing)


def quantize(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"x": torch.ones(NUMEL), "messages": messages_for(NUMEL, 8), **changes}
    return lambda: kernels.quantize_(**arguments)  # type: ignore[arg-type]


def gather(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"tensors": [torch.ones(9)] * 2, "table": TABLE, "flat": torch.ones(600)}
    return lambda: kernels.gather_(**{**arguments, **changes})  # type: ignore[arg-type]


def reduce(**changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {"messages": messages_for(NUMEL, 8, 2), "out": torch.ones(NUMEL), "count": 2}
    return lambda: kernels.reduce_(**{**arguments, **changes})  # type: ignore[arg-type]


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
    "offsets": (
        lambda: kernels.lossless_count_(BF16, BF16, torch.zeros(2, 3, dtype=torch.int64)),
        r"offsets has shape \(2, 3\); expected \(2, 4\)",
    ),
    "room": (
        lambda: kernels.lossless_encode_(
            BF16, BF16, torch.zeros(2, 4, dtype=torch.int64), messages_for(NUMEL, 8), **ROOMS
        ),
        "message has 896 bytes; expected 384.*room8=0",
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
    """A backward through what they were before would be silently wrong; under no_grad they are plain memory."""
    arguments = samples()[name]
    outputs = [each for each in written(name, arguments) if each.is_floating_point()]
    for output in outputs:
        output.requires_grad_()
        with pytest.raises(ValueError, match=r"requires grad and would be overwritten; call under torch.no_grad\(\)"):
            getattr(torch.ops.zeropp, name)(*arguments)
        with torch.no_grad():
            getattr(torch.ops.zeropp, name)(*arguments)
        output.requires_grad_(False)


def test_tensors_are_read_in_the_order_of_their_memory() -> None:
    """channels_last, transposed, and with sizes of 1: whatever has no gaps."""
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


def test_the_flag_is_that_of_what_is_written() -> None:
    table, flag = block_table([4]), torch.zeros(1, dtype=torch.int32)
    for value, dtype, expected in [
        (65519.0, torch.float16, 0), (65520.0, torch.float16, 1), (3.39e38, torch.bfloat16, 0),
        (3.4e38, torch.bfloat16, 1), (3.4e38, torch.float32, 0),
    ]:  # fmt: skip
        flag.zero_()
        flat = torch.empty(256, dtype=dtype)
        kernels.gather_([torch.full((4,), value)], table, flat, flag=flag)
        assert int(flag) == expected == int(not flat.isfinite().all())


def test_a_sum_that_passes_the_largest_number_shows() -> None:
    """In float32 as Inf and to the next hop as NaN; 16 bits hold their largest value."""
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
    """All 32 elements that are rotated together, and no other; a clamped rotation would look finite."""
    x = torch.zeros(256)
    x[32:48] = x[96:112] = 3e38
    out = torch.empty(256, dtype=dtype)
    kernels.reduce_(torch.cat([real_messages_of(x, rotate=True)] * 3), out, count=3, rotate=True)
    assert out.isnan().tolist() == (x != 0).tolist()


def test_sizes_may_change_inside_a_compiled_region() -> None:
    """Sizes, counts and rooms are symbols to the compiler: one graph for fixed ones, and one for all others."""
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


def test_offsets_of_other_values_are_refused() -> None:
    x, reference = values(NUMEL, torch.bfloat16), values(NUMEL, torch.bfloat16, 1)
    message = torch.empty(lossless_layout(NUMEL, NUMEL, NUMEL).nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="call lossless_count_ with the same values"):
        kernels.lossless_encode_(
            x, reference, torch.zeros(2, 4, dtype=torch.int64), message, room8=NUMEL, room16=NUMEL
        )


def real_messages_of(x: Tensor, rotate: bool = False) -> Tensor:
    message = messages_for(x.numel(), 8)
    kernels.quantize_(x, message, rotate=rotate)
    return message


def test_a_table_packs_by_default() -> None:
    table = block_table(iter([300, 0, torch.Size([7]).numel()]))
    assert table.host[2].tolist() == [0, 512, 512] and table.numel == 768
    assert block_table([]).numel == 0 and block_table([5], [512]).numel == 768
