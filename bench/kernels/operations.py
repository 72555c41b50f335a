"""What is timed: each operation as zeropp_kernels has it, and as one would write it in torch without.

Bytes are those that must move once: inputs read, outputs written. ``numel`` is that of the values, whatever is made of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import zeropp_kernels as kernels
from zeropp_kernels import BlockTable, block_table, lossless_layout, message_layout, state_layout

__all__ = ["OPERATIONS", "Operation", "Run"]

Run = Callable[[], None]
MESSAGES = 4  # summed by the reductions


@dataclass(frozen=True)
class Operation:
    """One line of the table.

    Attributes:
        name: as shown.
        target: percent of the copy bandwidth to reach on a GPU at 256 MiB and more; 0 where none is set.
        nbytes: bytes that must move for ``numel`` values.
        make: (numel, device) -> the call of zeropp_kernels, with its memory.
        eager: the same in plain torch, whole tensors at a time; None where nothing like it is written by hand.
    """

    name: str
    target: int
    nbytes: Callable[[int], float]
    make: Callable[[int, str], Run]
    eager: Callable[[int, str], Run] | None = None


def values(numel: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(numel, generator=generator, device=device, dtype=torch.float32).to(dtype)


def messages_for(numel: int, bits: int, count: int, device: str) -> Tensor:
    """``count`` messages with real codes and scales."""
    buffer = torch.empty(message_layout(numel, bits).nbytes * count, dtype=torch.uint8, device=device)
    for part in buffer.chunk(count):
        kernels.quantize_(values(numel, device), part, bits=bits)
    return buffer


def wire(numel: int, bits: int) -> int:
    return message_layout(numel, bits).nbytes


def kept(numel: int) -> int:
    """Bytes of the error, read and written."""
    return 2 * state_layout(numel, 4).nbytes


def copy(numel: int, device: str) -> Run:
    source = values(numel, device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return run


def quantize(bits: int, rotate: bool = False, feedback: bool = False) -> Callable[[int, str], Run]:
    def make(numel: int, device: str) -> Run:
        x = values(numel, device)
        message = torch.empty(wire(numel, bits), dtype=torch.uint8, device=device)
        nbytes = state_layout(numel, bits).nbytes if feedback else 0
        state = torch.zeros(nbytes, dtype=torch.uint8, device=device) if feedback else None
        return lambda: kernels.quantize_(x, message, bits=bits, rotate=rotate, state=state)

    return make


def eager_quantize(bits: int) -> Callable[[int, str], Run]:
    """Codes and scales in tensors of their own; numel a multiple of the group."""

    def make(numel: int, device: str) -> Run:
        group, levels = {8: (256, 127.0), 4: (128, 7.0)}[bits]
        x = values(numel, device).view(-1, group)
        codes = torch.empty(x.shape[0], group * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(x.shape[0], dtype=torch.bfloat16, device=device)

        def run() -> None:
            wide = x.float()
            scale = wide.abs().amax(1).div(levels).clamp_min(2.0**-126).bfloat16()
            found = (wide / scale.float()[:, None]).round().to(torch.int8)
            if bits == 4:
                low, high = found[:, : group // 2], found[:, group // 2 :]
                codes.copy_((low & 15).to(torch.uint8) | (high.to(torch.uint8) << 4))
            else:
                codes.copy_(found.view(torch.uint8))
            scales.copy_(scale)

        return run

    return make


def dequantize(bits: int) -> Callable[[int, str], Run]:
    def make(numel: int, device: str) -> Run:
        message, out = messages_for(numel, bits, 1, device), values(numel, device)
        return lambda: kernels.dequantize_(message, out, bits=bits)

    return make


def eager_dequantize(bits: int) -> Callable[[int, str], Run]:
    def make(numel: int, device: str) -> Run:
        group = {8: 256, 4: 128}[bits]
        codes = torch.randint(0, 256, (numel // group, group * bits // 8), dtype=torch.uint8, device=device)
        scales = values(numel // group, device).abs()
        out = values(numel, device).view(-1, group)

        def run() -> None:
            signed = codes.view(torch.int8)
            if bits == 4:
                signed = torch.cat([(signed << 4) >> 4, signed >> 4], dim=1)
            out.copy_(signed.float() * scales.float()[:, None])

        return run

    return make


def reduce(bits: int) -> Callable[[int, str], Run]:
    def make(numel: int, device: str) -> Run:
        messages = messages_for(numel, bits, MESSAGES, device)
        out = torch.empty(numel, device=device)
        return lambda: kernels.reduce_(messages, out, count=MESSAGES, bits=bits, scale=1 / MESSAGES)

    return make


def reduce_quantize(numel: int, device: str) -> Run:
    sources = messages_for(numel, 8, MESSAGES, device)
    message = torch.empty(wire(numel, 4), dtype=torch.uint8, device=device)
    return lambda: kernels.reduce_quantize_(sources, message, numel=numel, count=MESSAGES, scale=1 / MESSAGES)


def delta_encode(numel: int, device: str) -> Run:
    shard, held = values(numel, device, torch.float32), values(numel, device)
    message = torch.empty(wire(numel, 4), dtype=torch.uint8, device=device)
    return lambda: kernels.delta_encode_(shard, held, message)


def delta_apply(numel: int, device: str) -> Run:
    message, held = messages_for(numel, 4, 1, device), values(numel, device)
    return lambda: kernels.delta_apply_(message, held)


def _stepped(numel: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights after a step, before it, and places for escapes."""
    held = values(numel, device)
    noise = values(numel, device, torch.float32).roll(1)
    new = (held.float() + 0.004 * noise * held.float()).bfloat16()
    return new, held, torch.empty(2, -(-numel // 256) + 1, dtype=torch.int64, device=device)


def lossless_encode(numel: int, device: str) -> Run:
    new, held, offsets = _stepped(numel, device)
    kernels.lossless_count_(new, held, offsets)
    rooms = {"room8": int(offsets[0, -1]), "room16": int(offsets[1, -1])}
    message = torch.empty(lossless_layout(numel, **rooms).nbytes, dtype=torch.uint8, device=device)

    def run() -> None:
        kernels.lossless_count_(new, held, offsets)
        kernels.lossless_encode_(new, held, offsets, message, **rooms)

    return run


def lossless_decode(numel: int, device: str) -> Run:
    new, held, offsets = _stepped(numel, device)
    kernels.lossless_count_(new, held, offsets)
    rooms = {"room8": int(offsets[0, -1]), "room16": int(offsets[1, -1])}
    message = torch.empty(lossless_layout(numel, **rooms).nbytes, dtype=torch.uint8, device=device)
    kernels.lossless_encode_(new, held, offsets, message, **rooms)
    out = torch.empty_like(held)
    return lambda: kernels.lossless_decode_(message, held, out, offsets[None], **rooms)


def _parts(flat: Tensor) -> tuple[list[Tensor], BlockTable]:
    """Twelve tensors that fill a flat buffer, as a transformer block's gradients would."""
    size = max(flat.numel() // 12 // 256 * 256, 256)
    offsets = list(range(0, flat.numel() - size + 1, size))
    table = block_table([size] * len(offsets), offsets, flat.numel(), device=flat.device)
    return [flat[offset : offset + size].clone() for offset in offsets], table


def gather(numel: int, device: str) -> Run:
    tensors, table = _parts(values(numel, device))
    flat = torch.empty(numel, device=device)
    norms = torch.empty(-(-numel // 256), device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    return lambda: kernels.gather_(tensors, table, flat, scale=0.5, norms=norms, flag=flag)


def eager_gather(numel: int, device: str) -> Run:
    tensors, table = _parts(values(numel, device))
    flat = torch.empty(numel, device=device)
    places = [flat[offset : offset + t.numel()] for t, offset in zip(tensors, table.host[2].tolist(), strict=True)]

    def run() -> None:
        torch._foreach_copy_(places, tensors)
        flat.mul_(0.5)
        torch.linalg.vector_norm(flat)
        flat.isfinite().all()

    return run


def scatter(numel: int, device: str) -> Run:
    flat = values(numel, device, torch.float32)
    tensors, table = _parts(values(numel, device))
    return lambda: kernels.scatter_(flat, tensors, table)


def quantize_tensors(numel: int, device: str) -> Run:
    tensors, table = _parts(values(numel, device))
    message = torch.empty(wire(numel, 8), dtype=torch.uint8, device=device)
    return lambda: kernels.quantize_tensors_(tensors, table, message)


OPERATIONS = (
    Operation("copy", 92, lambda n: 4 * n, copy),
    Operation("quantize int8", 92, lambda n: 2 * n + wire(n, 8), quantize(8), eager_quantize(8)),
    Operation("quantize int4", 92, lambda n: 2 * n + wire(n, 4), quantize(4), eager_quantize(4)),
    Operation("quantize int8 from tensors", 92, lambda n: 2 * n + wire(n, 8), quantize_tensors),
    Operation("hadamard + int4", 70, lambda n: 2 * n + wire(n, 4), quantize(4, rotate=True)),
    Operation("feedback + int4", 80, lambda n: 2 * n + kept(n) + wire(n, 4), quantize(4, feedback=True)),
    Operation("hadamard + feedback + int4", 0, lambda n: 2 * n + kept(n) + wire(n, 4), quantize(4, True, True)),
    Operation("dequantize int8", 92, lambda n: 2 * n + wire(n, 8), dequantize(8), eager_dequantize(8)),
    Operation("dequantize int4", 92, lambda n: 2 * n + wire(n, 4), dequantize(4), eager_dequantize(4)),
    Operation("reduce 4 x int8", 0, lambda n: 4 * n + MESSAGES * wire(n, 8), reduce(8)),
    Operation("reduce 4 x int4", 0, lambda n: 4 * n + MESSAGES * wire(n, 4), reduce(4)),
    Operation("reduce 4 x int8 -> int4", 70, lambda n: MESSAGES * wire(n, 8) + wire(n, 4), reduce_quantize),
    Operation("delta4 encode + update", 0, lambda n: 8 * n + wire(n, 4), delta_encode),
    Operation("delta4 apply", 0, lambda n: 4 * n + wire(n, 4), delta_apply),
    Operation("lossless count + encode", 0, lambda n: 8 * n + 0.6 * n, lossless_encode),
    Operation("lossless decode", 0, lambda n: 4 * n + 0.6 * n, lossless_decode),
    Operation("gather bf16 -> fp32, norm, flag", 92, lambda n: 6 * n, gather, eager_gather),
    Operation("scatter fp32 -> bf16", 92, lambda n: 6 * n, scatter),
)
