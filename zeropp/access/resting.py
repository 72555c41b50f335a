"""Weights that every rank caches whole, read between passes; of scripts whose library leaves them in the open."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from zeropp.engine.engine import Engine
from zeropp.params.shown import Edits

__all__ = ["RestingWeights"]


class RestingWeights:
    """Finds them: in stages 0 to 2, and of small parameters in stage 3. Reading them takes no other rank.

    Args:
        engine: whose parameters are asked for.

    Attributes:
        alone: ``state_dict()`` takes no other rank, whatever is not here; of a stand-in's scripts.
    """

    alone = False

    def __init__(self, engine: Engine) -> None:
        # The engine has this, and has to go with its model.
        self._engine = weakref.ref(engine)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's values are here, or are nobody's to gather."""
        engine = self._engine()
        return engine is None or id(parameter) not in engine.unit_of or self(parameter) is not None

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

    def edits(self, parameter: nn.Parameter) -> Edits | None:
        """Where edits go: of a model without an optimizer in stage 0, as an average; None of others, to refuse them."""
        engine = self._engine()
        # A step would forget them, and where ranks have parts of the main weights each would have its own. It goes by
        # the stage, so that it is on one rank as on many.
        if engine is None or engine.maker.config.zero.stage > 0 or any(buffer.trainable for buffer in engine.buffers):
            return None
        buffer, _ = engine.unit_of[id(parameter)].place_of(parameter)
        return None if engine.parking.is_away(buffer.shard) else Edits(buffer.flat, buffer.shard)
