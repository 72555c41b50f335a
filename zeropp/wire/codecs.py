"""Codecs: the contents of a hop's messages, and the report that a sum of gradients leaves.

The kernels do the work; a codec knows which ones, and in which dtype. A path goes through several messages at once, so
a codec's tensors hold ``count`` of them, one behind the other. A `Report` has the squares of a shard's blocks, and says
whether all of it is finite; the kernel that sums measures in the same pass.
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
]

Messages = Tensor | Sequence[Tensor]
"""Messages of one length: the rows of a contiguous tensor, or tensors."""

_AT_ONCE = 2**16 * BLOCK  # elements of a shard that are measured together where they are brought for that


class Codec(Protocol):
    """Encodes values as messages, and decodes messages to values.

    Attributes:
        name: in the ledger.
        dtype: of a message's memory.
        apart: messages that are summed may lie anywhere, and need not follow each other in memory.
        coded: messages hold codes, each message from a block of 256 elements on, and tensors are packed by a table of
            blocks.
        rotate: elements are rotated against each other, so that errors spread over a block, padding included.
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
        """Bytes of one message of [numel] elements."""
        ...

    def empty(self, numel: int, count: int, device: torch.device) -> Tensor:
        """Memory for ``count`` messages of ``numel`` elements each."""
        ...

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """Write values [count * numel], any floating dtype, as messages."""
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
        """Write tensors of the layout's shapes, None for zeros, as messages of the whole buffer."""
        ...

    def decode_(self, messages: Tensor, out: Tensor, *, count: int) -> None:
        """``out`` [count * numel], any floating dtype, becomes what the messages say."""
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
        """``out`` [numel], any floating dtype, becomes, or gains, ``scale`` times the messages' sum.

        The report, if there is one, then tells of ``out``.
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
        """Write ``scale`` times the sum of messages of [numel] from ``source``, in ``dtype``, as ``count`` messages."""
        ...

    def headroom(self, count: int) -> float:
        """Exact power of two to scale a sum of ``count`` messages by, so that it fits a message again."""
        ...

    def feedback(self, numel: int, count: int, beta: float, device: torch.device) -> Feedback | None:
        """Memory for errors of ``count`` messages of [numel]; None where none are fed back, as after a mere cast."""
        ...

    def feedback_nbytes(self, numel: int) -> int:
        """Bytes of the errors of one message of [numel]; 0 where they are not fed back."""
        ...


@dataclass(frozen=True)
class PlainCodec:
    """Values as they are, cast to the wire dtype: 64, 32 or 16 bits an element."""

    dtype: torch.dtype
    apart = True
    coded = False
    rotate = False

    @property
    def name(self) -> str:
        """See :class:`Codec`."""
        return dtype_name(self.dtype)

    def headroom(self, count: int) -> float:
        """See :class:`Codec`."""
        # ``count`` messages add up to at most ``count`` times the largest. bfloat16 needs no room: it has the range of
        # float32. A power of two costs no bits, except of what falls below float16's normal numbers.
        return 2.0 ** -(count - 1).bit_length() if self.dtype == torch.float16 else 1.0

    def nbytes(self, numel: int) -> int:
        """See :class:`Codec`."""
        return numel * self.dtype.itemsize

    def empty(self, numel: int, count: int, device: torch.device) -> Tensor:
        """See :class:`Codec`."""
        return torch.empty(count * numel, dtype=self.dtype, device=device)

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """See :class:`Codec`; there is nothing to feed back."""
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
        """See :class:`Codec`."""
        pack_(layout.views(messages), gradients)
        # Memory from ``empty`` may hold anything, NaN included, and padding is summed and enters norms like the rest.
        for start, stop in layout.gaps:
            messages[start:stop].zero_()

    def decode_(self, messages: Tensor, out: Tensor, *, count: int) -> None:
        """See :class:`Codec`."""
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
        """See :class:`Codec`."""
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
        """``out`` [numel], float32, becomes, or gains, ``scale`` times the tensors, where nothing is to be sent."""
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
        """See :class:`Codec`."""
        self.encode_(messages, _sum(source, parts, numel, scale, dtype), count=count, feedback=feedback)

    def feedback(self, numel: int, count: int, beta: float, device: torch.device) -> Feedback | None:
        """See :class:`Codec`."""
        return None

    def feedback_nbytes(self, numel: int) -> int:
        """See :class:`Codec`."""
        return 0


@dataclass(frozen=True)
class BlockCodec:
    """Codes of a few bits in groups that share a scale.

    Attributes:
        bits: of a code.
        rotate: encode 32 elements at a time rotated against each other, which spreads outliers; sums stay rotated until
            they are decoded.
    """

    bits: int
    rotate: bool = False
    dtype = torch.uint8
    # The kernels find messages by their distance from the first.
    apart = False
    coded = True

    @property
    def name(self) -> str:
        """See :class:`Codec`."""
        return f"hadamard(int{self.bits})" if self.rotate else f"int{self.bits}"

    def headroom(self, count: int) -> float:
        """See :class:`Codec`; a scale has the range of float32."""
        return 1.0

    def nbytes(self, numel: int) -> int:
        """See :class:`Codec`."""
        return kernels.message_layout(numel, self.bits).nbytes

    def empty(self, numel: int, count: int, device: torch.device) -> Tensor:
        """See :class:`Codec`."""
        return torch.empty(count * self.nbytes(numel), dtype=torch.uint8, device=device)

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """See :class:`Codec`."""
        state = feedback.arguments() if feedback is not None else {}
        # Each call advances the errors in ``state``, so a message must be encoded exactly once.
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
        """See :class:`Codec`; tensors are read where they lie, if they lie in the order of their parameters."""
        assert table is not None  # made by whoever has chosen this codec
        state = feedback.arguments() if feedback is not None else {}
        # Straight from autograd's tensors: a flat copy of all gradients would cost as much memory as the unit itself.
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
        """See :class:`Codec`."""
        # A copy in float32 where ``out`` has 64 bits, and otherwise ``out`` itself, which the kernel then writes to.
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
        """See :class:`Codec`."""
        # Codes are summed in float32 whatever ``out`` is: they carry 8 bits at most, and the kernels know no other.
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
            # With a float32 copy in between, the addition to ``out`` has to come after it.
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
        """See :class:`Codec`; codes become codes in one kernel, and their float32 sum never goes through memory."""
        if not isinstance(source, BlockCodec):
            self.encode_(messages, _sum(source, parts, numel, scale, dtype), count=count, feedback=feedback)
            return
        assert scale == 1.0  # what ``headroom`` says of codes
        state = feedback.arguments() if feedback is not None else {}
        kernels.reduce_quantize_(
            adjacent(parts),
            messages,
            numel=numel,
            count=len(parts),
            source_bits=source.bits,
            out_count=count,
            # The rotation is linear: what came rotated is summed and passed on so; only the last sum is turned back.
            bits=self.bits,
            rotate=self.rotate and not source.rotate,
            **state,  # type: ignore[arg-type]
        )

    def feedback(self, numel: int, count: int, beta: float, device: torch.device) -> Feedback | None:
        """See :class:`Codec`."""
        return Feedback(numel, count, self.bits, beta, device)

    def feedback_nbytes(self, numel: int) -> int:
        """See :class:`Codec`."""
        return kernels.state_layout(numel, self.bits).nbytes


class Feedback:
    """The loss of encoding for one hop, to be added to what is encoded next (LoCo, arXiv 2407.04480).

    Attributes:
        state: uint8, codes and scales of the error, a message's groups; see ``zeropp_kernels.state_layout``.
        scales: bfloat16 [count, groups], those in ``state``.
        beta: share of the old error that is kept.
        fresh: the old error is to count as nothing in the next use.
    """

    def __init__(self, numel: int, count: int, bits: int, beta: float, device: torch.device) -> None:
        layout = kernels.state_layout(numel, bits)
        self.state = torch.zeros(count * layout.nbytes, dtype=torch.uint8, device=device)
        self.beta = beta
        self.fresh = False
        # [count, bytes of a message]; a view, so that whoever scales losses can scale the errors in place.
        rows = self.state.view(count, layout.nbytes)
        self.scales = rows[:, layout.scales_offset : layout.scales_offset + 2 * layout.groups].view(torch.bfloat16)

    def saved(self) -> Tensor:
        """A copy of the state as the next use will see it."""
        return torch.zeros_like(self.state) if self.fresh else self.state.clone()

    def arguments(self) -> dict[str, object]:
        """Keyword arguments for one call of a kernel that encodes."""
        # The kernel resets by not reading the old error. Zeroing the state would cost a pass over memory for nothing.
        fresh, self.fresh = self.fresh, False
        return {"state": self.state, "beta": self.beta, "reset": fresh}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a floating dtype: "bf16", "fp32"."""
    return "bf16" if dtype == torch.bfloat16 else f"fp{8 * dtype.itemsize}"


