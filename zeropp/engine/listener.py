"""The wrapper around the optimizer, as the engine sees it."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from zeropp.engine.accumulation import GradAccumulation

__all__ = ["Listener"]


class Listener(Protocol):
    """Methods that the engine calls on the wrapper, which it outlives. Without a wrapper nothing happens.

    Attributes:
        accumulation_type: the class that counts this wrapper's micro-batches.
    """

    accumulation_type: type[GradAccumulation] = GradAccumulation

    def forward_begins(self) -> None:
        """A forward from outside is about to gather or to read weights."""
        return

    def weights_wanted(self) -> None:
        """Main weights are about to be read or loaded, outside of a pass."""
        return

    def graph_begins(self) -> None:
        """A forward from outside is about to record a graph."""
        return

    def backward_begins(self) -> None:
        """A backward starts; called before its first gather or reduction."""
        return

    def backward_ended(self) -> None:
        """All that is to be sent of it has arrived."""
        return

    def gradients_wanted(self) -> None:
        """Gradients are about to be set to zero, if there are some."""
        return

    def gradient_forgotten(self, parameter: nn.Parameter) -> None:
        """The gradient of one parameter was set to None, on every rank."""
        return

    def gradients_forgotten(self) -> None:
        """No gradient of a finished backward is left, or only zeros in its place."""
        return
