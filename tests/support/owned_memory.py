"""Elements and bytes that an engine holds at a moment."""

from __future__ import annotations

from collections.abc import Iterable

from zeropp import ZeroOptimizer
from zeropp.offload.storage_tiers import Place
from zeropp.params.unit import TERMS, Unit, UnitState

__all__ = ["live_numel", "owned_bytes"]


def live_numel(units: Iterable[Unit]) -> int:
    """Gathered elements, persistent ones aside."""
    return sum(u.numel for u in units if not u.persistent and u.state is not UnitState.SHARDED)


def owned_bytes(optimizer: ZeroOptimizer, place: Place = "device") -> dict[str, int]:
    """Bytes of storages in one place, under the names of ``plan.memory``'s terms; optimizer states are not among them.

    Beside them ``held_gradients`` (until a later backward), what is ``gathered``, and ``new_weights`` if there are any.
    """
    owned = dict.fromkeys((*TERMS, "edit_markers", "held_gradients", "gathered"), 0)
    if place == "device":
        tensors = [each for marker in optimizer.slices.markers for each in (marker.parameter, marker.gradient)]
        owned["edit_markers"] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    for unit in optimizer.engine.units:
        for term, nbytes in unit.owned_bytes(place):
            owned[term] = owned.get(term, 0) + nbytes
    return owned
