"""Groups of elements in plain torch: scales, codes, rotation, and the walk over a buffer in tiles that fit a cache.

A tile is a float32 tensor [rows, group]. All arithmetic is elementwise float32, each operation rounded once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..wire import MessageLayout

__all__ = [
    "TILE", "Part", "decode_", "encode_", "parts", "require_cpu", "rotate_", "saturate_", "scale_values", "scratch",
    "tiles", "unrotate_",
]  # fmt: skip

# Elements: 512 KiB of float32, so that a tile and its scratch stay in a core's cache.
TILE = 1 << 17
# The device is named here and below, since torch may have another default.
_LEVELS = {8: torch.tensor(127.0, device="cpu"), 4: torch.tensor(7.0, device="cpu")}
_ONE = torch.tensor(1.0, device="cpu")
# 2**-126 in bfloat16: a smaller scale could have an infinite inverse, and a group of zeros would become NaN.
_SMALLEST_SCALE = 0x0080
# For int4 the largest bfloat16 of which 7 times is finite in float32. int8 needs no such limit: where rounding up gets
# so far that 127 times the scale would be infinite, the largest code is 126.
_LARGEST_SCALE = {8: 0x7F7F, 4: 0x7E12}
_NAN_SCALE = 0x7FC0


class _Scratch(threading.local):
    """Tiles that calls of one thread share: fresh memory would cost more in page faults than the arithmetic."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_scratch = _Scratch()


def scratch(name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, columns] of this thread's buffer of that name."""
    buffer = _scratch.buffers.get((name, dtype))
    if buffer is None:
        # A tensor of that mode could not be written to outside it, and these stay.
        with torch.inference_mode(False):
            buffer = _scratch.buffers[(name, dtype)] = torch.empty(TILE, dtype=dtype, device="cpu")
    # One buffer for a name: whoever asks for it again overwrites what the last one had.
    return buffer[: rows * columns].view(rows, columns)


def require_cpu(tensor: Tensor) -> None:
    """Refuse a tensor that is not on the CPU.

    Scratch is on the CPU. On a GPU torch would also round differently: it divides by a number by multiplying with the
    inverse.

    Raises:
        ValueError: the tensor is on another device.
    """
    if tensor.device.type != "cpu":
        raise ValueError(
            f"reference operations take tensors on the CPU, got one on {tensor.device}; call the operation of the same "
            "name in zeropp_kernels, which launches the kernel there, or move the tensors to the CPU"
        )


@dataclass(frozen=True)
class Part:
    """Codes uint8 [groups, bytes of a group] and scales (bits of bfloat16) int16 [groups] of one message."""

    codes: Tensor
    scales: Tensor

    def rows(self, first: int, last: int) -> Part:
        return Part(self.codes[first:last], self.scales[first:last])


def parts(messages: Tensor, layout: MessageLayout, count: int) -> list[Part]:
    """Views of ``count`` messages that follow each other."""
    require_cpu(messages)
    found = []
    for index in range(count):
        message = messages[index * layout.nbytes : (index + 1) * layout.nbytes]
        if not layout.groups:
            # An empty tensor may have any stride, and views only some.
            message = messages.new_empty(0)
        codes = message[: layout.codes_nbytes].view(layout.groups, layout.group * layout.bits // 8)
        found.append(Part(codes, message[layout.scales_offset :].view(torch.int16)))
    return found


def tiles(layout: MessageLayout) -> Iterator[tuple[int, int]]:
    """(first group, last group) of each tile of a message."""
    # Whole groups: a scale is that of all of them.
    step = TILE // layout.group
    for first in range(0, layout.groups, step):
        yield first, min(first + step, layout.groups)


def _scale_bits(peak: Tensor, bits: int) -> Tensor:
    """int32 [rows]: bfloat16 bits of peak / levels rounded up."""
    # The addition carries into the upper half unless the lower one is zero. What NaN and Inf become here is overwritten
    # by the caller.
    rounded_up = torch.div(peak, _LEVELS[bits]).view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16)
    return rounded_up.clamp_(_SMALLEST_SCALE, _LARGEST_SCALE[bits])


