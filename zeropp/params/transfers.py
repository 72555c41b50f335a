"""The messages that a flat buffer's weights and gradients will be, hop by hop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zeropp.comm.hops import Hop
from zeropp.params.flat_buffer import WeightPaths
from zeropp.params.gradient import GradientPaths

__all__ = ["Transfer", "transfers"]


@dataclass(frozen=True)
class Transfer:
    """One collective on one hop.

    Attributes:
        hop: over which it goes.
        collective: "all_gather", "all_to_all" or "reduce_scatter".
        nbytes: of all members' parts together.
        dtype: of what is summed on the way; uint8 where nothing is.
    """

    hop: Hop
    collective: str
    nbytes: int
    dtype: torch.dtype = torch.uint8


def transfers(weights: WeightPaths, gradients: GradientPaths | None, numel: int) -> Iterator[Transfer]:
    """Every transfer of a buffer of [numel] elements, padding included; in one order on all ranks.

    Differences to cached weights travel on the hops of whole weights and are smaller.
    """
    gathers = [weights.main, weights.refresh, weights.fetch]
    for hop in gradients.straight.hops if gradients is not None else ():
        numel_of_slice = numel // hop.spec.inner
        nbytes = hop.codec.nbytes(numel_of_slice // hop.size) * hop.size
        if hop.by_backend:
            yield Transfer(hop.transport, "reduce_scatter", nbytes, hop.codec.dtype)
        else:
            yield Transfer(hop.transport, "all_to_all", nbytes)
    if gradients is not None:
        gathers.append(gradients.replicas)
    for path in gathers:
        for transport, nbytes in path.results(numel) if path is not None else ():
            yield Transfer(transport, "all_gather", nbytes)
