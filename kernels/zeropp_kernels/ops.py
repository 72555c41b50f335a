"""The operations: flat buffers in, message bytes out, and back. All write to memory that the caller gives.

CUDA and ROCm tensors go to Triton kernels, CPU tensors to plain torch, with the same bits. All operations are
registered with ``torch.library`` as ``torch.ops.zeropp.*`` and work inside ``torch.compile(fullgraph=True)``.
None is differentiable.

Common arguments:

- ``count``: messages that follow each other in one buffer, in the order of their destinations (or sources).
- ``bits``: of a code; ``GROUPS`` in `zeropp_kernels.wire` has the widths, and how many elements share a scale.
- ``rotate``: encode in the rotated domain (Hadamard, groups of 32), or come back from it.
- ``state``, ``beta``, ``reset``: error feedback. ``state`` is uint8 [count * state_layout(numel, bits).nbytes], zeros
  at first. What encoding loses is averaged into it, ``e <- beta * e + (1 - beta) * lost``, and added to the next
  input. Groups that are not finite leave their state unchanged to the bit. With ``reset`` the old error counts as
  zero, whatever the state holds; the state of groups that are not finite becomes zeros then.
- ``scale``: a number that is finite in float32, or a float32 tensor of one element on the device of the others, which
  the kernel reads: the host waits for nothing, and ``torch.compile`` does not compile anew when it changes. The results
  are those of a number of that value, to the bit. It must be finite as well, which nobody checks: with Inf or NaN,
  float32 values become Inf or NaN, the flag is set, and which of both norms become is left open; what is written in 16
  bits or in codes saturates, and has no flag.

Outputs may not overlap inputs, but for ``out`` of :func:`lossless_decode_`, which may be its reference. Arguments that
do not fit raise ``TypeError`` or ``ValueError`` that names the argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import dispatch  # noqa: F401  registers torch.ops.zeropp
from .table import BlockTable

__all__ = [
    "delta_apply_",
    "delta_encode_",
    "dequantize_",
    "gather_",
    "lossless_count_",
    "lossless_decode_",
    "lossless_encode_",
    "quantize_",
    "quantize_tensors_",
    "reduce_",
    "reduce_quantize_",
    "scatter_",
    "sum_",
]


def _scales(scale: float | Tensor) -> tuple[float, Tensor | None]:
    """The number and the tensor that an operation is given; the tensor counts if there is one."""
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


def quantize_(
    x: Tensor,
    messages: Tensor,
    *,
    count: int = 1,
    bits: int = 8,
    rotate: bool = False,
    state: Tensor | None = None,
    beta: float = 0.8,
    reset: bool = False,
) -> None:
    """Encode a flat buffer as ``count`` messages.

    For each group: s = max|x| / 127 (or / 7) rounded up to bfloat16, at least 2**-126; code = x * (1 / s) rounded
    half to even. A group with Inf or NaN gets a NaN scale and zero codes.

    Args:
        x: [count * numel], float32, bfloat16 or float16, any alignment.
        messages: uint8 [count * message_layout(numel, bits).nbytes], written in full.

    Source: ZeRO++ (arXiv 2306.10209) for the blocks, LoCo (arXiv 2407.04480) for the feedback, SDP4Bit
    (arXiv 2410.15526) for the rotation.
    """
    torch.ops.zeropp.quantize_(x, messages, count, bits, rotate, state, beta, reset)


def quantize_tensors_(
    tensors: Sequence[Tensor],
    table: BlockTable,
    messages: Tensor,
    *,
    count: int = 1,
    bits: int = 8,
    rotate: bool = False,
    state: Tensor | None = None,
    beta: float = 0.8,
    reset: bool = False,
) -> None:
    """:func:`quantize_` of a flat buffer that does not exist: tensors are read where they lie.

    Args:
        tensors: without gaps in memory (any order of dimensions), one dtype of float32, bfloat16, float16, of the sizes
            in the table; read in the order of their memory.
        table: where they lie in the flat buffer; what lies between them counts as zeros.
        messages: uint8 [count * message_layout(table.numel // count, bits).nbytes], written in full; with more than
            one, each is a multiple of 256 elements.
    """
    torch.ops.zeropp.quantize_tensors_(
        list(tensors), table.host, table.entries, table.owners, table.numel, messages, count, bits, rotate, state,
        beta, reset,
    )  # fmt: skip


def reduce_quantize_(
    sources: Tensor,
    messages: Tensor,
    *,
    numel: int,
    count: int,
    source_bits: int = 8,
    scale: float | Tensor = 1.0,
    out_count: int = 1,
    bits: int = 4,
    rotate: bool = False,
    state: Tensor | None = None,
    beta: float = 0.8,
    reset: bool = False,
) -> None:
    """Decode ``count`` messages, sum them in float32 in their order, times ``scale``, and encode for the next hop.

    Messages in the rotated domain stay there with ``rotate=False``; ``rotate=True`` takes the sum into it.

    Args:
        sources: uint8 [count * message_layout(numel, source_bits).nbytes].
        messages: uint8 [out_count * message_layout(numel // out_count, bits).nbytes], written in full.
        numel: elements of each source; numel // out_count is a multiple of 256 if out_count is more than 1.

    Source: the two-hop all-to-all of ZeRO++ (arXiv 2306.10209, section 3.3).
    """
    number, device_scale = _scales(scale)
    torch.ops.zeropp.reduce_quantize_(
        sources, numel, count, source_bits, number, messages, out_count, bits, rotate, state, beta, reset, device_scale
    )


def dequantize_(messages: Tensor, out: Tensor, *, count: int = 1, bits: int = 8, rotate: bool = False) -> None:
    """Decode ``count`` messages into a flat buffer; values past the largest finite one of ``out`` become that one.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes].
        out: [count * numel], float32, bfloat16 or float16, any alignment.
    """
    torch.ops.zeropp.dequantize_(messages, out, count, bits, rotate)


def reduce_(
    messages: Tensor,
    out: Tensor,
    *,
    count: int,
    bits: int = 8,
    rotate: bool = False,
    scale: float | Tensor = 1.0,
    accumulate: bool = False,
    norms: Tensor | None = None,
    flag: Tensor | None = None,
) -> None:
    """``out = scale * sum of count messages``, or ``out +=``; summed in float32 in the order of the messages.

    ``scale`` multiplies the finished sum, once; then comes the inverse rotation, if any, and the rounding to ``out``.
    A sum that passes the largest float32 is Inf; if it is rotated back, its 32 elements are NaN in any dtype. In 16
    bits the largest finite value stands for all that pass it.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes].
        out: [numel], float32, bfloat16 or float16; float32 with ``accumulate``, ``norms`` or ``flag``.
        norms, flag: of ``out`` as it is afterwards, as :func:`gather_` writes them.
    """
    number, device_scale = _scales(scale)
    torch.ops.zeropp.reduce_(messages, out, count, bits, rotate, number, accumulate, norms, flag, device_scale)


def sum_(
    messages: Tensor,
    out: Tensor,
    *,
    count: int,
    scale: float | Tensor = 1.0,
    accumulate: bool = False,
    norms: Tensor | None = None,
    flag: Tensor | None = None,
) -> None:
    """``out = scale * sum of count plain messages``, or ``out +=``; summed in float32 in the order of the messages.

    ``scale`` multiplies the finished sum, once, and the product is rounded before it is added to ``out``.

    Args:
        messages: [count * numel], float32, bfloat16 or float16.
        out: float32 [numel].
        norms, flag: of ``out`` as it is afterwards, as :func:`gather_` writes them.
    """
    number, device_scale = _scales(scale)
    torch.ops.zeropp.sum_(messages, out, count, number, accumulate, norms, flag, device_scale)


def delta_encode_(shard: Tensor, reference: Tensor, message: Tensor, *, update: bool = True) -> None:
    """Encode ``shard - reference`` as int4, and with ``update`` add the decoded difference to the reference.

    The owner's reference and that of every receiver that calls :func:`delta_apply_` end with the same bits; what the
    four bits lost is still in the shard and goes with the next difference.

    Args:
        shard: float32 [numel], the weights as they are.
        reference: bfloat16 or float16 [numel], what all ranks have of it.
        message: uint8 [message_layout(numel, 4).nbytes], written in full.

    Source: the weight differences of SDP4Bit (arXiv 2410.15526).
    """
    torch.ops.zeropp.delta_encode_(shard, reference, message, update)


def delta_apply_(messages: Tensor, reference: Tensor, *, count: int = 1) -> None:
    """Add ``count`` decoded messages to the reference, bfloat16 or float16 [count * numel]."""
    torch.ops.zeropp.delta_apply_(messages, reference, count)


def lossless_count_(values: Tensor, reference: Tensor, starts: Tensor) -> None:
    """Count what 4 bits cannot hold: the sizes of a message's two kinds of escapes.

    Differences are those of bfloat16 encodings under an order-preserving key (b, or b ^ 0x7fff for b < 0). Those of -7
    to 6 are 4-bit codes, others of -128 to 127 escape to 8 bits, and for the rest the value itself is sent.

    Args:
        values: bfloat16 [numel], or float32, which is rounded to bfloat16.
        reference: bfloat16 [numel].
        starts: int64 [2, sections + 1] for sections of 2048, written in full: where the escapes of each section begin,
            8-bit codes and 16-bit values; the totals come last.
    """
    torch.ops.zeropp.lossless_count_(values, reference, starts)


def lossless_encode_(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, *, room8: int, room16: int
) -> None:
    """Encode bfloat16 values exactly, as differences against the reference: about 4.6 bits each between two steps.

    Args:
        values, reference, starts: as :func:`lossless_count_` had and wrote them.
        message: uint8 [lossless_layout(numel, room8, room16).nbytes], written in full.
        room8, room16: escapes that find room, at most ``MOST_ESCAPES``. More than that are left out: compare the
            totals before you send.
    """
    torch.ops.zeropp.lossless_encode_(values, reference, starts, message, room8, room16)


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, *, count: int = 1, room8: int, room16: int
) -> None:
    """Decode ``count`` messages; bit-identical to the encoded values for every pattern of 16 bits.

    Whatever bytes a message has, nothing outside it is read; escapes that lie past the rooms count as zeros.

    Args:
        messages: uint8 [count * lossless_layout(numel, room8, room16).nbytes].
        reference: bfloat16 [count * numel], the same bits as the sender's.
        out: bfloat16 [count * numel]; may be the reference itself.
    """
    torch.ops.zeropp.lossless_decode_(messages, reference, out, count, room8, room16)


def gather_(
    tensors: Sequence[Tensor],
    table: BlockTable,
    flat: Tensor,
    *,
    scale: float | Tensor = 1.0,
    norms: Tensor | None = None,
    flag: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Copy many tensors into one flat buffer, in one launch: ``flat = scale * tensor``, zeros between tensors.

    Args:
        tensors: without gaps in memory (any order of dimensions), one dtype of float32, bfloat16, float16, of the sizes
            in the table; read in the order of their memory.
        table: where each lies in ``flat``.
        flat: [table.numel], float32, bfloat16 or float16; on a GPU it may be pinned host memory, which the caller keeps
            until the kernel has ended.
        norms: float32 [ceil(numel / 256)], gets the sum of squares of each block, of the float32 values before they
            are rounded to ``flat``.
        flag: int32 [1], becomes 1 if a value is Inf or NaN as it is written, and is left alone otherwise.
        accumulate: add to ``flat``, which is float32 then; where no tensor lies zeros are added.
    """
    number, device_scale = _scales(scale)
    torch.ops.zeropp.gather_(
        list(tensors), table.host, table.entries, table.owners, flat, number, norms, flag, accumulate, device_scale
    )


def scatter_(
    flat: Tensor,
    tensors: Sequence[Tensor],
    table: BlockTable,
    *,
    scale: float | Tensor = 1.0,
    norms: Tensor | None = None,
    flag: Tensor | None = None,
) -> None:
    """The mirror of :func:`gather_`: ``tensor = scale * flat``; norms and flag are those of all of ``flat``."""
    number, device_scale = _scales(scale)
    torch.ops.zeropp.scatter_(
        flat, list(tensors), table.host, table.entries, table.owners, number, norms, flag, device_scale
    )
