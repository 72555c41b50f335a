"""Reads and edits of weights between passes that DeepSpeed's scripts make and the core alone does not allow.

The guard (`zeropp.params.guard`) allows reading weights between passes in stages 0 to 2. An engine with
:class:`ReadableWeights` allows more:

- Persistent parameters of stage 3 can be read as well.
- ``state_dict()`` needs no other rank if this rank caches all of the module's weights.
- Frozen weights can be edited in stages 0 to 2. All weights of a model without an optimizer are frozen.

[Note: edits of frozen weights] In stages 0 to 2 every rank has full frozen weights, and no optimizer step writes to
them, so scripts may edit them in place as in plain torch. An edit is local: it changes the weights that this rank
computes with, and this rank's part of the main weights. All ranks must make the same edit; otherwise the main weights
would be a mix of edited and unedited parts. To detect a missing edit, each rank updates a checksum with every edit.
Collective calls that read or save weights compare the checksums in their first exchange, and the step sync compares the
hash of issued collectives, which includes edits. A single rank may still merge an adapter and save its own copy,
because that calls neither.
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
    """Copies an edit of cached weights into this rank's main weights; a `zeropp.params.guard.EditTarget`.

    Attributes:
        cached: flat buffer that the user's edits write to, [n].
        main: this rank's shard of the main weights, [m]; may be a view of ``cached``.
        start: position of ``main``'s first element in ``cached``.
        note: function called for each edit with the edited range of ``cached``: first element, and last element + 1.
    """

    cached: Tensor
    main: Tensor
    start: int
    note: Callable[[int, int], None]

    def take_edit(self, written: Tensor) -> None:
        """Copy an edit into the main weights.

        Args:
            written: view of ``cached`` that the user has written to.
        """
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
            # Copy only elements that differ: unedited elements keep the main weight from which the cached weight was
            # rounded.
            main.copy_(torch.where(main.to(cached.dtype) == cached, main, cached.to(main.dtype)))

    def replace(self, weights: Tensor, new: Tensor) -> None:
        """Copy new values into cached weights, when the user assigns ``parameter.data = new``.

        Args:
            weights: view of ``cached`` that the user sees as the parameter's data.
            new: assigned tensor, of the same shape.

        Raises:
            RuntimeError: ``new`` has another shape.
        """
        if new.shape != weights.shape:
            raise RuntimeError(
                f"parameter.data was set to a tensor of shape {tuple(new.shape)}, and the parameter, whose memory "
                f"zeropp manages, has {tuple(weights.shape)}; give one of its shape"
            )
        # ``parameter.data += x`` assigns the edited view itself, which needs no copy.
        if new.data_ptr() != weights.data_ptr() or new.stride() != weights.stride():
            show(torch.Tensor.copy_, (weights, new), {})


_EDIT = 5  # kind of an edit in the hash of issued collectives; kinds of collectives are other numbers


class ReadableWeights:
    """Allows the reads and edits of weights that DeepSpeed's scripts make; a `zeropp.params.guard.WeightReader`.

    Attributes:
        alone: True if ``state_dict()`` never communicates, even if this rank lacks some weights. The stand-in for
            ``deepspeed`` sets it, because scripts written for DeepSpeed call ``state_dict()`` on one rank.
    """

    alone = False

    def edits(self, parameter: nn.Parameter) -> Edits | None:
        """Return the target of in-place edits of a frozen weight; None if edits are refused.

        PEFT's ``merge_and_unload()`` makes such edits. Edits are refused in stage 3, for trainable parameters and for
        offloaded weights. An edit is local and must be made on every rank: see [Note: edits of frozen weights].
        """
        engine = handler_of(parameter)
        # The stage decides, and not the number of ranks, so that a script behaves alike on one rank and on many.
        if not isinstance(engine, Engine) or not engine.mode.stays_whole:
            return None
        unit = engine.unit_of[id(parameter)]
        buffer, _ = unit.place_of(parameter)
        if buffer.trainable or buffer.wire_copy is not None or engine.parking.is_away(buffer.shard):
            return None
        start, _ = buffer.placement.slice_of(buffer.layout.numel, buffer.placement.mode.states)

        def note(begin: int, end: int) -> None:
            engine.note_issued(_EDIT, unit.index, begin ^ end)
            # crc32 and not hash(), whose values may differ between builds of Python.
            engine.agreement.edits = zlib.crc32(f"{unit.index} {begin} {end}".encode(), engine.agreement.edits)

        return Edits(buffer.flat, buffer.shard, start, note)