def scale_values(scales: Tensor) -> Tensor:
    """float32 [rows, 1] from bits of bfloat16, int16 or int32 [rows]."""
    return (scales.to(torch.int32) << 16).view(torch.float32).unsqueeze(1)


def encode_(values: Tensor, part: Part, bits: int) -> Tensor | None:
    """Write a tile as codes and scales; returns which groups are not finite, bool [rows], or None if all are."""
    rows, group = values.shape
    work = scratch("encode", rows, group)
    # amax passes NaN on, and NaN is not below Inf.
    peak = torch.amax(torch.abs(values, out=work), 1)
    finite = peak < math.inf
    spoilt = None if finite.all() else ~finite
    scales = _scale_bits(peak, bits)
    if spoilt is not None:
        scales.masked_fill_(spoilt, _NAN_SCALE)
    part.scales.copy_(scales)
    # By the inverse of the scale as it is sent, rounded; round_ takes halves to even. Kernels round in the same places.
    torch.mul(values, torch.div(_ONE, scale_values(scales)), out=work).round_()
    if spoilt is not None:
        # What a machine makes of NaN as an integer is its own business.
        work.masked_fill_(spoilt.unsqueeze(1), 0.0)
    if bits == 8:
        part.codes.view(torch.int8).copy_(work)
        return spoilt
    codes = scratch("codes", rows, group, torch.int8).copy_(work)
    half = group // 2
    packed = part.codes.view(torch.int8)
    # The shift drops the upper bits of the upper code; of the lower one the mask drops the sign extension.
    torch.bitwise_left_shift(codes[:, half:], 4, out=packed)
    packed.bitwise_or_(codes[:, :half].bitwise_and_(15))
    return spoilt


def decode_(part: Part, out: Tensor, bits: int, *, add: bool = False) -> None:
    """``out`` [rows, group] float32 becomes, or gains, the values of a tile; products with a scale are exact."""
    rows, group = out.shape
    scale = scale_values(part.scales)
    codes = part.codes.view(torch.int8)
    if bits == 4:
        half = group // 2
        packed, codes = codes, scratch("codes", rows, group, torch.int8)
        # Up and down again extends the sign of the lower code; the upper one comes down with its own.
        torch.bitwise_left_shift(packed, 4, out=codes[:, :half])
        torch.bitwise_right_shift(codes[:, :half], 4, out=codes[:, :half])
        torch.bitwise_right_shift(packed, 4, out=codes[:, half:])
    if add:
        # May be fused or not: the product is exact.
        out.addcmul_(scratch("decode", rows, group).copy_(codes), scale)
    else:
        out.copy_(codes).mul_(scale)


def _halve(x: Tensor) -> Tensor:
    """One step of the transform in runs of 16: sums of neighbours come first, their differences after them."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even + odd, even - odd), dim=-1)


def rotate_(values: Tensor) -> None:
    """Hadamard transform, times 2**-5, of each 32 elements of a tile, in place.

    In each 128 elements, 16 in a row of the first 64 go with the same 16 of the last 64. Source of the transform:
    SDP4Bit (arXiv 2410.15526). The orthonormal one has the factor 2**-2.5, which no float holds; 2**-5 is exact, keeps
    sums finite, and the scale of a group takes up the difference.
    """
    # [rows of 128, halves, runs, 16].
    lower, upper = values.mul_(0.03125).view(-1, 2, 4, 16).unbind(1)
    pair = torch.stack((lower + upper, lower - upper), dim=1)
    # Four steps in runs of 16, after the one between the halves: 2**5 elements.
    for _ in range(4):
        pair = _halve(pair)
    values.copy_(pair.view(values.shape))


def unrotate_(values: Tensor) -> None:
    """The inverse of :func:`rotate_`, in place."""
    rotate_(values)
    values.mul_(32.0)


def saturate_(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What passes the largest finite value of ``dtype`` becomes that value; NaN stays NaN. In place."""
    # clamp_ passes NaN on.
    limit = torch.finfo(dtype).max
    return values.clamp_(-limit, limit)
