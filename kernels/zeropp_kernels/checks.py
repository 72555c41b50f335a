"""What every operation asks of its arguments, said in errors that name the argument.

Shapes, dtypes and devices are checked under ``torch.compile`` and fake tensors too; the rest when data is there.
Every call comes through here, so what a message says is put together when it is raised, and many tensors are asked at
once before one of them is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .wire import (
    BLOCK,
    GROUPS,
    MessageLayout,
    blocks_of,
    lossless_layout,
    message_layout,
    sections_of,
    state_layout,
)

__all__ = [
    "FLOATS",
    "Memory",
    "check_bits",
    "check_blocks",
    "check_count",
    "check_encoding",
    "check_feedback",
    "check_flat",
    "check_lossless",
    "check_messages",
    "check_scale",
    "check_starts",
    "check_stats",
    "check_table",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Messages are the second axis of a launch grid, and CUDA has no more there.
_MOST_MESSAGES = 65535
_LARGEST = torch.finfo(torch.float32).max
# Bytes, of messages and states: codes are stored 128 bits at a time.
_ALIGNMENT = 16
# For map(), which asks a hundred tensors without a line of Python for each.
_dtype = attrgetter("dtype")
_device = attrgetter("device")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_flat(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = FLOATS, numel: int | None = None) -> None:
    """One dimension, contiguous, one of ``dtypes``, and ``numel`` elements where that is given."""
    # Before strides are asked for, which sparse tensors do not have.
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        given = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is {given}; expected a dense tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {_names([tensor.dtype])}; expected {_names(dtypes)}")
    # Kernels and scratch alike go by element numbers, without strides.
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected one contiguous dimension: "
            f"pass {name}.view(-1) of a contiguous tensor"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements; expected {numel}")


def check_count(name: str, count: int, numel: int, of: str) -> int:
    """``count`` is 1 or more and divides ``numel``; returns the quotient."""
    if not 1 <= count <= _MOST_MESSAGES:
        raise ValueError(f"{name} is {count}; expected 1 to {_MOST_MESSAGES} messages")
    if numel % count:
        raise ValueError(f"{of} has {numel} elements, which {name}={count} does not divide; pad {of} or change {name}")
    return numel // count


def check_scale(scale: float, device_scale: Tensor | None = None) -> None:
    """A factor that is finite in float32: any other would make values of the zeros between tensors and past the end.

    Of one in a tensor only the form is checked; its value is on its way while the host goes on.
    """
    if device_scale is not None:
        if device_scale.dtype != torch.float32:
            raise TypeError(f"scale is {_names([device_scale.dtype])}; expected a number, or a tensor of float32")
        if device_scale.numel() != 1:
            raise ValueError(f"scale has {device_scale.numel()} elements; expected a number, or a tensor of one")
    # Put so that NaN is refused as well.
    if not abs(scale) <= _LARGEST:
        raise ValueError(f"scale is {scale}; expected a number that float32 can hold, at most {_LARGEST:.7g}")


def check_blocks(name: str, numel: int, count: int) -> None:
    """Each of several messages begins on a block."""
    # A group must not have elements of two messages; a single message may end anywhere.
    if count > 1 and numel % BLOCK:
        raise ValueError(f"{name} is {numel}; expected a multiple of {BLOCK} where there is more than one message")


def check_messages(name: str, tensor: Tensor, layout: MessageLayout, count: int) -> None:
    """Bytes for exactly ``count`` messages."""
    check_flat(name, tensor, (torch.uint8,))
    if tensor.numel() != layout.nbytes * count:
        raise ValueError(
            f"{name} has {tensor.numel()} bytes; expected {layout.nbytes * count}: {count} x {layout.nbytes} for "
            f"{layout.numel} elements of {layout.bits} bits (zeropp_kernels.message_layout tells)"
        )


def check_bits(name: str, bits: int) -> None:
    if bits not in GROUPS:
        raise ValueError(f"{name} is {bits}; expected {' or '.join(map(str, sorted(GROUPS)))}")


def check_feedback(state: Tensor | None, numel: int, count: int, bits: int, beta: float) -> None:
    """The bytes of a state, and a factor in [0, 1)."""
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta is {beta}; expected 0 <= beta < 1, the part of the old error that is kept")
    if state is None:
        return
    nbytes = state_layout(numel, bits).nbytes * count
    check_flat("state", state, (torch.uint8,))
    if state.numel() != nbytes:
        raise ValueError(
            f"state has {state.numel()} bytes; expected {nbytes}, zeros at first (zeropp_kernels.state_layout tells)"
        )


def check_encoding(numel: int, messages: Tensor, count: int, bits: int, state: Tensor | None, beta: float) -> None:
    """What all operations that write quantized messages ask of their outputs."""
    check_bits("bits", bits)
    check_messages("messages", messages, message_layout(numel, bits), count)
    check_feedback(state, numel, count, bits, beta)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps or overlaps, in whatever order: channels_last, or a transpose."""
    expected = 1
    # From the smallest stride up each must be the product of the sizes below it; a dimension of 1 may have any.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_table(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, numel: int, what: str
) -> None:
    """Dense tensors of one dtype, and a table of as many, for a flat buffer as long as ``what``."""
    _check_part("host", host, torch.int64, (3, len(tensors)), len(tensors), numel, what)
    _check_part("entries", entries, torch.int64, (3, len(tensors)), len(tensors), numel, what)
    _check_part("owners", owners, torch.int32, (blocks_of(numel),), len(tensors), numel, what)
    # It is read at every call, and a read from a device would wait for it.
    if not host.is_cpu:
        raise ValueError(f"table.host is on {host.device}; expected cpu: make the table with block_table")
    dtypes = set(map(_dtype, tensors))
    if not (len(dtypes) <= 1 and dtypes.issubset(FLOATS) and all(map(Tensor.is_contiguous, tensors))):
        _check_each(tensors)


