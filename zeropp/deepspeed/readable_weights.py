"""Access to weights between passes that DeepSpeed's scripts have beyond the core's: more reads, and edits.

The guard (`zeropp.params.guard`) lets weights of stages 0 to 2 be read. Behind an engine with :class:`ReadableWeights`
so are small parameters of stage 3, and ``state_dict()`` takes no other rank where every rank caches the weights. Edits
are kept of weights that no step changes and that every rank holds in full: frozen ones, and those of a model that
nobody trains, such as an average of another model's weights. These are edited as in plain torch, each rank its own.

[Note: edits of frozen weights] Frozen weights may be edited, too, where every rank has them whole: nothing else writes
to them. An edit changes what this rank computes with, and its part of the main weights. So all ranks have to make it,
or main weights would be of both kinds. Each rank keeps a number that follows from its edits. Collective calls that read
or save weights compare it, in the exchange that they begin with, and a step does by the hash of what was issued; a rank
alone that merges an adapter, to save it from there, meets neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp.engine.engine import Engine
from zeropp.params.guard import handler_of, show

__all__ = ["ReadableWeights"]


@dataclass(frozen=True)
class Edits:
    """The place that edits go to: rows of the same elements in one order. See :class:`zeropp.params.guard.EditTarget`.

    Attributes:
        cached: that is shown, [n].
        main: this rank's part of the weights that it was made of, [m]; the same memory where that is possible.
        start: of that part in ``cached``.
        note: told of each edit, by the first element and the one behind the last.
    """

    cached: Tensor
    main: Tensor
    start: int
    note: Callable[[int, int], None]

    def take_edit(self, written: Tensor) -> None:
        """A view of what is cached has been written to."""
        if not written.numel():
            return
        begin = int(written.storage_offset() - self.cached.storage_offset())
        extent = sum((size - 1) * stride for size, stride in zip(written.shape, written.stride(), strict=True))
        end = begin + int(extent) + 1
        self.note(begin, end)
        first = max(begin, self.start)
        last = min(end, self.start + self.main.numel())
        if first < last and self.main.untyped_storage().data_ptr() != self.cached.untyped_storage().data_ptr():
            main, cached = self.main[first - self.start : last - self.start], self.cached[first:last]
            # What has not been edited keeps the bits that the cached weight was rounded from.
            main.copy_(torch.where(main.to(cached.dtype) == cached, main, cached.to(main.dtype)))

    def replace(self, weights: Tensor, new: Tensor) -> None:
        """Give cached weights new values in their place; what ``parameter.data = new`` does to a plain parameter."""
        if new.shape != weights.shape:
            raise RuntimeError(
                f"parameter.data was set to a tensor of shape {tuple(new.shape)}, and the parameter, whose memory "
                f"zeropp manages, has {tuple(weights.shape)}; give one of its shape"
            )
        # After ``parameter.data += x`` it is these very values.
        if new.data_ptr() != weights.data_ptr() or new.stride() != weights.stride():
            show(torch.Tensor.copy_, (weights, new), {})


_EDIT = 5  # a kind in the hash of what is issued, beside those of collectives


class ReadableWeights:
    """See :class:`zeropp.params.guard.WeightReader`.

    Attributes:
        alone: ``state_dict()`` takes no other rank, whatever is not here; of a stand-in's scripts.
    """

    alone = False

    def edits(self, parameter: nn.Parameter) -> Edits | None:
        """The places that edits of a frozen weight go to (PEFT's ``merge_and_unload()``), in stages 0 to 2; else None.

        An edit is this rank's own, and is meant to be made on every rank: see [Note: edits of frozen weights].
        """
        engine = handler_of(parameter)
        # By the stage, so that it is on one rank as on many. A step would write over edits of what is trained.
        if not isinstance(engine, Engine) or not engine.mode.stays_whole:
            return None
        unit = engine.unit_of[id(parameter)]
        buffer, _ = unit.place_of(parameter)
        if buffer.trainable or buffer.wire_copy is not None or engine.parking.is_away(buffer.shard):
            return None
        start, _ = buffer.placement.slice_of(buffer.layout.numel, buffer.placement.mode.states)

        def note(begin: int, end: int) -> None:
            engine.note_issued(_EDIT, unit.index, begin ^ end)
            # Not hash(), which other builds of Python may have otherwise.
            engine.agreement.edits = zlib.crc32(f"{unit.index} {begin} {end}".encode(), engine.agreement.edits)

        return Edits(buffer.flat, buffer.shard, start, note)
