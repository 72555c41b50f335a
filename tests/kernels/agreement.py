"""Calls of every operation that cover every branch, run by the plain reference and by the kernels and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, DTYPES, poisoned, same_bits, values
from tests.kernels.fast import device
from zeropp_kernels import BlockTable, block_table, lossless_layout, message_layout, reference, state_layout

VARIANTS = [(False, False), (True, False), (False, True), (True, True)]  # rotate, feedback


Arguments = tuple[object, ...]


def check(name: str, arguments: Arguments, outputs: Sequence[int]) -> None:
    """Run an operation by the reference and by the kernels on copies, and require bit-equal outputs.

    Args:
        name: name of the operation.
        arguments: positional arguments of the call. The output tensors among them receive the results.
        outputs: positions of the arguments that the operation writes.
    """

    def copied(argument: object, where: str) -> object:
        if isinstance(argument, Tensor):
            moved = torch.empty(argument.numel() + 1, dtype=argument.dtype, device=where)
            # Keep an address that is no multiple of 16, because kernels choose narrow access for it.
            moved = moved[1:] if argument.data_ptr() % 16 else moved[:-1]
            return moved.view(argument.shape).copy_(argument)
        if isinstance(argument, list):
            return [copied(item, where) for item in argument]
        return argument

    plain = [copied(argument, "cpu") for argument in arguments]
    fast = [copied(argument, DEVICE) for argument in arguments]
    getattr(reference, name)(*plain)
    getattr(device, name)(*fast)
    for position in outputs:
        left, right = plain[position], fast[position]
        pairs = zip(left, right, strict=True) if isinstance(left, list) else [(left, right)]
        for a, b in pairs:
            assert same_bits(a, b), f"{name}: argument {position} differs"
        target = arguments[position]
        if isinstance(target, Tensor):
            target.copy_(left)


SCALED = {"reduce_quantize_": 4, "reduce_": 5, "sum_": 3, "gather_": 5, "scatter_": 5}  # position of the scale


def check_scales(name: str, arguments: Arguments, outputs: Sequence[int]) -> None:
    """Run :func:`check` with the scale as a number, then in a tensor that overrides the number.

    Output tensors of the two runs must have equal bits. Lists of outputs are not compared between the runs.
    """

    def cloned(argument: object) -> object:
        if isinstance(argument, list):
            return [cloned(item) for item in argument]
        if not isinstance(argument, Tensor):
            return argument
        spare = torch.empty(argument.numel() + 1, dtype=argument.dtype)
        return spare[bool(argument.data_ptr() % 16) :][: argument.numel()].view(argument.shape).copy_(argument)

    again = [cloned(argument) for argument in arguments]
    scale = torch.tensor([0.0, arguments[SCALED[name]]])
    # A one-element view inside a larger buffer for some operations, and a tensor without dimensions for the others.
    device_scale = scale[1:] if name in ("reduce_", "gather_") else scale[1].clone()
    again[SCALED[name]] = 7.0
    check(name, arguments, outputs)
    check(name, (*again, device_scale), outputs)
    for position in outputs:
        if isinstance(arguments[position], Tensor):
            assert same_bits(arguments[position], again[position]), f"{name}: scale in a tensor changes {position}"


def states(numel: int, count: int, bits: int, feedback: bool) -> Tensor | None:
    nbytes = state_layout(numel, bits).nbytes * count
    return torch.zeros(nbytes, dtype=torch.uint8) if feedback else None


def encode(x: Tensor, count: int, bits: int, rotate: bool = False) -> Tensor:
    messages = poisoned(message_layout(x.numel() // count, bits).nbytes * count)
    reference.quantize_(x, messages, count, bits, rotate, None, 0.0, False)
    return messages


def quantize(numel: int, dtype: torch.dtype, bits: int) -> None:
    for rotate, feedback in VARIANTS:
        count = 3 if numel < 1000 else 1
        state = states(numel, count, bits, feedback)
        for step in range(3 if feedback and numel < 1000 else 1 + feedback):
            messages = poisoned(message_layout(numel, bits).nbytes * count)
            x = values(numel * count, dtype, step)
            check("quantize_", (x, messages, count, bits, rotate, state, 0.8, step == 2), [1, 5] if feedback else [1])


def quantize_spoilt(bits: int) -> None:
    """Groups with NaN keep their stored error, and a step with ``reset`` clears it."""
    count, numel = 2, 3 * message_layout(1, bits).group
    state = states(numel, count, bits, feedback=True)
    for step, reset in enumerate((False, False, True)):
        x = values(numel * count, torch.float32, step)
        x[numel // 2] = float("nan") if step else 1.0
        messages = poisoned(message_layout(numel, bits).nbytes * count)
        check("quantize_", (x, messages, count, bits, False, state, 0.8, reset), [1, 5])


def dequantize(numel: int, dtype: torch.dtype, bits: int) -> None:
    for rotate in (False, True):
        for source in DTYPES if numel < 1000 else DTYPES[:1]:
            messages = encode(values(2 * numel, source), 2, bits, rotate)
            out = torch.full((2 * numel + 1,), float("nan"), dtype=dtype)[1:]
            check("dequantize_", (messages, out, 2, bits, rotate), [1])


def reduce(numel: int, dtype: torch.dtype, bits: int) -> None:
    variants = [(1, False, 1.0, False), (4, True, 0.25, False), (3, False, 1 / 3, True), (2, True, 3e38, False)]
    variants += [(2, True, 0.5, True)] if dtype == torch.float32 else []  # only float32 can accumulate
    for count, rotate, scale, accumulate in variants:
        messages = torch.cat([encode(values(numel, torch.float32, rank), 1, bits, rotate) for rank in range(count)])
        accumulate = accumulate and dtype == torch.float32
        out = values(numel, dtype, 9)
        check_scales("reduce_", (messages, out.clone(), count, bits, rotate, scale, accumulate, None, None), [1])
        if dtype == torch.float32:
            check("reduce_", (messages, out, count, bits, rotate, scale, accumulate, *stats(numel)), [1, 7, 8])


def stats(numel: int) -> tuple[Tensor, Tensor]:
    """Return norms [blocks] of NaN, of which every block must be overwritten, and a flag [1] that is 0."""
    return torch.full((-(-numel // 256),), float("nan")), torch.zeros(1, dtype=torch.int32)


def plain_sum(numel: int, dtype: torch.dtype) -> None:
    for count, scale, accumulate in [(1, 1.0, False), (2, 0.5, True), (3, 1 / 3, True), (5, 3e38, False)]:
        for spoilt in (False, True):
            messages = torch.cat([values(numel, dtype, rank, spoilt=spoilt) for rank in range(count)])
            # Messages at an aligned and at a misaligned address. Long runs on CPU use only one address for each kind of
            # values, because the interpreter is slow: aligned for finite values, misaligned for those with Inf and NaN.
            both = (messages, torch.cat([messages[:1], messages])[1:])
            for moved in both if numel < 1000 or DEVICE == "cuda" else both[spoilt : spoilt + 1]:
                out = values(numel, torch.float32, 9, spoilt=False)
                norms, flag = stats(numel)
                check_scales("sum_", (moved, out, count, scale, accumulate, norms, flag), [1, 5, 6])
                assert bool(flag) == (not bool(out.isfinite().all()))
                check("sum_", (moved, out.clone(), count, scale, accumulate, None, None), [1])


def wide_sum(dtype: torch.dtype) -> None:
    """Sum messages whose stride is a multiple of 16 bytes, so that all tiles but the last use 128-bit loads."""
    numel, count = 2 * 16384 + 8, 4
    messages = torch.cat([values(numel, dtype, rank, spoilt=False) for rank in range(count)])
    arguments = (messages, values(numel, torch.float32, 9, spoilt=False), count, 0.25, True, *stats(numel))
    check("sum_", arguments, [1, 5, 6])


def reduce_quantize(numel: int, source_bits: int, bits: int) -> None:
    for (rotate, feedback), rotated in zip(VARIANTS, (False, False, True, True), strict=True):
        count, parts = 3, 2 if numel % 512 == 0 else 1
        shares = [encode(values(numel, torch.float32, rank), 1, source_bits, rotated) for rank in range(count)]
        messages = poisoned(message_layout(numel // parts, bits).nbytes * parts)
        state = states(numel // parts, parts, bits, feedback)
        sources = torch.cat(shares)
        arguments = (sources, numel, count, source_bits, 0.5, messages, parts, bits, rotate, state, 0.8, False)
        check_scales("reduce_quantize_", arguments, [5, 9] if feedback else [5])


SCALES = [-1.0, 0.0, 1e30]  # with each of them, gaps of the flat buffer must be +0, not -0 or NaN


SHAPES = {
    "even": [(64, 3), (1024,), (64,), (8, 640)],
    "odd": [(7, 3), (0,), (1000,), (1,), (513,)],
    "misaligned": [(64, 3), (1024,), (64,), (8, 640)],
    # Has tiles inside one tensor, across several, and at an end, for every tile size. The last tensor is misaligned.
    "large": [(70_000,), (7, 3), (65_536,), (40_001,)],
}


def laid_out(kind: str, dtype: torch.dtype) -> tuple[list[Tensor], BlockTable]:
    """Return tensors of the shapes in ``SHAPES[kind]``, and a block table that leaves gaps between them.

    Each half of the flat buffer has a whole number of blocks, so that the buffer can be encoded as two messages.
    """
    shapes = SHAPES[kind]
    numels = [torch.Size(shape).numel() for shape in shapes]
    tensors = [values(n, dtype, i).view(shape) for i, (n, shape) in enumerate(zip(numels, shapes, strict=True))]
    if kind != "misaligned":
        kept = len(tensors) - (kind == "large")
        tensors = [tensor.clone() for tensor in tensors[:kept]] + tensors[kept:]
    offsets, end = [], 256
    for index, tensor in enumerate(tensors):
        offsets.append(end)
        end += -(-tensor.numel() // 256) * 256 + 256 * (index % 2)
    return tensors, block_table(numels, offsets, -(-end // 512) * 512)


def quantize_tensors(shapes: str, dtype: torch.dtype, bits: int) -> None:
    tensors, table = laid_out(shapes, dtype)
    half = table.numel // 2
    for rotate, feedback in VARIANTS:
        messages = poisoned(message_layout(half, bits).nbytes * 2)
        state = states(half, 2, bits, feedback)
        places = (table.host, table.entries, table.owners, table.numel)
        check(
            "quantize_tensors_",
            (tensors, *places, messages, 2, bits, rotate, state, 0.8, False),
            [5, 9] if feedback else [5],
        )


def copies(shapes: str, source: torch.dtype, target: torch.dtype) -> None:
    tensors, table = laid_out(shapes, source)
    if shapes == "odd":
        tensors[2][500] = float("inf")
    places = (table.host, table.entries, table.owners)
    for cut, measured in [(0, True), (100, True), (0, False)]:
        flat = torch.full((table.numel - cut,), float("nan"), dtype=target)
        norms = torch.full((-(-flat.numel() // 256),), float("nan")) if measured else None
        flag = torch.zeros(1, dtype=torch.int32) if measured else None
        for scale in SCALES if measured else SCALES[:1]:
            flag_then = torch.zeros(1, dtype=torch.int32) if measured else None
            check("gather_", (tensors, *places, flat, scale, norms, flag_then, False), [4, 6, 7] if measured else [4])
        check_scales("gather_", (tensors, *places, flat, 0.7, norms, flag, False), [4, 6, 7] if measured else [4])
        assert not measured or bool(flag) == (not bool(flat.isfinite().all()))
        if target == torch.float32:
            total = values(flat.numel(), target, 5)
            arguments = (tensors, *places, total, 0.7, norms, flag, True)
            check_scales("gather_", arguments, [4, 6, 7] if measured else [4])
        back = [torch.full((t.numel() + 4,), float("nan"), dtype=source)[bool(t.data_ptr() % 16) :] for t in tensors]
        back = [room[: t.numel()].view(t.shape) for room, t in zip(back, tensors, strict=True)]
        for scale in (3.0, -1.0, 1e30) if measured else (3.0,):
            check_scales("scatter_", (flat, back, *places, scale, norms, flag), [1, 6, 7] if measured else [1])


def delta(numel: int, dtype: torch.dtype) -> None:
    shard = values(numel, torch.float32)
    held = values(numel, torch.float32).add_(values(numel, torch.float32, 1, spoilt=False) * 0.01).to(dtype)
    for update in (False, True):
        message = poisoned(message_layout(numel, 4).nbytes)
        owned = held.clone()
        check("delta_encode_", (shard, owned, message, update), [1, 2])
    received = torch.cat([held, held])
    check("delta_apply_", (torch.cat([message, message]), received, 2), [1])
    assert same_bits(received, torch.cat([owned, owned])), "owner and receivers differ"


def weights(numel: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Return new values and a bfloat16 reference: most new values are close to the reference, every 17th is not."""
    held = values(numel, torch.bfloat16, seed)
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    new = (held.float() * (1 + 0.02 * noise)).to(dtype)
    new[::17] = values(numel, torch.float32, seed + 1).to(dtype)[::17]
    return new, held


def lossless(numel: int, dtype: torch.dtype) -> None:
    new, held = weights(numel, dtype, 0)
    starts = torch.full((2, -(-numel // 2048) + 1), -1)
    check("lossless_count_", (new, held, starts), [2])
    room8, room16 = starts[:, -1].tolist()
    for rooms in [(room8, room16), (room8 + 7, room16 + 3), (room8 // 2, room16 // 2)]:
        message = poisoned(lossless_layout(numel, *rooms).nbytes)
        check("lossless_encode_", (new, held, starts, message, *rooms), [3])
        out = torch.zeros(2 * numel, dtype=torch.bfloat16)
        twice = torch.cat([message, message])
        check("lossless_decode_", (twice, torch.cat([held, held]), out, 2, *rooms), [2])
