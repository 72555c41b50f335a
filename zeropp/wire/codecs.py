"""Codecs, which turn tensors into messages and back, and `Report`, the statistics of a summed gradient shard.

A message is one rank's bytes for one hop. A codec chooses the kernels that encode and decode messages, and the dtype of
the message tensor. A path encodes several messages in one call, so one tensor holds ``count`` messages of equal length,
one after the other. A `Report` stores one norm per block of 256 elements of a gradient shard, and a flag for Inf and
NaN. On a GPU, the kernel that computes the sum also computes the report, so the shard is not read a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

import zeropp_kernels as kernels
from zeropp.partition.levels import BufferLayout, Slot
from zeropp_kernels import BlockTable, block_table, gather_
from zeropp_kernels.reference import pack_, sum_messages_
from zeropp_kernels.wire import BLOCK

__all__ = [
    "BlockCodec",
    "Codec",
    "Feedback",
    "Messages",
    "PlainCodec",
    "Report",
    "dtype_name",
    "report_nbytes",
    "summed_by_kernels",
    "total_of",
]

Messages = Tensor | Sequence[Tensor]
"""Messages of equal length: a contiguous tensor with one message per row, or a sequence of tensors."""

# Number of elements that `Report.measure` copies to the device and measures at a time. It bounds the temporary memory.
_AT_ONCE = 2**16 * BLOCK


class Codec(Protocol):
    """The interface of a codec: an encoder of values into messages, and a decoder of messages into values.

    Attributes:
        name: name of the codec in the ledger of traffic, such as "bf16" or "int8".
        dtype: dtype of a tensor that holds messages.
        apart: True if the messages of one sum may be separate tensors. False if they must be adjacent in memory.
        coded: True if messages hold quantized codes. Then each message starts on a block of 256 elements, and ``pack_``
            needs a block table.
        rotate: True if elements are rotated (Hadamard) before they are quantized, which spreads an error over its group
            of 32 elements, padding included.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def apart(self) -> bool: ...

    @property
    def coded(self) -> bool: ...

    @property
    def rotate(self) -> bool: ...

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one message of [numel] elements."""
        ...

    def empty(self, numel: int, count: int, device: torch.device) -> Tensor:
        """Return an uninitialized tensor for ``count`` messages of ``numel`` elements each."""
        ...

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """Encode ``values`` as ``count`` messages.

        Args:
            messages: output, from :meth:`empty`.
            values: [count * numel], any floating dtype.
            count: number of messages.
            feedback: encoding errors of this hop, added to the values and updated; None without error feedback.
        """
        ...

    def pack_(
        self,
        messages: Tensor,
        gradients: Sequence[Tensor | None],
        layout: BufferLayout,
        table: BlockTable | None,
        *,
        count: int,
        feedback: Feedback | None,
    ) -> None:
        """Encode the gradients of one flat buffer as ``count`` messages.

        Args:
            messages: output, from :meth:`empty`.
            gradients: one tensor per parameter of the layout, in its order and shape; None stands for zeros.
            layout: offset of each parameter in the flat buffer. Padding is encoded as zeros.
            table: the layout's block table for the kernels; a plain codec does not use it.
            count: number of messages.
            feedback: encoding errors of this hop; None without error feedback.
        """
        ...

    def decode_(self, messages: Tensor, out: Tensor, *, count: int) -> None:
        """Decode ``count`` messages into ``out``: [count * numel], any floating dtype."""
        ...

    def decode_sum_(
        self,
        messages: Messages,
        out: Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        report: Report | None = None,
    ) -> None:
        """Decode messages and sum them: ``out = scale * sum(messages)``, or ``out +=`` with ``accumulate``.

        Args:
            messages: messages of equal length: one from each rank of the hop, or a single one that is already the sum.
            out: [numel], any floating dtype.
            scale: factor on the sum.
            accumulate: True to add to ``out``, False to overwrite it.
            report: statistics to update so that they describe the new ``out``; None to compute none.
        """
        ...

    def encode_sum_(
        self,
        source: Codec,
        parts: Messages,
        numel: int,
        messages: Tensor,
        *,
        count: int,
        feedback: Feedback | None,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Decode and sum the messages of one hop, and encode ``scale * sum`` as ``count`` messages for the next hop.

        Args:
            source: codec that ``parts`` are encoded with.
            parts: messages of [numel] elements: one from each rank of the hop, or a single one that is already the sum.
            numel: elements of the sum.
            messages: output, from :meth:`empty`.
            count: number of messages to write.
            feedback: encoding errors of the next hop; None without error feedback.
            scale: factor on the sum.
            dtype: dtype of the sum, at least float32, if the sum is stored before it is encoded.
        """
        ...

    def headroom(self, count: int) -> float:
        """Return the power of two that scales a sum of ``count`` messages so that the sum fits a message."""
        ...

    def feedback(self, numel: int, count: int, beta: float, device: torch.device) -> Feedback | None:
        """Return zeroed error-feedback state for ``count`` messages of [numel]; None if the codec has none."""
        ...

    def feedback_nbytes(self, numel: int) -> int:
        """Return the bytes of the error-feedback state of one message of [numel]; 0 if the codec has none."""
        ...


