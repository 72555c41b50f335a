"""Argument checks of the operations. Errors name the argument.

Shapes, dtypes and devices are also checked under ``torch.compile`` and for fake tensors. Addresses and values are
checked only for real tensors. The checks run at every call, so they are written for speed: error messages are built
only when raised, and lists of tensors are first checked as a whole, then one by one only to find the wrong one.
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
    "ALIGNMENT",
    "FLOATS",
    "LARGEST",
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
    "fits",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Messages are the second axis of launch grids, where CUDA allows at most 65535 programs.
_MOST_MESSAGES = 65535
LARGEST = torch.finfo(torch.float32).max
# Bytes: messages and states must start at a multiple of this, because codes are stored 128 bits at a time.
ALIGNMENT = 16
# For map(), which reads an attribute of a hundred tensors without running Python code for each.
_dtype = attrgetter("dtype")
_device = attrgetter("device")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_flat(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = FLOATS, numel: int | None = None) -> None:
    """Raise unless a tensor is dense, one-dimensional and contiguous, of one of ``dtypes`` and with ``numel`` elements.

    The number of elements is not checked if ``numel`` is None.
    """
    # Checked before strides are read, because sparse tensors have none.
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        given = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is {given}; expected a dense tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {_names([tensor.dtype])}; expected {_names(dtypes)}")
    # Kernels and the plain torch code address elements by number, without strides.
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected one contiguous dimension: "
            f"pass {name}.view(-1) of a contiguous tensor"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements; expected {numel}")


def check_count(name: str, count: int, numel: int, of: str) -> int:
    """Return ``numel // count``. Raise ValueError unless count is in 1 to 65535 and divides ``numel``."""
    if not 1 <= count <= _MOST_MESSAGES:
        raise ValueError(f"{name} is {count}; expected 1 to {_MOST_MESSAGES} messages")
    if numel % count:
        raise ValueError(f"{of} has {numel} elements, which {name}={count} does not divide; pad {of} or change {name}")
    return numel // count


def check_scale(scale: float, device_scale: Tensor | None = None) -> None:
    """Raise ValueError unless ``scale`` is finite in float32: 0 * Inf would make NaN of the zeros between tensors.

    For a scale in a tensor, only dtype and size are checked. Reading its value would make the host wait for the device.
    """
    if device_scale is not None:
        if device_scale.dtype != torch.float32:
            raise TypeError(f"scale is {_names([device_scale.dtype])}; expected a number, or a tensor of float32")
        if device_scale.numel() != 1:
            raise ValueError(f"scale has {device_scale.numel()} elements; expected a number, or a tensor of one")
    # Written as "not <=" so that NaN fails, too.
    if not abs(scale) <= LARGEST:
        raise ValueError(f"scale is {scale}; expected a number that float32 can hold, at most {LARGEST:.7g}")


def check_blocks(name: str, numel: int, count: int) -> None:
    """Raise ValueError unless each of several messages starts on a block: numel is a multiple of 256, or count is 1."""
    # Otherwise a group would have elements of two messages. A single message may have any number of elements.
    if count > 1 and numel % BLOCK:
        raise ValueError(f"{name} is {numel}; expected a multiple of {BLOCK} where there is more than one message")


def check_messages(name: str, tensor: Tensor, layout: MessageLayout, count: int) -> None:
    """Raise unless ``tensor`` is uint8 and has the bytes of exactly ``count`` messages."""
    check_flat(name, tensor, (torch.uint8,))
    if tensor.numel() != layout.nbytes * count:
        raise ValueError(
            f"{name} has {tensor.numel()} bytes; expected {layout.nbytes * count}: {count} x {layout.nbytes} for "
            f"{layout.numel} elements of {layout.bits} bits (see zeropp_kernels.message_layout)"
        )


def check_bits(name: str, bits: int) -> None:
    if bits not in GROUPS:
        raise ValueError(f"{name} is {bits}; expected {' or '.join(map(str, sorted(GROUPS)))}")


