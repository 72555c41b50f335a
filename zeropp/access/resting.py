"""Weights that every rank caches whole, read between passes; of scripts whose library leaves them in the open.

[Note: edits of frozen weights] Frozen weights may be edited, too, where every rank has them whole: nothing else writes
to them. An edit changes what this rank computes with, and its part of the main weights. So all ranks have to make it,
or main weights would be of both kinds. Each rank keeps a number that follows from its edits. Collective calls that read
or save weights compare it, in the exchange that they begin with, and a step does by the hash of what was issued; a rank
alone that merges an adapter, to save it from there, meets neither.
"""

from __future__ import annotations

import weakref
import zlib

from torch import Tensor, nn

from zeropp.engine.engine import Engine
from zeropp.params.shown import Edits

__all__ = ["RestingWeights"]

_EDIT = 5  # a kind in the hash of what is issued, beside those of collectives


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
        """Tell whether a parameter's values are here, or are nobody's to gather."""
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
        """The places that edits of a frozen weight go to (PEFT's ``merge_and_unload()``), in stages 0 to 2; else None.

        An edit is this rank's own, and is meant to be made on every rank: see [Note: edits of frozen weights].
        """
        engine = self._engine()
        # By the stage, so that it is on one rank as on many. A step would write over edits of what is trained.
        if engine is None or engine.maker.config.zero.stage > 2:
            return None
        unit = engine.unit_of[id(parameter)]
        buffer, _ = unit.place_of(parameter)
        if buffer.trainable or buffer.source is not None or engine.parking.is_away(buffer.shard):
            return None
        start, _ = buffer.placement.slice_of(buffer.layout.numel, buffer.placement.mode.states)

        def note(begin: int, end: int) -> None:
            engine.issued.add(_EDIT, unit.index, begin ^ end)
            # Not hash(), which other builds of Python may have otherwise.
            engine.agreement.edits = zlib.crc32(f"{unit.index} {begin} {end}".encode(), engine.agreement.edits)

        return Edits(buffer.flat, buffer.shard, start, note)
