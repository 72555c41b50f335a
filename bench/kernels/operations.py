"""The timed operations: each operation of zeropp_kernels with its buffers, and the same in plain torch (``eager.py``).

The number of bytes of an operation counts each input once and each output once, for each call that the operation
makes. ``numel`` is the number of values, independent of their encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import zeropp_kernels as kernels
from bench.kernels import eager
from zeropp_kernels import BlockTable, block_table, lossless_layout, message_layout, state_layout

__all__ = ["OPERATIONS", "Operation", "Run", "Twin", "parts_of", "values"]

Run = Callable[[], Sequence[Tensor]]  # runs the operation once; returns its main results, to compare both twins
MESSAGES = 4  # number of messages that the reductions sum
BETA = 0.8
SCALE = 1 / MESSAGES


@dataclass(frozen=True)
class Twin:
    """One operation with its buffers: a call of zeropp_kernels, and the same in plain torch (None if not written)."""

    ours: Run
    by_hand: Run | None = None


@dataclass(frozen=True)
class Operation:
    """One line of the table.

    Attributes:
        name: name in the table.
        target: goal on a GPU for 256 MiB and more, in percent of the copy's bandwidth; 0 for no goal.
        nbytes: function from ``numel`` to the bytes that must be moved.
        make: function from ``numel`` and a device to the operation's `Twin`.
    """

    name: str
    target: int
    nbytes: Callable[[int], float]
    make: Callable[[int, str], Twin]


def values(numel: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(numel, generator=generator, device=device, dtype=torch.float32).to(dtype)


def wire(numel: int, bits: int) -> int:
    return message_layout(numel, bits).nbytes


def room(numel: int, bits: int, device: str, count: int = 1) -> Tensor:
    return torch.empty(wire(numel, bits) * count, dtype=torch.uint8, device=device)


def fields(message: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of one message, as views in the shapes that ``eager.py`` uses."""
    layout = message_layout(numel, bits)
    codes = message[: layout.codes_nbytes].view(layout.groups, -1)
    return codes, message[layout.scales_offset :][: 2 * layout.groups].view(torch.bfloat16)


def messages_for(numel: int, bits: int, count: int, device: str) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return a buffer with ``count`` encoded messages of random values, and codes and scales of each message."""
    buffer = room(numel, bits, device, count)
    for seed, part in enumerate(buffer.chunk(count)):
        kernels.quantize_(values(numel, device, seed=seed), part, bits=bits)
    return buffer, [fields(part, numel, bits) for part in buffer.chunk(count)]


def kept(numel: int) -> int:
    """Return the bytes of the error feedback's state, counted twice: read and written."""
    return 2 * state_layout(numel, 4).nbytes


def copy(numel: int, device: str) -> Twin:
    source = values(numel, device)
    target = torch.empty_like(source)
    return Twin(lambda: [target.copy_(source)])