def check_feedback(state: Tensor | None, numel: int, count: int, bits: int, beta: float) -> None:
    """Raise unless ``state`` has the bytes of ``count`` error-feedback states, and ``0 <= beta < 1``."""
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta is {beta}; expected 0 <= beta < 1, the part of the old error that is kept")
    if state is None:
        return
    nbytes = state_layout(numel, bits).nbytes * count
    check_flat("state", state, (torch.uint8,))
    if state.numel() != nbytes:
        raise ValueError(
            f"state has {state.numel()} bytes; expected {nbytes}, zeros at first (see zeropp_kernels.state_layout)"
        )


def check_encoding(numel: int, messages: Tensor, count: int, bits: int, state: Tensor | None, beta: float) -> None:
    """Check the outputs of operations that write quantized messages: bits, message bytes, and error feedback."""
    check_bits("bits", bits)
    check_messages("messages", messages, message_layout(numel, bits), count)
    check_feedback(state, numel, count, bits, beta)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor are in memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    # Sorted by stride, each stride must be the product of the sizes before it. A dimension of size 1 may have any
    # stride.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_table(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, numel: int, what: str
) -> None:
    """Raise unless all tensors are dense and of one dtype, and the table was made for as many tensors and ``numel``.

    ``what`` is the name of the flat buffer in error messages.
    """
    _check_part("host", host, torch.int64, (3, len(tensors)), len(tensors), numel, what)
    _check_part("entries", entries, torch.int64, (3, len(tensors)), len(tensors), numel, what)
    _check_part("owners", owners, torch.int32, (blocks_of(numel),), len(tensors), numel, what)
    # table.host must be on the CPU, because the host reads it at every call. A read from a device would wait for the
    # device.
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
    """Raise for the first tensor with an unsupported or a second dtype, or with gaps or overlaps in memory."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"tensors[{index}] is {_names([tensor.dtype])}; expected {_names(FLOATS)}")
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"tensors[{index}] is {_names([tensor.dtype])} and tensors[0] {_names([tensors[0].dtype])}; "
                "expected one dtype"
            )
        # is_contiguous() is cheap and nearly always true, so is_dense() rarely runs.
        if not (tensor.is_contiguous() or is_dense(tensor)):
            raise ValueError(
                f"tensors[{index}] has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected a tensor "
                "without gaps or overlaps in memory"
            )


def fits(tensors: Sequence[Tensor], numels: list[int], offsets: list[int], room: int) -> bool:
    """Return True if tensors have the sizes of a table, and the table's last tensor ends in ``room`` elements."""
    # Offsets ascend, so only the last tensor can end beyond the buffer.
    return list(map(Tensor.numel, tensors)) == numels and (not numels or offsets[-1] + numels[-1] <= room)


def check_stats(norms: Tensor | None, flag: Tensor | None, numel: int) -> None:
    """Raise unless ``norms`` is float32 [ceil(numel / 256)] or None, and ``flag`` is int32 [1] or None."""
    if norms is not None:
        check_flat("norms", norms, (torch.float32,), blocks_of(numel))
    if flag is not None:
        check_flat("flag", flag, (torch.int32,), 1)


def check_starts(starts: Tensor, numel: int) -> None:
    """Raise unless ``starts`` is a contiguous int64 tensor [2, ceil(numel / 2048) + 1]."""
    if starts.dtype != torch.int64:
        raise TypeError(f"starts is {_names([starts.dtype])}; expected int64")
    shape = (2, sections_of(numel) + 1)
    if tuple(starts.shape) != shape or not starts.is_contiguous():
        raise ValueError(f"starts has shape {tuple(starts.shape)}; expected {shape}, contiguous")