@dataclass(frozen=True)
class PlainCodec:
    """The codec of plain values: values cast to the wire dtype, of 64, 32 or 16 bits.

    Attributes:
        dtype: the wire dtype.
    """

    dtype: torch.dtype
    apart = True
    coded = False
    rotate = False

    @property
    def name(self) -> str:
        """Return the name of the wire dtype in the ledger, such as "bf16"."""
        return dtype_name(self.dtype)

    def headroom(self, count: int) -> float:
        """Return the factor that keeps a sum of ``count`` messages in range: a power of two for float16, else 1.0."""
        # The sum is at most ``count`` times the largest message. bfloat16 has the exponent range of float32 and needs
        # no scaling. A power of two loses no bits, except of values that fall below the smallest normal float16.
        return 2.0 ** -(count - 1).bit_length() if self.dtype == torch.float16 else 1.0

    def nbytes(self, numel: int) -> int:
        """Return the bytes of [numel] elements in the wire dtype."""
        return numel * self.dtype.itemsize

    def empty(self, numel: int, count: int, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of ``count * numel`` elements in the wire dtype."""
        return torch.empty(count * numel, dtype=self.dtype, device=device)

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """Cast ``values`` to the wire dtype. A cast has no error feedback, so ``feedback`` is not used."""
        messages.copy_(values)

    def pack_(
        self,
        messages: Tensor,
        gradients: Sequence[Tensor | None],
        layout: BufferLayout,
        table: BlockTable | None,
        *,
        count: int,
        feedback: Feedback | None,
    ) -> None:
        """Copy gradients to their offsets in ``messages``, cast to the wire dtype.

        Padding and missing gradients become zeros.
        """
        self.pack_parts_(layout.views(messages), layout.gap_views(messages), gradients)

    def pack_parts_(self, parts: Sequence[Tensor], gaps: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients as :meth:`pack_` does, with views of the messages that the caller has made.

        Args:
            parts: one view for each parameter.
            gaps: one view for each gap between parameters.
            gradients: one tensor for each parameter; None stands for zeros.
        """
        pack_(parts, gradients)
        # ``empty`` returns uninitialized memory, which may hold NaN. Padding is summed and counts in norms, so it must
        # be zero.
        if gaps:
            torch._foreach_zero_(gaps)

    def decode_(self, messages: Tensor, out: Tensor, *, count: int) -> None:
        """Copy plain messages into ``out``, cast to its dtype."""
        out.copy_(messages)

    def decode_sum_(
        self,
        messages: Messages,
        out: Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        report: Report | None = None,
    ) -> None:
        """Write ``scale * sum(messages)`` to ``out``, or add it with ``accumulate``; then fill the report."""
        if summed_by_kernels(out) and self.dtype != torch.float64 and _follow_each_other(messages):
            outputs = report.outputs() if report is not None else {}
            kernels.sum_(adjacent(messages), out, count=len(messages), scale=scale, accumulate=accumulate, **outputs)
            return
        sum_messages_(messages, out, scale=scale, accumulate=accumulate)
        if report is not None:
            report.measure(out)

    def gather_(
        self,
        gradients: Sequence[Tensor | None],
        layout: BufferLayout,
        table: BlockTable,
        out: Tensor,
        *,
        scale: float,
        accumulate: bool,
        report: Report,
    ) -> None:
        """Write ``scale`` times the gradients to ``out``, or add them, without a message: for a single rank.

        Args:
            gradients: one tensor per parameter of the layout; None stands for zeros.
            layout: offset of each parameter in the flat buffer.
            table: the layout's block table.
            out: float32 [numel].
            scale: factor on the gradients.
            accumulate: True to add to ``out``, False to overwrite it.
            report: statistics of the new ``out``, computed by the same kernel.
        """
        kernels.gather_(
            _in_order(gradients, layout, out.device),
            table,
            out,
            scale=scale,
            accumulate=accumulate,
            **report.outputs(),
        )

    def encode_sum_(
        self,
        source: Codec,
        parts: Messages,
        numel: int,
        messages: Tensor,
        *,
        count: int,
        feedback: Feedback | None,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Sum messages of any codec in at least float32, times ``scale``, and cast the sum to the wire dtype."""
        self.encode_(messages, _sum(source, parts, numel, scale, dtype), count=count, feedback=feedback)

    def feedback(self, numel: int, count: int, beta: float, device: torch.device) -> Feedback | None:
        """Return None: plain values have no error feedback."""
        return None

    def feedback_nbytes(self, numel: int) -> int:
        """Return 0: plain values have no error feedback."""
        return 0


@dataclass(frozen=True)
class BlockCodec:
    """The codec of quantized values: int8 codes with a scale per 256 elements, or int4 codes with a scale per 128.

    Attributes:
        bits: width of a code, 8 or 4.
        rotate: True to apply a Hadamard rotation to each 32 elements before quantizing, which spreads outliers. Sums
            stay rotated from hop to hop until they are decoded.
    """

    bits: int
    rotate: bool = False
    dtype = torch.uint8
    # The kernels compute the address of message i as ``first + i * nbytes``, so messages must be adjacent.
    apart = False
    coded = True

    @property
    def name(self) -> str:
        """Return the name in the ledger, such as "int8" or "hadamard(int4)"."""
        return f"hadamard(int{self.bits})" if self.rotate else f"int{self.bits}"

    def headroom(self, count: int) -> float:
        """Return 1.0: a block's scale has the exponent range of float32, so sums do not overflow."""
        return 1.0

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one message of [numel] elements: codes, scales and alignment."""
        return kernels.message_layout(numel, self.bits).nbytes

    def empty(self, numel: int, count: int, device: torch.device) -> Tensor:
        """Return an uninitialized uint8 tensor for ``count`` messages of ``numel`` elements each."""
        return torch.empty(count * self.nbytes(numel), dtype=torch.uint8, device=device)

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """Quantize ``values`` as ``count`` messages.

        With ``feedback``, the old errors are added to the values first, and the new errors are stored.
        """
        state = feedback.arguments() if feedback is not None else {}
        # Each call updates the errors in ``state``, so a message must be encoded exactly once.
        kernels.quantize_(_single(values), messages, count=count, bits=self.bits, rotate=self.rotate, **state)  # type: ignore[arg-type]

    def pack_(
        self,
        messages: Tensor,
        gradients: Sequence[Tensor | None],
        layout: BufferLayout,
        table: BlockTable | None,
        *,
        count: int,
        feedback: Feedback | None,
    ) -> None:
        """Quantize gradients straight from the tensors of autograd, without a flat copy. Padding becomes zeros.

        A gradient is copied only if its dtype or its strides differ from the expected ones.
        """
        assert table is not None  # a buffer with this codec is made with a table
        state = feedback.arguments() if feedback is not None else {}
        # A flat copy of all gradients would take as much memory as the unit itself, so the kernel reads autograd's
        # tensors.
        kernels.quantize_tensors_(
            _in_order(gradients, layout, messages.device),
            table,
            messages,
            count=count,
            bits=self.bits,
            rotate=self.rotate,
            **state,  # type: ignore[arg-type]
        )

    def decode_(self, messages: Tensor, out: Tensor, *, count: int) -> None:
        """Dequantize ``count`` messages into ``out``."""
        # The kernel does not write float64: for a float64 ``out``, ``target`` is a float32 copy. Otherwise it is
        # ``out`` itself.
        target = _single(out)
        kernels.dequantize_(messages, target, count=count, bits=self.bits, rotate=self.rotate)
        if target is not out:
            out.copy_(target)

    def decode_sum_(
        self,
        messages: Messages,
        out: Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        report: Report | None = None,
    ) -> None:
        """Dequantize and sum messages in float32, write or add ``scale * sum`` to ``out``, and fill the report."""
        # The kernel sums into float32 only. For another dtype of ``out``, a temporary float32 tensor takes the sum.
        single = out.dtype == torch.float32
        target = out if single else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        measures = report is not None and summed_by_kernels(out)
        kernels.reduce_(
            adjacent(messages),
            target,
            count=len(messages),
            bits=self.bits,
            rotate=self.rotate,
            scale=scale,
            # If ``target`` is a temporary tensor, the addition to ``out`` happens after the kernel.
            accumulate=accumulate and single,
            **(report.outputs() if report is not None and measures else {}),
        )
        if not single:
            out.add_(target.to(out.dtype)) if accumulate else out.copy_(target)
        if report is not None and not measures:
            report.measure(out)

    def encode_sum_(
        self,
        source: Codec,
        parts: Messages,
        numel: int,
        messages: Tensor,
        *,
        count: int,
        feedback: Feedback | None,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Dequantize, sum and quantize again in one kernel, so that the float32 sum is never written to memory.

        If ``source`` is a plain codec, the sum is stored in at least float32 first and then quantized.
        """
        if not isinstance(source, BlockCodec):
            self.encode_(messages, _sum(source, parts, numel, scale, dtype), count=count, feedback=feedback)
            return
        assert scale == 1.0  # ``headroom`` of a quantized source is 1.0
        state = feedback.arguments() if feedback is not None else {}
        kernels.reduce_quantize_(
            adjacent(parts),
            messages,
            numel=numel,
            count=len(parts),
            source_bits=source.bits,
            out_count=count,
            # The rotation is linear, so rotated messages are summed and sent on without rotating back. Only the last
            # hop's decoding rotates the sum back.
            bits=self.bits,
            rotate=self.rotate and not source.rotate,
            **state,  # type: ignore[arg-type]
        )

    def feedback(self, numel: int, count: int, beta: float, device: torch.device) -> Feedback | None:
        """Return zeroed error-feedback state for ``count`` messages of [numel]."""
        return Feedback(numel, count, self.bits, beta, device)

    def feedback_nbytes(self, numel: int) -> int:
        """Return the bytes of the error-feedback state of one message of [numel]."""
        return kernels.state_layout(numel, self.bits).nbytes


class Feedback:
    """Error-feedback state of one hop (LoCo, arXiv 2407.04480).

    The state is a moving average of the quantization errors. It is added to the next values before they are encoded.

    Attributes:
        state: uint8, the averaged error of each message in 8-bit codes and scales (`zeropp_kernels.state_layout`).
        scales: bfloat16 [count, groups], a view of the scales in ``state``.
        beta: factor on the old error in ``error = beta * error + (1 - beta) * loss``.
        fresh: True if the next encoding must treat the old error as zero.
    """

    def __init__(self, numel: int, count: int, bits: int, beta: float, device: torch.device) -> None:
        layout = kernels.state_layout(numel, bits)
        self.state = torch.zeros(count * layout.nbytes, dtype=torch.uint8, device=device)
        self.beta = beta
        self.fresh = False
        # [count, bytes per message]. ``scales`` is a view, so multiplying it in place multiplies the stored errors. A
        # change of the loss scale does that.
        rows = self.state.view(count, layout.nbytes)
        self.scales = rows[:, layout.scales_offset : layout.scales_offset + 2 * layout.groups].view(torch.bfloat16)

    def saved(self) -> Tensor:
        """Return a copy of the state for a checkpoint; zeros if the next encoding ignores the old error."""
        return torch.zeros_like(self.state) if self.fresh else self.state.clone()

    def arguments(self) -> dict[str, object]:
        """Return the error-feedback arguments for one encoding kernel call, and clear ``fresh``."""
        # With ``reset`` the kernel does not read the old error. Zeroing ``state`` instead would take an extra pass over
        # memory.
        fresh, self.fresh = self.fresh, False
        return {"state": self.state, "beta": self.beta, "reset": fresh}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a floating dtype, such as "bf16" or "fp32"."""
    return "bf16" if dtype == torch.bfloat16 else f"fp{8 * dtype.itemsize}"


def _sum(source: Codec, parts: Messages, numel: int, scale: float, dtype: torch.dtype) -> Tensor:
    # Sum in at least float32. Then a hop rounds to a 16-bit wire dtype once, when the sum is encoded, and not at each
    # addition.
    total = torch.empty(numel, dtype=torch.promote_types(dtype, torch.float32), device=parts[0].device)
    source.decode_sum_(parts, total, scale=scale)
    return total


def adjacent(messages: Messages) -> Tensor:
    """Return one flat tensor over messages that are adjacent in memory, without a copy."""
    if isinstance(messages, Tensor):
        return messages.view(-1)
    # Without an offset argument, as_strided uses the offset of ``first``.
    first = messages[0]
    total = sum(message.numel() for message in messages)
    return first.as_strided((total,), (1,))


def _follow_each_other(messages: Messages) -> bool:
    """Return True if messages are adjacent in memory.

    Over gloo they are not: the part of this rank itself stays in the message that it sends.
    """
    if isinstance(messages, Tensor):
        return True
    first = messages[0]
    return all(message.data_ptr() == first.data_ptr() + index * first.nbytes for index, message in enumerate(messages))


def _in_order(gradients: Sequence[Tensor | None], layout: BufferLayout, device: torch.device) -> list[Tensor]:
    """Return gradients as the kernels need them: one dtype, each with its parameter's strides, zeros for None."""
    dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
    # One kernel launch reads one dtype. Mixed dtypes are rare; float32 is the widest dtype that the kernels read.
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dtype = torch.float32 if dtype == torch.float64 else dtype
    found = []
    for gradient, slot in zip(gradients, layout.slots, strict=True):
        if gradient is None:
            gradient = torch.zeros(slot.numel, dtype=dtype, device=device)
        elif gradient.dtype != dtype or (gradient.stride() != slot.strides and not _lies_as(gradient, slot)):
            # The kernels read elements in memory order. If strides differed from the parameter's, elements would be
            # added to the wrong elements of other ranks' gradients.
            there = torch.empty_strided(slot.shape, slot.strides, dtype=dtype, device=device)
            gradient = there.copy_(gradient)
        found.append(gradient)
    return found


def _lies_as(tensor: Tensor, slot: Slot) -> bool:
    strides = zip(slot.shape, tensor.stride(), slot.strides, strict=True)
    # Ignore the strides of dimensions of size 1: torch allows any value there.
    return all(size == 1 or own == wanted for size, own, wanted in strides)


def _single(values: Tensor) -> Tensor:
    """Return float64 values cast to float32, since the kernels do not take float64; return other dtypes unchanged."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


# Statistics of a summed gradient.


class Report:
    """Statistics of one gradient shard: norms of its blocks, and a flag for Inf and NaN.

    The kernel that computes the last sum fills the report. Without such a kernel, `measure` fills it with torch
    operations.

    Attributes:
        norms: [numel / 256], one value per block, float32 (float64 for a float64 shard). A kernel writes sums of
            squares; `measure` writes their square roots.
        rooted: True if ``norms`` are square roots.
        flag: int32 [1], 1 if any value is Inf or NaN, else 0.
        has_flag: True if ``flag`` describes the shard. `measure` does not set the flag; `measure_flag` does.
    """

    def __init__(self, shard: Tensor, device: torch.device | None = None) -> None:
        # ``device`` is the device that computes the sum. An offloaded shard itself is in host memory.
        device = shard.device if device is None else device
        self.norms = torch.zeros(shard.numel() // BLOCK, dtype=_measured_in(shard.dtype), device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.rooted = False
        self.has_flag = True

    @property
    def nbytes(self) -> int:
        """Bytes of ``norms`` and ``flag``."""
        return self.norms.nbytes + self.flag.nbytes

    def outputs(self) -> dict[str, Tensor]:
        """Return the arguments that make one summing kernel write this report. Resets the report first."""
        self.reset()
        return {"norms": self.norms, "flag": self.flag}

    def reset(self) -> None:
        """Clear the flag before kernels write the report: a kernel sets it for Inf or NaN, but never clears it."""
        self.rooted = False
        self.has_flag = True
        self.flag.zero_()

    def measure(self, values: Tensor) -> None:
        """Measure a whole shard with torch operations. The flag is left to `measure_flag`.

        A shard in other memory than the report's device is copied to the device one part at a time.
        """
        if values.numel() <= _AT_ONCE:
            self._measure(values.to(self.norms.device), self.norms)
            return
        for start in range(0, values.numel(), _AT_ONCE):
            self.measure_part(values[start : start + _AT_ONCE].to(self.norms.device), start)

    def measure_part(self, values: Tensor, start: int) -> None:
        """Measure a part of a shard as :meth:`measure` does.

        Args:
            values: whole blocks of 256 elements, on the report's device.
            start: first element of the part in the shard.
        """
        self._measure(values, self.norms[start // BLOCK : (start + values.numel()) // BLOCK])

    def _measure(self, values: Tensor, norms: Tensor) -> None:
        # One norm per block here, and a float64 sum over all blocks in the step. This is faster than float64
        # throughout, within 1e-8 of it, and does not depend on how the shard is cut into parts.
        torch.linalg.vector_norm(values.view(-1, BLOCK), dim=1, dtype=norms.dtype, out=norms)
        self.rooted = True
        self.has_flag = False

    def measure_flag(self, values: Tensor) -> None:
        """Compute the flag with torch operations, unless it was computed; the host does not wait.

        Norms alone cannot tell, because they also overflow for large finite values. But finite norms prove that all
        values are finite, so this second pass over the shard is needed only where the sum of squares is not finite.

        Args:
            values: the whole shard, in any memory.
        """
        if not self.has_flag:
            # Inf and NaN always show in the minimum or the maximum.
            self.flag.copy_(torch.stack(torch.aminmax(values)).isfinite().all().logical_not())
            self.has_flag = True

    def add_part(self, values: Tensor, stored: Tensor, start: int) -> None:
        """Add a stored part of a gradient sum to the same part of another sum, and measure the result.

        The caller calls `reset` before the first part.

        Args:
            values: [numel] on the device, whole blocks; the result.
            stored: values to add, of the same size and dtype, in host memory. They must not change until the device
                has read them.
            start: first element of the part in the shard.
        """
        before = stored.to(values.device, non_blocking=True)
        if summed_by_kernels(values):
            norms = self.norms[start // BLOCK : (start + values.numel()) // BLOCK]
            gather_([before], _table(values), values, norms=norms, flag=self.flag, accumulate=True)
        else:
            values.add_(before)
            self.measure_part(values, start)


def total_of(reports: Sequence[Report], device: torch.device) -> Tensor:
    """Return float64 [2]: the sum of squares over gradient shards, and the number of shards flagged as non-finite."""
    # Concatenate first, so that the number of kernel launches does not depend on the number of units.
    found = torch.zeros(2, dtype=torch.float64, device=device)
    if blocks := [report.norms for report in reports if not report.rooted]:
        found[0] += torch.cat(blocks).sum(dtype=torch.float64)
    if roots := [report.norms for report in reports if report.rooted]:
        found[0] += torch.linalg.vector_norm(torch.cat(roots), dtype=torch.float64).square()
    if flags := [report.flag for report in reports if report.has_flag]:
        found[1] += torch.cat(flags).sum()
    return found


def report_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of the report on a shard of [numel] elements of ``dtype``."""
    return numel // BLOCK * _measured_in(dtype).itemsize + torch.int32.itemsize


def _measured_in(dtype: torch.dtype) -> torch.dtype:
    # 16-bit norms would have about three significant digits, and so would the clipping factor.
    return torch.promote_types(dtype, torch.float32)


def summed_by_kernels(out: Tensor) -> bool:
    """Return True if a kernel sums into ``out`` and measures it; on a CPU, torch's own operations are faster."""
    return out.is_cuda and out.dtype == torch.float32


@lru_cache(maxsize=32)
def _one_tensor(numel: int, device: torch.device, stream: int, thread: int) -> BlockTable:
    # There are few sizes: large shards are added in parts of one size, and the shards of equal blocks end alike.
    return block_table([numel], [0], numel, device=device)


def _table(values: Tensor) -> BlockTable:
    """Return the block table for one flat tensor. Each CUDA stream and each thread uses its own table."""
    # A call writes the tensor's address into the table and launches a kernel that reads the table. Comm streams of two
    # engines may do this at the same time, and torch may return the same CUDA stream for both. With a shared table, one
    # call would overwrite the address of the other.
    stream = torch.cuda.current_stream(values.device).cuda_stream if values.is_cuda else 0
    return _one_tensor(values.numel(), values.device, stream, threading.get_ident())
