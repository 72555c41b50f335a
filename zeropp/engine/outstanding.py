"""Forwards whose backward is still to come, as far as they tell what it does."""

from __future__ import annotations

import weakref

from zeropp.engine.hooks import BackwardCall
from zeropp.order.known_orders import PhaseKey

__all__ = ["Outstanding"]

_MOST = 8  # that make a difference to the kind of the next backward


class Outstanding:
    """Forwards since the last backward, the oldest first."""

    def __init__(self) -> None:
        self._found: list[tuple[PhaseKey, weakref.ref[BackwardCall] | None]] = []

    def add(self, key: PhaseKey) -> None:
        """A forward of this kind has begun."""
        self._found = [*self._found, (key, None)][-_MOST:]

    def watch(self, call: BackwardCall | None) -> None:
        """The last forward is over, and gathered nothing: it counts no longer than its graph, which ``call`` lives in.

        Any rank may run it alone, as one does that saves a prompt's embeddings; the others know nothing of it.
        """
        key, _ = self._found.pop()
        if call is not None:
            self._found.append((key, weakref.ref(call)))

    def keys(self) -> list[PhaseKey]:
        """The kinds of those that a backward may go back through."""
        self._found = [(key, call) for key, call in self._found if call is None or call() is not None]
        return [key for key, _ in self._found]

    def clear(self) -> None:
        """A backward is over, or has failed: none of them is waited for any more."""
        self._found = []
