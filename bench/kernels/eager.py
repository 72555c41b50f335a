"""The operations of zeropp_kernels in plain torch: whole tensors, one torch function after another.

Each function computes the same formulas as its kernel, so times compare equal work. ``test_kernels.py`` compares the
bits before it measures. Lengths are multiples of 256, and all values are finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "decode", "delta_apply_", "delta_encode", "encode", "feedback_", "gather_", "plain_sum", "reduce", "rotate",
    "scatter_",
]  # fmt: skip

GROUP = {8: 256, 4: 128}


def encode(x: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
    """Return codes (uint8 [groups, bytes]) and scales (bfloat16 [groups]) of a flat buffer."""
    wide = x.view(-1, group or GROUP[bits]).float()
    levels = torch.tensor(127.0 if bits == 8 else 7.0, device=x.device)
    rounded_up = ((wide.abs().amax(1) / levels).view(torch.int32) + 0xFFFF) >> 16
    scales = rounded_up.clamp_min(0x0080).to(torch.int16).view(torch.bfloat16)
    codes = (wide * (1.0 / scales.float())[:, None]).round().to(torch.int8)
    if bits == 4:
        lower, upper = codes.chunk(2, dim=1)
        codes = (lower & 15) | (upper << 4)
    return codes.view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the decoded values, flat and float32."""
    signed = codes.view(torch.int8)
    if bits == 4:
        signed = torch.cat([(signed << 4) >> 4, signed >> 4], dim=1)
    return (signed.float() * scales.float()[:, None]).view(-1)


def rotate(x: Tensor) -> Tensor:
    """Return a Hadamard transform over 32 elements, times 2**-5, of each 128-element group.

    A transform combines 16 consecutive elements of a group's lower half with the 16 elements 64 positions later.
    """
    lower, upper = (x.float() * 0.03125).view(-1, 2, 4, 16).unbind(1)
    pair = torch.stack((lower + upper, lower - upper), dim=1)
    for _ in range(4):
        even, odd = pair[..., 0::2], pair[..., 1::2]
        pair = torch.cat((even + odd, even - odd), dim=-1)
    return pair.reshape(-1)


def feedback_(x: Tensor, error: tuple[Tensor, Tensor], bits: int, beta: float) -> tuple[Tensor, Tensor]:
    """Add the error to ``x``, encode the sum, and update the error, which is stored in 8 bits (codes, scales)."""
    old = decode(*error, 8)
    wanted = x.float() + old
    codes, scales = encode(wanted, bits)
    lost = wanted - decode(codes, scales, bits)
    kept = encode(old * beta + lost * (1.0 - beta), 8, GROUP[bits])
    for target, source in zip(error, kept, strict=True):
        target.copy_(source)
    return codes, scales


def reduce(messages: list[tuple[Tensor, Tensor]], bits: int, scale: float) -> Tensor:
    """Return the flat float32 sum of several messages, times ``scale``."""
    total = decode(*messages[0], bits)
    for message in messages[1:]:
        total = total + decode(*message, bits)
    return total * scale


def plain_sum(messages: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float32 sum of messages times ``scale``, its squared norm per 256 elements, and True if all finite."""
    total = messages[0].float()
    for message in messages[1:]:
        total += message
    total *= scale
    return total, total.view(-1, 256).square().sum(1), total.isfinite().all()


def delta_encode(shard: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and the updated reference for the difference of a shard to the reference ``held``."""
    codes, scales = encode(shard - held.float(), 4)
    return codes, scales, (held.float() + decode(codes, scales, 4)).to(held.dtype)


def delta_apply_(codes: Tensor, scales: Tensor, held: Tensor) -> None:
    held.copy_(held.float() + decode(codes, scales, 4))


def gather_(tensors: list[Tensor], places: list[Tensor], flat: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Copy tensors into a flat buffer and scale it; return its squared norm per 256 elements, and True if finite."""
    torch._foreach_copy_(places, tensors)
    flat.mul_(scale)
    return flat.view(-1, 256).square().sum(1), flat.isfinite().all()


def scatter_(flat: Tensor, tensors: list[Tensor], places: list[Tensor]) -> None:
    torch._foreach_copy_(tensors, places)
