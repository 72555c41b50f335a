"""The gathered elements and the owned bytes of an engine at one moment."""

from __future__ import annotations

from collections.abc import Iterable

from zeropp import ZeroOptimizer
from zeropp.offload.storage_tiers import Place
from zeropp.params.unit import TERMS, Unit, UnitState

__all__ = ["live_numel", "owned_bytes"]


def live_numel(units: Iterable[Unit]) -> int:
    """Return the number of elements of units that are gathered now, without persistent units."""
    return sum(u.numel for u in units if not u.persistent and u.state is not UnitState.SHARDED)


def owned_bytes(optimizer: ZeroOptimizer, place: Place = "device") -> dict[str, int]:
    """Return the bytes of the storages in one place, by the names of the terms of ``plan.memory``.

    Optimizer states are not counted. Further keys are ``held_gradients`` (gradients kept until a later backward),
    ``gathered``, and ``new_weights`` if some stepped weights are not yet refreshed.
    """
    owned = dict.fromkeys((*TERMS, "edit_markers", "held_gradients", "gathered"), 0)
    if place == "device":
        tensors = [each for marker in optimizer.slices.markers for each in (marker.parameter, marker.gradient)]
        owned["edit_markers"] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    for unit in optimizer.engine.units:
        for term, nbytes in unit.owned_bytes(place):
            owned[term] = owned.get(term, 0) + nbytes
    return owned
