"""Groups of elements in plain torch: scales, codes, Hadamard transform, and iteration over a buffer in tiles.

A tile is a float32 tensor [rows, group], where a row is one group, small enough to stay in a core's cache. All float
arithmetic is in float32 with one rounding per operation.
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

# Elements of a tile: 512 KiB of float32, so that a tile and its scratch tensors stay in a core's cache.
TILE = 1 << 17
# device="cpu" here and below, because torch.set_default_device may have set another default.
_LEVELS = {8: torch.tensor(127.0, device="cpu"), 4: torch.tensor(7.0, device="cpu")}
_ONE = torch.tensor(1.0, device="cpu")
# Bits of 2**-126 in bfloat16. The inverse of a smaller scale could be Inf, and a group of zeros would become NaN.
_SMALLEST_SCALE = 0x0080
# Bits of the largest scale, by the bits of a code. For int4: the largest bfloat16 s with 7 * s finite in float32. int8
# needs no limit below the largest bfloat16: if rounding up makes 127 * s infinite, the largest code is 126.
_LARGEST_SCALE = {8: 0x7F7F, 4: 0x7E12}
_NAN_SCALE = 0x7FC0


class _Scratch(threading.local):
    """Scratch tensors that all calls of a thread reuse.

    Page faults of new memory would cost more than the arithmetic.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_scratch = _Scratch()