def _sum(source: Codec, parts: Messages, numel: int, scale: float, dtype: torch.dtype) -> Tensor:
    # In at least float32, so that a hop rounds once, when its sum is encoded, and not at each addition.
    total = torch.empty(numel, dtype=torch.promote_types(dtype, torch.float32), device=parts[0].device)
    source.decode_sum_(parts, total, scale=scale)
    return total


def adjacent(messages: Messages) -> Tensor:
    """The memory of messages that follow each other in it."""
    if isinstance(messages, Tensor):
        return messages.view(-1)
    # as_strided keeps the first one's offset when given none.
    first = messages[0]
    total = sum(message.numel() for message in messages)
    return first.as_strided((total,), (1,))


def _follow_each_other(messages: Messages) -> bool:
    """Tell whether messages lie one behind the other; over gloo this rank's own stays where it was."""
    if isinstance(messages, Tensor):
        return True
    first = messages[0]
    return all(message.data_ptr() == first.data_ptr() + index * first.nbytes for index, message in enumerate(messages))


def _in_order(gradients: Sequence[Tensor | None], layout: BufferLayout, device: torch.device) -> list[Tensor]:
    """Tensors of one dtype that the kernels can read, each with its parameter's strides."""
    dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
    # One launch reads one dtype. Several are rare, and float32 is the widest that the kernels read.
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dtype = torch.float32 if dtype == torch.float64 else dtype
    found = []
    for gradient, slot in zip(gradients, layout.slots, strict=True):
        if gradient is None:
            gradient = torch.zeros(slot.numel, dtype=dtype, device=device)
        elif gradient.dtype != dtype or not _lies_as(gradient, slot):
            # The kernels read in the order of memory. With other strides than its parameter's, a gradient's elements
            # would be added to other elements of the other ranks' gradients.
            there = torch.empty_strided(slot.shape, slot.strides, dtype=dtype, device=device)
            gradient = there.copy_(gradient)
        found.append(gradient)
    return found


