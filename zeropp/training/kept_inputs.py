"""Memory for the inputs of checkpointed segments between their forward and their recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeropp.config.base import notify

__all__ = ["InputStore"]

_ALIGNMENT = 256  # bytes; where a tensor of any dtype may begin

_Key = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


class InputStore:
    """Moves inputs to the host's memory, into one buffer, or into one buffer in the host's memory.

    Moved are activations: floating tensors that require gradients. The others, such as masks and tables of positions,
    are often shared by all segments, which copies would not be.

    Args:
        on_host: to the host's memory, page-locked; what lies there already, as all does where a CPU trains, stays.
        segments: whose inputs the buffer has room for; None for no buffer.
    """

    def __init__(self, *, on_host: bool, segments: int | None) -> None:
        self._on_host, self._segments = on_host, segments
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Give the buffer up, when the graphs that still need it are gone; the next segment makes another one."""
        self._nbytes = 0  # of a segment's stretch
        self._buffer: Tensor | None = None
        # What old graphs hold goes back to the list that was there before.
        self._free: list[Tensor] = []

    def hooks(self, inputs: Iterable[object]) -> saved_tensors_hooks:
        """The context that moves the inputs of a segment, entered around the call that saves them."""
        moved = [value for value in inputs if isinstance(value, Tensor) and self._moves(value)]
        # Hooks are given another object with the same values; where they lie is what both have.
        keys = {_key(value) for value in moved}
        place = self._place_for(moved)

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            return _Moved(tensor, place) if _key(tensor) in keys else _Left(tensor)

        # Of all that backward needs it sees the inputs alone: the checkpoint's own hook is inside of this one.
        return saved_tensors_hooks(pack, lambda packed: packed())

    def _moves(self, tensor: Tensor) -> bool:
        if not tensor.requires_grad or not tensor.is_floating_point() or not tensor.numel():
            return False
        return self._segments is not None or not _lies_on_host(tensor)

    def _place_for(self, moved: list[Tensor]) -> _Place:
        device = torch.device("cpu") if self._on_host else None
        if self._segments is None or not moved:
            return _Place(device)
        nbytes = sum(_aligned(value) for value in moved)
        if nbytes > self._nbytes and (self._buffer is None or len(self._free) == self._segments):
            self._make(nbytes, moved[0], self._segments)
        # Not an error: results are the same, and the last batch of an epoch may be unlike all others.
        if nbytes > self._nbytes or not self._free:
            self._warn(nbytes)
            return _Place(device)
        return _Place(device, self._free)

    def _make(self, nbytes: int, like: Tensor, segments: int) -> None:
        # At the first segment; and again at the first of a pass whose inputs are larger.
        device = torch.device("cpu") if self._on_host else like.device
        self._free, self._buffer = [], None  # the memory of the former one first
        self._buffer = torch.empty(
            nbytes * segments, dtype=torch.uint8, device=device, pin_memory=self._on_host and like.is_cuda
        )
        self._nbytes = nbytes
        self._free += reversed(self._buffer.split(nbytes))

    def _warn(self, nbytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        notify(
            f"contiguous_checkpointing has one buffer for {self._segments} segments of {self._nbytes} bytes, and a "
            f"segment with {nbytes} bytes of inputs found no room in it, so these lie elsewhere; raise num_checkpoints "
            "to the segments whose inputs are there at once"
        )


class _Place:
    """Memory for the inputs of one segment: a stretch of the buffer, or each input its own.

    Args:
        device: of the inputs' own memory; None for theirs.
        free: stretches, uint8 [nbytes], of which this takes the last; it goes back with the last input.
    """

    def __init__(self, device: torch.device | None, free: list[Tensor] | None = None) -> None:
        self._device, self._stretch, self._offset = device, None, 0
        self._copied: torch.cuda.Event | None = None
        if free is not None:
            self._stretch = free.pop()
            # A graph may go without a backward; so it is not backward that gives the stretch back.
            weakref.finalize(self, free.append, self._stretch).atexit = False

    def room(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory for a tensor, dense, its dimensions in their order in memory."""
        # Kernels choose their way by strides, and another way may give other bits.
        layout = torch.empty_like(tensor, device="meta")
        if self._stretch is None:
            device = self._device or tensor.device
            pinned = tensor.is_cuda and device.type == "cpu"
            return torch.empty_strided(
                layout.size(), layout.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned
            )
        first, self._offset = self._offset, self._offset + _aligned(tensor)
        flat = self._stretch[first : first + layout.numel() * layout.element_size()].view(tensor.dtype)
        return flat.as_strided(layout.size(), layout.stride())

    def copy(self, into: Tensor, values: Tensor) -> None:
        """Copy on the current stream, behind all copies before to and from this place; the host does not wait."""
        device = into.device if into.is_cuda else values.device
        if device.type != "cuda":
            into.copy_(values)
            return
        stream = torch.cuda.current_stream(device)
        # Backward may run on another stream than forward did.
        if self._copied is not None:
            stream.wait_event(self._copied)
        into.copy_(values, non_blocking=True)
        self._copied = stream.record_event()


class _Moved:
    """An input that lies elsewhere; called, a copy of it where it was.

    A copy also of what never left the device: the stretch is another segment's as soon as this graph is gone, and
    whoever got the input in a recomputation may hold it for longer.
    """

    def __init__(self, tensor: Tensor, place: _Place) -> None:
        self._place, self._device = place, tensor.device
        self._room = place.room(tensor)
        place.copy(self._room, tensor)

    def __call__(self) -> Tensor:
        found = torch.empty_like(self._room, device=self._device)
        self._place.copy(found, self._room)
        return found


class _Left:
    """An input that stays where it is; called, that."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def __call__(self) -> Tensor:
        # As autograd does for what it saves without hooks.
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of a checkpointed segment, shape {tuple(self._tensor.shape)}, was modified in place after "
                "its forward, so its recomputation would be another one; give checkpoint() a copy"
            )
        return self._tensor


def _key(tensor: Tensor) -> _Key:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _aligned(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a stretch."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _lies_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
