"""The operations of the package: encode flat buffers as messages, decode and sum messages, and copy tensors.

All operations write to memory that the caller allocates. CUDA and ROCm tensors are processed by Triton kernels, CPU
tensors by plain torch, with the same bits. All operations are registered with ``torch.library`` as
``torch.ops.zeropp.*`` and work inside ``torch.compile(fullgraph=True)``. None is differentiable.

Arguments that several operations have:

- ``count``: number of messages in one buffer. They have equal size and follow each other, in the order of their
  destinations (or sources).
- ``bits``: bits of a code. 8: int8 codes, one scale per 256 elements. 4: int4 codes, one scale per 128 elements.
- ``rotate``: when encoding, apply a Hadamard transform (the matrix of +-1, times 2**-5) to 32 elements at a time before
  the scales are computed. When decoding, apply its inverse. Within each 128 elements, elements ``16 r`` to ``16 r +
  15`` and ``64 + 16 r`` to ``64 + 16 r + 15`` are transformed together, for r = 0, 1, 2, 3.
- ``state``, ``beta``, ``reset``: error feedback. ``state`` is uint8 [count * state_layout(numel, bits).nbytes], zeros
  before the first call. It stores an error ``e`` per element. ``h = input + e`` is encoded in place of the input, then
  ``e <- beta * e + (1 - beta) * (h - decoded(h))``. A group of ``h`` with Inf or NaN leaves its part of the state
  unchanged to the bit. With ``reset=True``, ``e`` counts as zero whatever the state holds, and a group with Inf or NaN
  sets its part of the state to zeros.
- ``scale``: a number that float32 can hold, or a float32 tensor of one element on the device of the other arguments.
  Results are the same to the bit for a number and for a tensor of the same value. The kernel reads the tensor, so the
  host does not wait, and ``torch.compile`` does not recompile when its value changes. The tensor's value must be finite
  too, but is not checked. With Inf or NaN, outputs and ``norms`` become Inf or NaN (unspecified which), ``flag`` is
  set, and encoded groups get NaN scales; a 16-bit ``out`` of :func:`reduce_` has the largest finite value in place of
  Inf.

Outputs must not overlap inputs, except that ``out`` of :func:`lossless_decode_` may be its ``reference``. Invalid
arguments raise ``TypeError`` or ``ValueError`` with the argument's name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import operation
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

_run = {name: operation(name) for name in __all__}


def _scales(scale: float | Tensor) -> tuple[float, Tensor | None]:
    """Return ``scale`` as the two arguments of an operation: (number, tensor or None). The tensor is used if given."""
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
    """Encode a flat buffer as ``count`` quantized messages.

    For each group of elements: ``s = max|x| / 127`` for 8 bits, or ``max|x| / 7`` for 4 bits, rounded up to bfloat16
    and at least 2**-126. ``code = round(x * (1 / s))``, ties to even. For 4 bits, s is at most the largest bfloat16
    with finite ``7 * s`` in float32. A group with Inf or NaN gets a NaN scale and zero codes.

    Args:
        x: [count * numel], float32, bfloat16 or float16, any alignment. numel may be any number: the last group of each
            message is filled up with zeros.
        messages: uint8 [count * message_layout(numel, bits).nbytes], at a multiple of 16 bytes; all bytes are written.
        count: number of messages that ``x`` is divided into.
        bits: bits of a code, 8 or 4.
        rotate: True to apply the Hadamard transform before encoding.
        state: uint8 [count * state_layout(numel, bits).nbytes] for error feedback, updated in place; None for none.
        beta: weight of the old error in the new one, 0 <= beta < 1. LoCo's own beta is 1 minus this one.
        reset: True to start error feedback again from zero errors.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.

    Source: ZeRO++ (arXiv:2306.10209) for block quantization, LoCo (arXiv:2407.04480) for error feedback, SDP4Bit
    (arXiv:2410.15526) for the Hadamard transform.
    """
    _run["quantize_"](x, messages, count, bits, rotate, state, beta, reset)


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
    """Encode many tensors as quantized messages, as :func:`quantize_` encodes a flat buffer made of them.

    The flat buffer is not allocated: kernels read the tensors themselves. The messages are equal to those of
    ``gather_`` followed by ``quantize_``.

    Args:
        tensors: the tensors of the table, one dtype of float32, bfloat16 or float16, with the sizes that the table was
            made for. Dimensions may be in any order in memory, but without gaps; elements are read in memory order.
        table: places of the tensors in the flat buffer, from :func:`block_table`. Elements between tensors count as
            zeros.
        messages: uint8 [count * message_layout(table.numel // count, bits).nbytes], at a multiple of 16 bytes; all
            bytes are written.
        count: number of messages. If count > 1, ``table.numel // count`` must be a multiple of 256.
        bits, rotate, state, beta, reset: as in :func:`quantize_`.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.
    """
    _run["quantize_tensors_"](
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
    """Decode and sum messages in float32, multiply by ``scale``, and encode the result for the next hop.

    ``messages = quantize(scale * (m_1 + m_2 + ... + m_count))``, summed in the order of the messages. The sources are
    not rotated back: if they were encoded with ``rotate=True``, pass ``rotate=False`` and the new messages stay
    rotated. Pass ``rotate=True`` only to rotate the sum of unrotated sources.

    Args:
        sources: uint8 [count * message_layout(numel, source_bits).nbytes], at a multiple of 16 bytes.
        messages: uint8 [out_count * message_layout(numel // out_count, bits).nbytes], at a multiple of 16 bytes; all
            bytes are written.
        numel: elements of each source. If out_count > 1, ``numel // out_count`` must be a multiple of 256.
        count: number of sources.
        source_bits: bits of a code of the sources, 8 or 4.
        scale: factor of the sum, for example 1 / world size for a mean.
        out_count: number of messages that the sum is divided into.
        bits, rotate, state, beta, reset: for the new messages, as in :func:`quantize_`, with ``out_count`` in place of
            ``count`` and ``numel // out_count`` in place of ``numel``.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.

    Source: the two-hop all-to-all of ZeRO++ (arXiv:2306.10209, section 3.3).
    """
    number, device_scale = _scales(scale)
    _run["reduce_quantize_"](
        sources, numel, count, source_bits, number, messages, out_count, bits, rotate, state, beta, reset, device_scale
    )


def dequantize_(messages: Tensor, out: Tensor, *, count: int = 1, bits: int = 8, rotate: bool = False) -> None:
    """Decode ``count`` quantized messages into a flat buffer: ``value = code * scale of its group``.

    Values beyond the largest finite value of ``out``'s dtype become that value (with their sign). NaN stays NaN.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes], at a multiple of 16 bytes.
        out: [count * numel], float32, bfloat16 or float16, any alignment.
        count: number of messages.
        bits: bits of a code, 8 or 4.
        rotate: True if the messages were encoded with ``rotate=True``: apply the inverse transform.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.

    Source: ZeRO++ (arXiv:2306.10209).
    """
    _run["dequantize_"](messages, out, count, bits, rotate)


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
    """Decode and sum messages: ``out = scale * sum(messages)``, or ``out += scale * sum(messages)``.

    The sum is computed in float32 in the order of the messages, then multiplied by ``scale`` once, then rotated back if
    ``rotate``, then rounded to the dtype of ``out``. A float32 sum that overflows is Inf; if it is rotated back, the 32
    elements transformed with it are NaN, in every dtype of ``out``. In a 16-bit ``out``, values beyond the largest
    finite value become that value.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes], at a multiple of 16 bytes.
        out: [numel], float32, bfloat16 or float16. It must be float32 with ``accumulate``, ``norms`` or ``flag``.
        count: number of messages.
        bits: bits of a code, 8 or 4.
        rotate: True if the messages were encoded with ``rotate=True``: apply the inverse transform to the sum.
        scale: factor of the sum, for example 1 / world size for a mean.
        accumulate: True to add to ``out`` instead of overwriting it.
        norms: float32 [ceil(numel / 256)]; receives the sum of squares of each block of ``out`` after the call.
        flag: int32 [1]; set to 1 if ``out`` has an Inf or NaN after the call, unchanged otherwise.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.

    Source: ZeRO++ (arXiv:2306.10209, section 3.3).
    """
    number, device_scale = _scales(scale)
    _run["reduce_"](messages, out, count, bits, rotate, number, accumulate, norms, flag, device_scale)


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
    """Sum messages of plain, unquantized values: ``out = scale * sum(messages)``, or ``out += scale * sum(messages)``.

    The sum is computed in float32 in the order of the messages. It is multiplied by ``scale`` once, and the product is
    rounded before it is added to ``out``.

    Args:
        messages: [count * numel], float32, bfloat16 or float16.
        out: float32 [numel].
        count: number of messages.
        scale: factor of the sum, for example 1 / world size for a mean.
        accumulate: True to add to ``out`` instead of overwriting it.
        norms: float32 [ceil(numel / 256)]; receives the sum of squares of each block of ``out`` after the call.
        flag: int32 [1]; set to 1 if ``out`` has an Inf or NaN after the call, unchanged otherwise.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size or device.
    """
    number, device_scale = _scales(scale)
    _run["sum_"](messages, out, count, number, accumulate, norms, flag, device_scale)


def delta_encode_(shard: Tensor, reference: Tensor, message: Tensor, *, update: bool = True) -> None:
    """Encode the difference ``shard - reference`` as an int4 message.

    With ``update``, ``reference += decoded difference``. Receivers do the same with :func:`delta_apply_`, so the
    sender's reference and the receivers' references stay equal to the bit. The next difference includes the
    quantization error of this one, because it is computed against the updated reference.

    Args:
        shard: float32 [numel], the sender's current weights.
        reference: bfloat16 or float16 [numel], the copy of the weights that sender and receivers have.
        message: uint8 [message_layout(numel, 4).nbytes], at a multiple of 16 bytes; all bytes are written.
        update: True to add the decoded difference to ``reference``.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.

    Source: quantization of weight differences (qWD) in SDP4Bit (arXiv:2410.15526).
    """
    _run["delta_encode_"](shard, reference, message, update)


def delta_apply_(messages: Tensor, reference: Tensor, *, count: int = 1) -> None:
    """Decode messages of :func:`delta_encode_` and add them to the reference: ``reference += decoded``.

    Sums beyond the largest finite value of the reference's dtype become that value.

    Args:
        messages: uint8 [count * message_layout(numel, 4).nbytes], at a multiple of 16 bytes.
        reference: bfloat16 or float16 [count * numel], updated in place.
        count: number of messages; message i is added to elements ``i * numel`` to ``(i + 1) * numel - 1``.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.

    Source: quantization of weight differences (qWD) in SDP4Bit (arXiv:2410.15526).
    """
    _run["delta_apply_"](messages, reference, count)


def lossless_count_(values: Tensor, reference: Tensor, starts: Tensor) -> None:
    """Count the escapes of a lossless message, so that the caller can choose its size before encoding.

    A difference is ``key(value) - key(reference)`` modulo 2**16, in -32768 to 32767, where ``key(b)`` of bfloat16 bits
    b (as int16) is ``b`` if b >= 0, else ``b ^ 0x7fff``. Keys have the order of the values. A difference in -7 to 6 is
    a 4-bit code. Another one in -128 to 127 is an escape to an 8-bit code. Any other one is an escape to 16 bits, for
    which the value's bits are sent.

    Args:
        values: bfloat16 [numel], or float32 [numel], which is rounded to bfloat16.
        reference: bfloat16 [numel], the receiver's copy.
        starts: int64 [2, sections + 1] with ``sections = ceil(numel / 2048)``; all of it is written. ``starts[0, i]``
            is the number of escapes to 8 bits before section i, ``starts[1, i]`` the number of escapes to 16 bits. The
            last column has the totals.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size or device.
    """
    _run["lossless_count_"](values, reference, starts)


def lossless_encode_(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, *, room8: int, room16: int
) -> None:
    """Encode bfloat16 values exactly, as differences from the reference (formula in :func:`lossless_count_`).

    A message has about 4.6 bits per value if the reference is the weights of the optimizer step before.

    Args:
        values, reference: as passed to :func:`lossless_count_`.
        starts: int64 [2, sections + 1], as written by :func:`lossless_count_`.
        message: uint8 [lossless_layout(numel, room8, room16).nbytes], at a multiple of 16 bytes; all bytes are written.
        room8: places for escapes to 8 bits, at most ``MOST_ESCAPES``.
        room16: places for escapes to 16 bits, at most ``MOST_ESCAPES``. Escapes beyond a room are left out without an
            error: before sending, check that ``starts[0, -1] <= room8`` and ``starts[1, -1] <= room16``.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment. On CPU, ValueError also if
            ``starts`` was not computed from these values and reference.
    """
    _run["lossless_encode_"](values, reference, starts, message, room8, room16)


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, *, count: int = 1, room8: int, room16: int
) -> None:
    """Decode lossless messages: ``out`` gets exactly the bits of the encoded bfloat16 values, NaN payloads included.

    Malformed messages are safe: no byte outside a message is read, and an escape beyond its room leaves the
    reference's value.

    Args:
        messages: uint8 [count * lossless_layout(numel, room8, room16).nbytes], at a multiple of 16 bytes.
        reference: bfloat16 [count * numel], with the same bits as the sender's reference.
        out: bfloat16 [count * numel]; may be the reference itself.
        count: number of messages.
        room8, room16: as the messages were encoded.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or alignment.
    """
    _run["lossless_decode_"](messages, reference, out, count, room8, room16)


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
    """Copy many tensors into one flat buffer in one launch: ``flat = scale * tensor``, and zeros between the tensors.

    Args:
        tensors: the tensors of the table, one dtype of float32, bfloat16 or float16, with the sizes that the table was
            made for. Dimensions may be in any order in memory, but without gaps; elements are read in memory order.
        table: places of the tensors in ``flat``, from :func:`block_table`.
        flat: [table.numel], float32, bfloat16 or float16. For tensors on a GPU it may be pinned host memory, which the
            caller must keep until the kernel has finished.
        scale: factor of all values.
        norms: float32 [ceil(numel / 256)]; receives the sum of squares of each block, of the float32 values before they
            are rounded to the dtype of ``flat``.
        flag: int32 [1]; set to 1 if a value is Inf or NaN in the dtype of ``flat``, unchanged otherwise.
        accumulate: True to add to ``flat``, which must be float32 then. Zeros are added between the tensors; norms and
            flag are those of the sums.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or memory layout.
    """
    number, device_scale = _scales(scale)
    _run["gather_"](
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
    """Copy a flat buffer into many tensors in one launch: ``tensor = scale * flat``. The inverse of :func:`gather_`.

    Args:
        flat: [table.numel], float32, bfloat16 or float16. For tensors on a GPU it may be pinned host memory, which the
            caller must keep until the kernel has finished.
        tensors: the tensors of the table, as in :func:`gather_`; overwritten.
        table: places of the tensors in ``flat``, from :func:`block_table`.
        scale: factor of all values.
        norms: float32 [ceil(numel / 256)]; receives the sum of squares of each block of ``scale * flat``, in float32,
            parts between the tensors included.
        flag: int32 [1]; set to 1 if a value of ``scale * flat``, rounded to the tensors' dtype, is Inf or NaN,
            unchanged otherwise.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, size, device or memory layout.
    """
    number, device_scale = _scales(scale)
    _run["scatter_"](flat, list(tensors), table.host, table.entries, table.owners, number, norms, flag, device_scale)
