"""One unit's life: sharded, gathering, full. The transitions are methods; who calls them is the engine's business."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum

from torch import nn

from zeropp.flat_buffer import FlatBuffer
from zeropp.streams import Event, Stream

__all__ = ["Unit", "UnitState"]


class UnitState(Enum):
    """Where a unit's values are."""

    SHARDED = "sharded"  # only pieces; parameters guarded, storage empty
    GATHERING = "gathering"  # memory allocated, values on their way; parameters guarded
    FULL = "full"  # values readable by the model


class Unit:
    """Parameters that are gathered, released and reduced together.

    Attributes:
        index: position in the model; the same on every rank.
        holds: local reasons to stay gathered: modules on the call stack, an unfinished backward, a touched parameter.
    """

    def __init__(self, index: int, name: str, buffers: Sequence[FlatBuffer], *, persistent: bool) -> None:
        self.index = index
        self.name = name
        self.buffers = tuple(buffers)
        self.persistent = persistent
        self.state = UnitState.SHARDED
        self.holds = 0
        self._gathered: Event | None = None

    @property
    def numel(self) -> int:
        """Elements gathered together, padding included."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters in this unit."""
        return [parameter for buffer in self.buffers for parameter in buffer.parameters]

    @property
    def trainable(self) -> list[FlatBuffer]:
        """Buffers that receive gradients."""
        return [buffer for buffer in self.buffers if buffer.trainable]

    @property
    def version(self) -> int:
        """Version of the weights; only trainable ones ever change."""
        return max(buffer.version for buffer in self.buffers)

    def owned_bytes(self) -> Iterator[tuple[str, int]]:
        """(term of ``plan.memory``, bytes) of each storage, as it is right now."""
        for buffer in self.buffers:
            yield "main_weights" if buffer.trainable else "frozen_weights", buffer.shard.untyped_storage().nbytes()
            if buffer.grad is not None:
                yield "gradients", buffer.grad.untyped_storage().nbytes()
            yield "persistent_weights" if self.persistent else "gathered", buffer.flat.untyped_storage().nbytes()

    def drop_gradient(self, parameter: nn.Parameter) -> int:
        """Forget the gradient of one trainable parameter; returns its position among them."""
        position = 0
        for buffer in self.trainable:
            for other in buffer.parameters:
                if other is parameter:
                    buffer.drop_gradient(parameter)
                    return position
                position += 1
        raise KeyError(f"unit {self.name!r} has no such trainable parameter")

    def gather(self, stream: Stream) -> None:
        """Queue the gather. A unit that is full joins without effect: the same values are written again."""
        for buffer in self.buffers:
            stream.allocate(buffer.grow)
        self._gathered = stream.run(self._gather_buffers)
        if self.state is UnitState.SHARDED:
            self.state = UnitState.GATHERING

    def _gather_buffers(self) -> None:
        for buffer in self.buffers:
            buffer.gather()

    def refresh(self, stream: Stream) -> None:
        """Gather again what is kept, at a new version."""
        if self.state is UnitState.FULL:
            self.cover()
        self.gather(stream)

    def arrive(self, timeout: float) -> bool:
        """Wait for values on their way; False if they did not come in ``timeout`` seconds."""
        if self._gathered is not None:
            if not self._gathered.wait(timeout):
                return False
            self._gathered = None
        return True

    def uncover(self) -> None:
        """Let the model see values that have arrived."""
        if self.state is UnitState.GATHERING:
            self.state = UnitState.FULL
            with contextlib.ExitStack() as stack:
                for buffer in self.buffers:
                    stack.callback(buffer.uncover)  # every one, also after one that complains of an edit

    def cover(self) -> None:
        """Guard the parameters; the values stay where they are."""
        self.state = UnitState.GATHERING
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.callback(buffer.cover)  # every one, also after one that complains of an edit

    def release(self, stream: Stream) -> None:
        """Free the gathered values; they have arrived."""
        if self.state is UnitState.FULL:
            self.cover()
        self.state = UnitState.SHARDED
        for buffer in self.buffers:
            stream.free(buffer.shrink)
