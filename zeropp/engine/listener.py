"""Whom the engine tells what becomes of gradients."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Listener"]


class Listener(Protocol):
    """The wrapper around the optimizer, seen from the engine, which outlives it."""

    def forward_begins(self) -> None:
        """A forward from outside is about to gather or to read weights."""
        ...

    def weights_wanted(self) -> None:
        """Main weights are about to be read or loaded, outside of a pass."""
        ...

    def graph_begins(self) -> None:
        """A forward from outside is about to record a graph."""
        ...

    def backward_begins(self) -> None:
        """A backward starts; called before its first gather or reduction."""
        ...

    def backward_ended(self) -> None:
        """All that is to be sent of it has arrived."""
        ...

    def gradients_forgotten(self) -> None:
        """No gradient of a finished backward is left, or only zeros in its place."""
        ...
