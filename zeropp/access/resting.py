"""Weights that every rank caches whole, read between passes; of scripts whose library leaves them in the open."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from zeropp.engine.engine import Engine

__all__ = ["RestingWeights"]


class RestingWeights:
    """Finds them: in stages 0 to 2, and of small parameters in stage 3. Reading them takes no other rank.

    Args:
        engine: whose parameters are asked for.
    """

    def __init__(self, engine: Engine) -> None:
        # The engine has this, and has to go with its model.
        self._engine = weakref.ref(engine)

    def __call__(self, parameter: nn.Parameter) -> Tensor | None:
        """Whole values in the dtype that the model computes in; None where they are not there, or not the newest."""
        engine = self._engine()
        if engine is None or engine.closed or engine.loans:
            return None
        unit = engine.unit_of[id(parameter)]
        if not unit.persistent or unit.stale:
            return None
        # Queued by the step, on every rank: what is waited for here comes without anybody else's call.
        engine.refresh.wait()
        buffer, index = unit.place_of(parameter)
        if buffer.coded or engine.parking.is_away(buffer.flat) or not buffer.flat.untyped_storage().nbytes():
            return None
        return buffer.layout.views(buffer.flat)[index]
