"""Parameters that are tied here and lie in others' files under each of their names, as most programs write them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import DTYPES
from zeropp.checkpoint.parts import MODEL, Part, main_parts
from zeropp.checkpoint.source import Source
from zeropp.engine.engine import Engine

__all__ = ["require_equal"]


def require_equal(engine: Engine, aliases: Mapping[str, str], renamed: Mapping[str, str], source: Source) -> None:
    """Make sure that what is one here is one there: each rank compares its own part, and nothing changes.

    Args:
        engine: of the model.
        aliases: further names of tied tensors, and the first of each.
        renamed: the names that tensors are read under, by their first.
        source: of the files.

    Raises:
        CheckpointError: values differ by more than a rounding, or shapes do, and all but one would be lost.
    """
    apart = {
        alias: first
        for alias, first in aliases.items()
        if MODEL + alias in source.metadata.tensors and renamed.get(first, alias) != alias
    }
    if not apart:
        return
    tensors = source.metadata.tensors
    for alias, first in apart.items():
        here, there = (tensors[MODEL + name].shape for name in (renamed[first], alias))
        if here != there:
            raise CheckpointError(
                f"{alias!r} is tied to {first!r} here, and there of shape {there} beside {here}; strict=False takes "
                f"{renamed[first]!r} for both"
            )
    firsts, before = set(apart.values()), source.nbytes_read
    parts: dict[str, list[Part]] = {}
    for part in main_parts(engine, "slice"):
        name = part.name.removeprefix(MODEL)
        if name in firsts:
            parts.setdefault(name, []).append(part)
    for alias, first in apart.items():
        for part in parts.get(first, ()):
            own, other = (torch.empty_like(part.values) for _ in range(2))
            pairs = (renamed[first], own), (alias, other)
            source.read([Part(MODEL + name, part.shape, part.box, values) for name, values in pairs])
            # One may have been rounded, as it was saved: both are, to either dtype.
            for name in (renamed[first], alias):
                own, other = (each.to(DTYPES[tensors[MODEL + name].dtype]).to(each.dtype) for each in (own, other))
            if not torch.allclose(own, other, rtol=0, atol=0, equal_nan=True):
                raise CheckpointError(
                    f"{alias!r} is tied to {first!r} here, and has other values there, which would be lost; "
                    f"strict=False takes those of {renamed[first]!r}"
                )
    # Besides what the model needs.
    source.nbytes_converted += source.nbytes_read - before
    source.nbytes_read = before
