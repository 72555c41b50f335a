"""What the engine's units hold at a moment, in elements and bytes; for tests, logs and plans."""

from __future__ import annotations

from collections.abc import Iterable

from zeropp.offload.home import Place
from zeropp.params.unit import TERMS, Unit, UnitState

__all__ = ["live_numel", "owned_bytes"]


def live_numel(units: Iterable[Unit]) -> int:
    """Gathered elements, persistent ones aside."""
    return sum(u.numel for u in units if not u.persistent and u.state is not UnitState.SHARDED)


def owned_bytes(units: Iterable[Unit], place: Place = "device") -> dict[str, int]:
    """Bytes of the units' storages in one place, under the names of ``plan.memory``'s terms.

    Beside them ``held_gradients`` (until a later backward), what is ``gathered``, and ``new_weights`` if there are any.
    """
    owned = dict.fromkeys((*TERMS, "held_gradients", "gathered"), 0)
    for unit in units:
        for term, nbytes in unit.owned_bytes(place):
            owned[term] = owned.get(term, 0) + nbytes
    return owned