def check_lossless(messages: Tensor, name: str, numel: int, count: int, room8: int, room16: int) -> None:
    """Raise unless ``messages`` is uint8 and has the bytes of exactly ``count`` lossless messages."""
    layout = lossless_layout(numel, room8, room16)
    check_flat(name, messages, (torch.uint8,))
    if messages.numel() != layout.nbytes * count:
        raise ValueError(
            f"{name} has {messages.numel()} bytes; expected {layout.nbytes * count}: {count} x {layout.nbytes} for "
            f"{numel} elements, room8={room8} and room16={room16} (see zeropp_kernels.lossless_layout)"
        )


class Memory:
    """Requirements on the memory of a call's arguments: all on one device, some of them aligned.

    Attributes:
        tensors: tensor arguments by name; None for optional ones that were not given.
        aligned: names of arguments that must start at a multiple of 16 bytes.
        pinned: name of the argument that may be in pinned host memory instead; "" for none.
        many: tensors of a block table; empty if the operation has no table.
        host: the table's ``host`` tensor, int64 [3, n] on CPU; None if the operation has no table.
        room: elements of the flat buffer that the table addresses.
        scale: scale argument given as a tensor; None if it is a number.
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
        """Yield (name, tensor) of all tensors that must be on one device."""
        yield from ((name, tensor) for name, tensor in self.tensors.items() if tensor is not None)
        yield from ((f"tensors[{index}]", tensor) for index, tensor in enumerate(self.many))

    def check(self) -> torch.device:
        """Return the device of the arguments. Raise ValueError for a tensor on another device.

        The device is that of the first tensor that is not on the CPU, or the CPU if there is none.
        """
        devices = {tensor.device for tensor in self.tensors.values() if tensor is not None}
        devices.update(map(_device, self.many))
        device = devices.pop() if len(devices) == 1 else self._common_device()
        # Checked after the others, so that the error names the scale if only the scale is on another device.
        if self.scale is not None and self.scale.device != device:
            raise ValueError(f"scale is on {self.scale.device}; expected {device} like the other arguments")
        return device

    def _common_device(self) -> torch.device:
        elsewhere = (tensor.device for _, tensor in self._named() if tensor.device.type != "cpu")
        device = next(elsewhere, torch.device("cpu"))
        for name, tensor in self._named():
            # A tensor on the CPU is accepted here as pinned. check_data checks that it is, because fake tensors have no
            # memory.
            if tensor.device != device and not (name == self.pinned and tensor.device.type == "cpu"):
                raise ValueError(f"{name} is on {tensor.device}; expected {device} like the other arguments")
        return device

    def check_data(self, device: torch.device) -> None:
        """Raise ValueError for addresses that are not aligned, pageable memory, and tensors that do not fit the table.

        Only for real tensors; fake tensors have neither addresses nor values.
        """
        for name in self.aligned:
            tensor = self.tensors[name]
            if tensor is not None and tensor.data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"{name} starts at an address that is {tensor.data_ptr() % ALIGNMENT} more than a multiple of "
                    f"{ALIGNMENT} bytes; allocate it on its own, or start it at a multiple of {ALIGNMENT}"
                )
        if self.pinned:
            tensor = self.tensors[self.pinned]
            if tensor is not None and tensor.device != device and not tensor.is_pinned():
                raise ValueError(f"{self.pinned} is in pageable memory; expected pinned memory, or memory on {device}")
        if self.host is not None:
            self._check_sizes(self.host)

    def _check_sizes(self, host: Tensor) -> None:
        # Checked here, not in check_table, because a fake table has no values to read.
        _, numels, offsets = host.tolist()
        if fits(self.many, numels, offsets, self.room):
            return
        for index, (tensor, numel) in enumerate(zip(self.many, numels, strict=True)):
            if tensor.numel() != numel:
                raise ValueError(f"tensors[{index}] has {tensor.numel()} elements; the table was made for {numel}")
        raise ValueError(
            f"the last tensor would end at element {offsets[-1] + numels[-1]}; the flat buffer has {self.room}"
        )
