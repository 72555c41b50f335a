"""Averages of the weights among what is given in ``extra``: spread as weights are, and saved and restored so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zeropp.access.average import Average
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import Metadata
from zeropp.checkpoint.parts import Part, Which, fragments, parts_of_row
from zeropp.engine.engine import Engine

__all__ = ["average_parts", "averages_of", "fill_in", "prefix_of"]


def prefix_of(name: str) -> str:
    """Prefix of the tensors of an average that is given under a name. With quotes, so that none continues another."""
    return f"zeropp.average.{name!r}."


def average_parts(average: Average, name: str, which: Which) -> Iterator[Part]:
    """An average, of this rank's pieces, under the name that it is given under."""
    for buffer, piece in average.pieces.items():
        yield from parts_of_row(buffer, piece, buffer.placement.mode.states, prefix_of(name), which)


def averages_of(engine: Engine, extra: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Average]:
    """Those among objects to restore, by name.

    Args:
        engine: whose averages they have to be.
        extra: the objects.
        saved: what the checkpoint has, by name.

    Raises:
        CheckpointError: it has something else under an average's name.
        ValueError: one is another model's.
    """
    found = {name: each for name, each in extra.items() if isinstance(each, Average) and name in saved}
    for name, average in found.items():
        average.require_of(engine)
        if not isinstance(saved[name], dict) or saved[name].keys() != average.counts().keys():
            raise CheckpointError(f"extra[{name!r}] is an average of the weights here, and was none when it was saved")
    return found


@torch.no_grad()
def fill_in(average: Average, name: str, renamed: Mapping[str, str], metadata: Metadata) -> None:
    """Begin anew, with the weights of now, where the checkpoint has no average: of what was frozen then.

    Args:
        average: that was read as far as it is there.
        name: that it is given under.
        renamed: names of parameters in the checkpoint.
        metadata: of the checkpoint.
    """
    for buffer, piece in average.pieces.items():
        for slot, each in fragments(buffer, buffer.placement.mode.states, "slice"):
            if prefix_of(name) + renamed.get(slot.name, "") not in metadata.tensors:
                place = slice(each.offset, each.offset + each.stop - each.start)
                piece[place].copy_(buffer.shard[place])