def scratch(name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return this thread's scratch buffer of that name and dtype as a tensor [rows, columns].

    Another call with the same name and dtype returns the same memory, so the earlier tensor is overwritten.
    """
    buffer = _scratch.buffers.get((name, dtype))
    if buffer is None:
        # Scratch is reused by later calls, and a tensor made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            buffer = _scratch.buffers[(name, dtype)] = torch.empty(TILE, dtype=dtype, device="cpu")
    return buffer[: rows * columns].view(rows, columns)


def require_cpu(tensor: Tensor) -> None:
    """Raise ValueError if a tensor is not on the CPU.

    The code of this package needs CPU tensors because scratch buffers are on the CPU. On a GPU, torch would also round
    differently: it divides by a number by multiplying with the inverse.

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
    """Views of the groups of one message.

    Attributes:
        codes: uint8 [groups, bytes of a group's codes].
        scales: int16 [slots], the bits of bfloat16 scales; in a tile [groups].
    """

    codes: Tensor
    scales: Tensor

    def rows(self, first: int, last: int) -> Part:
        return Part(self.codes[first:last], self.scales[first:last])


def parts(messages: Tensor, layout: MessageLayout, count: int) -> list[Part]:
    """Return views of the codes and scales of ``count`` messages that follow each other."""
    require_cpu(messages)
    found = []
    for index in range(count):
        message = messages[index * layout.nbytes : (index + 1) * layout.nbytes]
        if not layout.groups:
            # The strides of an empty slice may not allow the views below.
            message = messages.new_empty(0)
        codes = message[: layout.codes_nbytes].view(layout.groups, layout.group * layout.bits // 8)
        found.append(Part(codes, message[layout.scales_offset :].view(torch.int16)))
    return found


def tiles(layout: MessageLayout) -> Iterator[tuple[int, int]]:
    """Yield (first group, last group + 1) of each tile of a message."""
    # A tile has whole groups, because a scale is computed over its group.
    step = TILE // layout.group
    for first in range(0, layout.groups, step):
        yield first, min(first + step, layout.groups)


def _scale_bits(peak: Tensor, bits: int) -> Tensor:
    """Return the bfloat16 bits of ``peak / levels`` rounded up, int32 [rows]; levels is 127 or 7."""
    # The addition carries into the upper 16 bits unless the lower 16 bits are zero, which rounds up. The results for
    # NaN and Inf are meaningless; the caller overwrites them.
    rounded_up = torch.div(peak, _LEVELS[bits]).view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16)
    return rounded_up.clamp_(_SMALLEST_SCALE, _LARGEST_SCALE[bits])


def scale_values(scales: Tensor) -> Tensor:
    """Return float32 scales [rows, 1] of bfloat16 bits, int16 or int32 [rows]."""
    return (scales.to(torch.int32) << 16).view(torch.float32).unsqueeze(1)


def encode_(values: Tensor, part: Part, bits: int) -> Tensor | None:
    """Encode a tile: write its codes and scales.

    Returns:
        bool [rows], True for groups with Inf or NaN; None if there is no such group.
    """
    rows, group = values.shape
    work = scratch("encode", rows, group)
    # amax returns NaN if a value is NaN, and NaN < Inf is False.
    peak = torch.amax(torch.abs(values, out=work), 1)
    finite = peak < math.inf
    spoilt = None if finite.all() else ~finite
    scales = _scale_bits(peak, bits)
    if spoilt is not None:
        scales.masked_fill_(spoilt, _NAN_SCALE)
    part.scales.copy_(scales)
    # Multiply by the rounded inverse of the bfloat16 scale, then round to integers, ties to even. Kernels do the same
    # operations in the same order, so codes are equal.
    torch.mul(values, torch.div(_ONE, scale_values(scales)), out=work).round_()
    if spoilt is not None:
        # Zero codes, because the integer that NaN is cast to depends on the machine.
        work.masked_fill_(spoilt.unsqueeze(1), 0.0)
    if bits == 8:
        part.codes.view(torch.int8).copy_(work)
        return spoilt
    codes = scratch("codes", rows, group, torch.int8).copy_(work)
    half = group // 2
    packed = part.codes.view(torch.int8)
    # The left shift drops the high 4 bits of the upper code. The mask drops the sign extension of the lower code.
    torch.bitwise_left_shift(codes[:, half:], 4, out=packed)
    packed.bitwise_or_(codes[:, :half].bitwise_and_(15))
    return spoilt


def decode_(part: Part, out: Tensor, bits: int, *, add: bool = False) -> None:
    """Decode a tile to ``out``, float32 [rows, group], or add it with ``add=True``.

    Products of a code and a scale are exact in float32.
    """
    rows, group = out.shape
    scale = scale_values(part.scales)
    codes = part.codes.view(torch.int8)
    if bits == 4:
        half = group // 2
        packed, codes = codes, scratch("codes", rows, group, torch.int8)
        # Shifting the lower code left and then right extends its sign. The upper code keeps its sign in one right
        # shift.
        torch.bitwise_left_shift(packed, 4, out=codes[:, :half])
        torch.bitwise_right_shift(codes[:, :half], 4, out=codes[:, :half])
        torch.bitwise_right_shift(packed, 4, out=codes[:, half:])
    if add:
        # The result does not depend on whether addcmul_ is fused, because the product is exact.
        out.addcmul_(scratch("decode", rows, group).copy_(codes), scale)
    else:
        out.copy_(codes).mul_(scale)


def _halve(x: Tensor) -> Tensor:
    """Do one step of the Hadamard transform: return, for each 16 elements, 8 sums of neighbours, then 8 differences."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even + odd, even - odd), dim=-1)


def rotate_(values: Tensor) -> None:
    """Apply the Hadamard transform, times 2**-5, to each 32 elements of a tile, in place.

    In each 128 elements there are four transforms: the one for r = 0, 1, 2, 3 takes elements ``16 r`` to ``16 r + 15``
    and ``64 + 16 r`` to ``64 + 16 r + 15``. Source of the transform: SDP4Bit (arXiv:2410.15526). The orthonormal
    transform has the factor 2**-2.5, which is not exact in floating point. 2**-5 is exact and keeps sums finite; the
    scales become smaller by 2**-2.5, so codes are the same but for rounding.
    """
    # Shape [rows of 128 elements, halves, runs, 16].
    lower, upper = values.mul_(0.03125).view(-1, 2, 4, 16).unbind(1)
    pair = torch.stack((lower + upper, lower - upper), dim=1)
    # One step between the halves above and four steps within runs of 16 make the transform of 2**5 elements.
    for _ in range(4):
        pair = _halve(pair)
    values.copy_(pair.view(values.shape))


def unrotate_(values: Tensor) -> None:
    """Apply the inverse of :func:`rotate_` in place."""
    rotate_(values)
    values.mul_(32.0)


def saturate_(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp values to the finite range of ``dtype`` in place. NaN stays NaN."""
    # clamp_ leaves NaN as it is.
    limit = torch.finfo(dtype).max
    return values.clamp_(-limit, limit)