def quantize(bits: int, *, rotate: bool = False, feedback: bool = False) -> Callable[[int, str], Twin]:
    def make(numel: int, device: str) -> Twin:
        x, message = values(numel, device), room(numel, bits, device)
        made = fields(message, numel, bits)
        nbytes = state_layout(numel, bits).nbytes if feedback else 0
        state = torch.zeros(nbytes, dtype=torch.uint8, device=device) if feedback else None
        groups = message_layout(numel, bits).groups
        codes = torch.zeros(groups, numel // groups, dtype=torch.uint8, device=device)
        error = codes, torch.zeros(groups, dtype=torch.bfloat16, device=device)

        def ours() -> Sequence[Tensor]:
            kernels.quantize_(x, message, bits=bits, rotate=rotate, state=state, beta=BETA)
            return made

        def by_hand() -> Sequence[Tensor]:
            wanted = eager.rotate(x) if rotate else x
            return eager.feedback_(wanted, error, bits, BETA) if feedback else eager.encode(wanted, bits)

        return Twin(ours, by_hand)

    return make


def dequantize(bits: int) -> Callable[[int, str], Twin]:
    def make(numel: int, device: str) -> Twin:
        message, (parts,) = messages_for(numel, bits, 1, device)
        out = values(numel, device)

        def ours() -> Sequence[Tensor]:
            kernels.dequantize_(message, out, bits=bits)
            return [out]

        return Twin(ours, lambda: [eager.decode(*parts, bits).to(out.dtype)])

    return make


def reduce(bits: int) -> Callable[[int, str], Twin]:
    def make(numel: int, device: str) -> Twin:
        messages, parts = messages_for(numel, bits, MESSAGES, device)
        out = torch.empty(numel, device=device)

        def ours() -> Sequence[Tensor]:
            kernels.reduce_(messages, out, count=MESSAGES, bits=bits, scale=SCALE)
            return [out]

        return Twin(ours, lambda: [eager.reduce(parts, bits, SCALE)])

    return make


def plain_sum(numel: int, device: str) -> Twin:
    messages, out = values(MESSAGES * numel, device), torch.empty(numel, device=device)
    norms, flag = torch.empty(-(-numel // 256), device=device), torch.zeros(1, dtype=torch.int32, device=device)

    def ours() -> Sequence[Tensor]:
        kernels.sum_(messages, out, count=MESSAGES, scale=SCALE, norms=norms, flag=flag)
        return [out]

    def by_hand() -> Sequence[Tensor]:
        return [eager.plain_sum(messages.chunk(MESSAGES), SCALE)[0]]

    return Twin(ours, by_hand)


def reduce_quantize(numel: int, device: str) -> Twin:
    sources, parts = messages_for(numel, 8, MESSAGES, device)
    message = room(numel, 4, device)
    made = fields(message, numel, 4)

    def ours() -> Sequence[Tensor]:
        kernels.reduce_quantize_(sources, message, numel=numel, count=MESSAGES, scale=SCALE)
        return made

    return Twin(ours, lambda: eager.encode(eager.reduce(parts, 8, SCALE), 4))


def delta_encode(numel: int, device: str) -> Twin:
    shard, held, message = values(numel, device, torch.float32), values(numel, device, seed=1), room(numel, 4, device)
    made = fields(message, numel, 4)

    def ours() -> Sequence[Tensor]:
        kernels.delta_encode_(shard, held, message)
        return *made, held

    other = held.clone()

    def by_hand() -> Sequence[Tensor]:
        codes, scales, new = eager.delta_encode(shard, other)
        return codes, scales, other.copy_(new)

    return Twin(ours, by_hand)


def delta_apply(numel: int, device: str) -> Twin:
    message, (parts,) = messages_for(numel, 4, 1, device)
    held, other = values(numel, device, seed=1), values(numel, device, seed=1)

    def ours() -> Sequence[Tensor]:
        kernels.delta_apply_(message, held)
        return [held]

    def by_hand() -> Sequence[Tensor]:
        eager.delta_apply_(*parts, other)
        return [other]

    return Twin(ours, by_hand)


def _stepped(numel: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights after a step, weights before it, and a buffer for the escapes that ``lossless_count_`` counts."""
    held = values(numel, device)
    noise = values(numel, device, torch.float32).roll(1)
    new = (held.float() + 0.004 * noise * held.float()).bfloat16()
    return new, held, torch.empty(2, lossless_layout(numel, 0, 0).sections + 1, dtype=torch.int64, device=device)


def lossless_encode(numel: int, device: str) -> Twin:
    new, held, starts = _stepped(numel, device)
    kernels.lossless_count_(new, held, starts)
    rooms = {"room8": int(starts[0, -1]), "room16": int(starts[1, -1])}
    message = torch.empty(lossless_layout(numel, **rooms).nbytes, dtype=torch.uint8, device=device)

    def ours() -> Sequence[Tensor]:
        kernels.lossless_count_(new, held, starts)
        kernels.lossless_encode_(new, held, starts, message, **rooms)
        return [message]

    return Twin(ours)


def lossless_decode(numel: int, device: str) -> Twin:
    new, held, starts = _stepped(numel, device)
    kernels.lossless_count_(new, held, starts)
    rooms = {"room8": int(starts[0, -1]), "room16": int(starts[1, -1])}
    message = torch.empty(lossless_layout(numel, **rooms).nbytes, dtype=torch.uint8, device=device)
    kernels.lossless_encode_(new, held, starts, message, **rooms)
    out = torch.empty_like(held)

    def ours() -> Sequence[Tensor]:
        kernels.lossless_decode_(message, held, out, **rooms)
        return [out]

    return Twin(ours)


def parts_of(flat: Tensor) -> tuple[list[Tensor], BlockTable]:
    """Return copies of about twelve equal parts of a flat buffer, and their block table.

    A transformer block has about as many gradients. A remainder of the buffer that is shorter than a part is left out.
    """
    size = max(flat.numel() // 12 // 256 * 256, 256)
    offsets = list(range(0, flat.numel() - size + 1, size))
    table = block_table([size] * len(offsets), offsets, flat.numel(), device=flat.device)
    return [flat[offset : offset + size].clone() for offset in offsets], table


def _places(flat: Tensor, table: BlockTable) -> list[Tensor]:
    _, numels, offsets = table.host.tolist()
    return [flat[offset : offset + size] for offset, size in zip(offsets, numels, strict=True)]


def gather(numel: int, device: str) -> Twin:
    tensors, table = parts_of(values(numel, device))
    flat, norms = torch.empty(numel, device=device), torch.empty(-(-numel // 256), device=device)
    flag, other = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(numel, device=device)
    places = _places(other, table)

    def ours() -> Sequence[Tensor]:
        kernels.gather_(tensors, table, flat, scale=0.5, norms=norms, flag=flag)
        return [flat]

    def by_hand() -> Sequence[Tensor]:
        eager.gather_(tensors, places, other, 0.5)
        return [other]

    return Twin(ours, by_hand)


def scatter(numel: int, device: str) -> Twin:
    flat = values(numel, device, torch.float32)
    tensors, table = parts_of(values(numel, device))
    others, places = [tensor.clone() for tensor in tensors], _places(flat, table)

    def ours() -> Sequence[Tensor]:
        kernels.scatter_(flat, tensors, table)
        return tensors

    def by_hand() -> Sequence[Tensor]:
        eager.scatter_(flat, others, places)
        return others

    return Twin(ours, by_hand)


def quantize_tensors(numel: int, device: str) -> Twin:
    tensors, table = parts_of(values(numel, device))
    message = room(numel, 8, device)
    made = fields(message, numel, 8)
    flat = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    places = _places(flat, table)

    def ours() -> Sequence[Tensor]:
        kernels.quantize_tensors_(tensors, table, message)
        return made

    def by_hand() -> Sequence[Tensor]:
        eager.gather_(tensors, places, flat, 1.0)
        return eager.encode(flat, 8)

    return Twin(ours, by_hand)


OPERATIONS = (
    Operation("copy", 92, lambda n: 4 * n, copy),
    Operation("quantize int8", 92, lambda n: 2 * n + wire(n, 8), quantize(8)),
    Operation("quantize int4", 92, lambda n: 2 * n + wire(n, 4), quantize(4)),
    Operation("quantize int8 from tensors", 92, lambda n: 2 * n + wire(n, 8), quantize_tensors),
    Operation("hadamard + int4", 85, lambda n: 2 * n + wire(n, 4), quantize(4, rotate=True)),
    Operation("feedback + int4", 80, lambda n: 2 * n + kept(n) + wire(n, 4), quantize(4, feedback=True)),
    Operation(
        "hadamard + feedback + int4",
        70,
        lambda n: 2 * n + kept(n) + wire(n, 4),
        quantize(4, rotate=True, feedback=True),
    ),
    Operation("dequantize int8", 92, lambda n: 2 * n + wire(n, 8), dequantize(8)),
    Operation("dequantize int4", 92, lambda n: 2 * n + wire(n, 4), dequantize(4)),
    Operation("reduce 4 x int8", 92, lambda n: 4 * n + MESSAGES * wire(n, 8), reduce(8)),
    Operation("reduce 4 x int4", 92, lambda n: 4 * n + MESSAGES * wire(n, 4), reduce(4)),
    Operation("reduce 4 x int8 -> int4", 85, lambda n: MESSAGES * wire(n, 8) + wire(n, 4), reduce_quantize),
    Operation("sum 4 x bf16 -> fp32, norm, flag", 92, lambda n: 4 * n + MESSAGES * 2 * n, plain_sum),
    Operation("delta4 encode + update", 92, lambda n: 8 * n + wire(n, 4), delta_encode),
    Operation("delta4 apply", 92, lambda n: 4 * n + wire(n, 4), delta_apply),
    Operation("lossless count + encode", 70, lambda n: 8 * n + 0.6 * n, lossless_encode),
    Operation("lossless decode", 60, lambda n: 4 * n + 0.6 * n, lossless_decode),
    Operation("gather bf16 -> fp32, norm, flag", 92, lambda n: 6 * n, gather),
    Operation("scatter fp32 -> bf16", 92, lambda n: 6 * n, scatter),
)