def _check_part(
    name: str, part: Tensor, dtype: torch.dtype, shape: tuple[int, ...], size: int, numel: int, what: str
) -> None:
    if part.dtype != dtype or part.shape != shape or not part.is_contiguous():
        raise ValueError(
            f"table.{name} is {_names([part.dtype])} {list(part.shape)}; expected {_names([dtype])} {list(shape)} "
            f"for {size} tensors and the {numel} elements of {what}: make the table with block_table"
        )


def _check_each(tensors: Sequence[Tensor]) -> None:
    """One dtype, and no gaps."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"tensors[{index}] is {_names([tensor.dtype])}; expected {_names(FLOATS)}")
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"tensors[{index}] is {_names([tensor.dtype])} and tensors[0] {_names([tensors[0].dtype])}; "
                "expected one dtype"
            )
        # The first question is cheap, and nearly always enough.
        if not (tensor.is_contiguous() or is_dense(tensor)):
            raise ValueError(
                f"tensors[{index}] has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected a tensor "
                "without gaps or overlaps in memory"
            )


def check_stats(norms: Tensor | None, flag: Tensor | None, numel: int) -> None:
    """float32 for each block, and one int32."""
    if norms is not None:
        check_flat("norms", norms, (torch.float32,), blocks_of(numel))
    if flag is not None:
        check_flat("flag", flag, (torch.int32,), 1)


def check_starts(starts: Tensor, numel: int) -> None:
    """int64 [2, sections + 1]."""
    if starts.dtype != torch.int64:
        raise TypeError(f"starts is {_names([starts.dtype])}; expected int64")
    shape = (2, sections_of(numel) + 1)
    if tuple(starts.shape) != shape or not starts.is_contiguous():
        raise ValueError(f"starts has shape {tuple(starts.shape)}; expected {shape}, contiguous")


def check_lossless(messages: Tensor, name: str, numel: int, count: int, room8: int, room16: int) -> None:
    """Bytes for exactly ``count`` messages."""
    layout = lossless_layout(numel, room8, room16)
    check_flat(name, messages, (torch.uint8,))
    if messages.numel() != layout.nbytes * count:
        raise ValueError(
            f"{name} has {messages.numel()} bytes; expected {layout.nbytes * count}: {count} x {layout.nbytes} for "
            f"{numel} elements, room8={room8} and room16={room16} (zeropp_kernels.lossless_layout tells)"
        )


class Memory:
    """Where the arguments of a call must lie: all on one device.

    Attributes:
        tensors: by name; None for those that were not given.
        aligned: names of those that begin at a multiple of 16 bytes.
        pinned: name of one that may lie in pinned host memory instead.
        many: tensors of a table.
        host: what the table says of them; it stays on CPU.
        room: elements of the flat buffer that the table is for.
        scale: a factor on the device of the others.
    """

    __slots__ = ("aligned", "host", "many", "pinned", "room", "scale", "tensors")

    def __init__(
        self,
        tensors: Mapping[str, Tensor | None],
        aligned: Sequence[str] = (),
        pinned: str = "",
        many: Sequence[Tensor] = (),
        host: Tensor | None = None,
        room: int = 0,
        scale: Tensor | None = None,
    ) -> None:
        self.tensors = tensors
        self.aligned = aligned
        self.pinned = pinned
        self.many = many
        self.host = host
        self.room = room
        self.scale = scale

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that must lie on one device."""
        yield from ((name, tensor) for name, tensor in self.tensors.items() if tensor is not None)
        yield from ((f"tensors[{index}]", tensor) for index, tensor in enumerate(self.many))

    def check(self) -> torch.device:
        """Raise ValueError for a tensor that lies elsewhere; returns the device: the first that is not CPU."""
        devices = {tensor.device for tensor in self.tensors.values() if tensor is not None}
        devices.update(map(_device, self.many))
        device = devices.pop() if len(devices) == 1 else self._common_device()
        # Apart, so that a scale that lies elsewhere is what the error names, and not all others.
        if self.scale is not None and self.scale.device != device:
            raise ValueError(f"scale is on {self.scale.device}; expected {device} like the other arguments")
        return device

    def _common_device(self) -> torch.device:
        elsewhere = (tensor.device for _, tensor in self._named() if tensor.device.type != "cpu")
        device = next(elsewhere, torch.device("cpu"))
        for name, tensor in self._named():
            # Pinned host memory is written over the bus; whether it is pinned, only real memory can tell.
            if tensor.device != device and not (name == self.pinned and tensor.device.type == "cpu"):
                raise ValueError(f"{name} is on {tensor.device}; expected {device} like the other arguments")
        return device

    def check_data(self, device: torch.device) -> None:
        """Raise ValueError for what only real tensors tell: addresses, pageable memory, and what a table says."""
        for name in self.aligned:
            tensor = self.tensors[name]
            if tensor is not None and tensor.data_ptr() % _ALIGNMENT:
                raise ValueError(
                    f"{name} starts at an address that is {tensor.data_ptr() % _ALIGNMENT} more than a multiple of "
                    f"{_ALIGNMENT} bytes; allocate it on its own, or start it at a multiple of {_ALIGNMENT}"
                )
        if self.pinned:
            tensor = self.tensors[self.pinned]
            if tensor is not None and tensor.device != device and not tensor.is_pinned():
                raise ValueError(f"{self.pinned} is in pageable memory; expected pinned memory, or memory on {device}")
        if self.host is not None:
            self._check_sizes(self.host)

    def _check_sizes(self, host: Tensor) -> None:
        # Here, since a fake table has no values to read.
        _, numels, offsets = host.tolist()
        if list(map(Tensor.numel, self.many)) != numels:
            for index, (tensor, numel) in enumerate(zip(self.many, numels, strict=True)):
                if tensor.numel() != numel:
                    raise ValueError(f"tensors[{index}] has {tensor.numel()} elements; the table was made for {numel}")
        # Tables are made in ascending order, so the last tensor is the one that could pass the end.
        if numels and offsets[-1] + numels[-1] > self.room:
            raise ValueError(
                f"the last tensor would end at element {offsets[-1] + numels[-1]}; the flat buffer has {self.room}"
            )