def _lies_as(tensor: Tensor, slot: Slot) -> bool:
    strides = zip(slot.shape, tensor.stride(), slot.strides, strict=True)
    # Strides of dimensions of size 1 say nothing, and torch leaves any number there.
    return all(size == 1 or own == wanted for size, own, wanted in strides)


def _single(values: Tensor) -> Tensor:
    """Values that the kernels can read or write: no more than 32 bits."""
    return values.to(torch.float32) if values.dtype == torch.float64 else values


# The report on a sum of gradients.


class Report:
    """Statistics of one gradient shard, left by the last sum into it, or taken in a pass of their own.

    Attributes:
        norms: [numel / 256] of the blocks, float32 or float64: sums of squares by a kernel, else their roots.
        flag: int32 [1], 1 if a value is Inf or NaN.
        squares: float64 scalar, their sum where no kernel has measured; else None.
    """

    def __init__(self, shard: Tensor, device: torch.device | None = None) -> None:
        # On the device that sums, which need not be where the shard is.
        device = shard.device if device is None else device
        self.norms = torch.zeros(shard.numel() // BLOCK, dtype=_measured_in(shard.dtype), device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.squares: Tensor | None = None
        self._rooted = False  # whether ``norms`` are roots

    @property
    def nbytes(self) -> int:
        """Bytes of its storages."""
        return self.norms.nbytes + self.flag.nbytes

    def outputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the one call of a kernel that sums and measures."""
        self.squares = None
        # Kernels only ever set it.
        self.flag.zero_()
        return {"norms": self.norms, "flag": self.flag}

    def measure(self, values: Tensor) -> None:
        """Read all of a shard, twice; one that is elsewhere comes by and by, and leaves again."""
        self.flag.zero_()
        for start in range(0, values.numel(), _AT_ONCE):
            self.measure_part(values[start : start + _AT_ONCE].to(self.norms.device), start)
        self.add_up()

    def measure_part(self, values: Tensor, start: int) -> None:
        """Read whole blocks of a shard from an element on; the first part comes after ``flag.zero_()``."""
        # In blocks: faster than float64 throughout, within 1e-8 of it, and the same however units are cut.
        norms = self.norms[start // BLOCK : (start + values.numel()) // BLOCK]
        torch.linalg.vector_norm(values.view(-1, BLOCK), dim=1, dtype=norms.dtype, out=norms)
        self._rooted = True
        # By the extremes, which show any Inf or NaN: the squares of large finite values overflow float32, too. The
        # answer stays on the device, so that the host need not wait for it.
        self.flag |= torch.stack(torch.aminmax(values)).isfinite().all().logical_not()

    def add_up(self) -> None:
        """All parts have been measured, in one way."""
        self.squares = self.norms.to(torch.float64).square().sum() if self._rooted else None
        self._rooted = False

    def send_part(self, values: Tensor, staged: Tensor, start: int, *, accumulate: bool) -> None:
        """Bring whole blocks of a shard, from an element on, to staging memory, and measure what is there then.

        Args:
            values: [numel] on the device; may be changed.
            staged: of their size and dtype, on the host, which may have to wait for what the device was given here.
            start: of the part; the first one comes after ``flag.zero_()``.
            accumulate: add to what is staged.
        """
        if _leaves_by_kernel(values, staged):
            norms = self.norms[start // BLOCK : (start + values.numel()) // BLOCK]
            gather_([values], _table(values), staged, norms=norms, flag=self.flag, accumulate=accumulate)
            return
        # Measured after the sum: the norm is that of what is stepped with.
        if accumulate:
            values.add_(staged.to(values.device))
        self.measure_part(values, start)
        staged.copy_(values)


def report_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the report on a shard of [numel]."""
    return numel // BLOCK * _measured_in(dtype).itemsize + torch.int32.itemsize


def _measured_in(dtype: torch.dtype) -> torch.dtype:
    # Norms of gradients in 16 bits would have three digits, and clipping by them no more.
    return torch.promote_types(dtype, torch.float32)


def summed_by_kernels(out: Tensor) -> bool:
    """Tell whether one kernel makes and measures sums into ``out``; a CPU is faster with torch's own operations."""
    return out.is_cuda and out.dtype == torch.float32


def _leaves_by_kernel(values: Tensor, staged: Tensor) -> bool:
    # A kernel writes to page-locked memory itself: it adds, measures and copies in one pass.
    return summed_by_kernels(values) and staged.is_pinned()


@lru_cache(maxsize=32)
def _one_tensor(numel: int, device: torch.device, stream: int, thread: int) -> BlockTable:
    # Few sizes: a ring's buffers, and what is left of shards.
    return block_table([numel], [0], numel, device=device)


def _table(values: Tensor) -> BlockTable:
    """The table for a tensor; each stream and thread has its own."""
    # A call writes the tensor's address to the table and then launches a kernel that reads it. Comm streams of two
    # engines may do so at once, and torch may give two comm streams one stream: with a common table, one would
    # overwrite the other's.
    stream = torch.cuda.current_stream(values.device).cuda_stream if values.is_cuda else 0
    return _one_tensor(values.numel(), values.device, stream, threading.get_ident())
