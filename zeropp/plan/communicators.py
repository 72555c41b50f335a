"""The communicators that an engine will have on a card, and the memory that they take outside of torch's allocator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from zeropp.comm.communicators import Ctas, Sharing, choose_ctas
from zeropp.config import Config

__all__ = ["COMMUNICATOR_NBYTES", "CommunicatorMemory", "choose_sharing", "estimate_nbytes", "planned_ctas"]

COMMUNICATOR_NBYTES = 688 * 2**20
"""Bytes of one NCCL communicator on a card once it has gathered or summed, estimated: 688 MiB were seen on four A100
with NVLink, 544 for two ranks (NVIDIA/nccl issue 964), with as many channels as NCCL chooses.
"""

_CONNECTION_NBYTES = 10 * 2**20  # a channel between two GPUs of a node (NVIDIA/nccl issue 1685)
_CHANNELS = 32  # between two GPUs with NVLink, unless `max_ctas` is less; NCCL takes a power of two
_PROCESSORS = 132  # of the card that plans assume: H100, H200


@dataclass(frozen=True)
class CommunicatorMemory:
    """One communicator, and an estimate of its memory. It has not been measured on a card.

    Attributes:
        kind: of work: "gather", "refresh", "reduce", "world" for small sums over all ranks; or several of them.
        ranks: number of its members.
        link: "local" inside a node, "cross" between nodes.
        collectives: names of the collectives that it runs; each takes its memory at its first use, while wrapping.
        nbytes: estimated, outside of torch's allocator.
    """

    kind: str
    ranks: int
    link: str
    collectives: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.ranks} ranks {self.link} ({', '.join(self.collectives)})"


def choose_sharing(config: Config, device: torch.device) -> Sharing:
    """The communicators that may be shared: see rule 2 in [Note: communicators]."""
    # With offload a thread launches the work of each lane; on CPU it does all of it.
    ordered = not config.zero.overlap_comm or (device.type == "cuda" and not config.offloads)
    return Sharing(kinds=ordered, engines=ordered and config.zeropp.share_communicators)


def planned_ctas(config: Config, processors: int = _PROCESSORS) -> Ctas:
    """Limits of thread blocks on a card with so many SMs."""
    asked = config.zeropp.max_ctas
    return choose_ctas(processors, asked.local, asked.cross)


def estimate_nbytes(ranks: int, link: str, collectives: Collection[str], max_ctas: int | None) -> int:
    """Bytes that a communicator takes on a card once each of its collectives has run.

    Between nodes sends and receives share buffers, and nothing is counted for them.
    """
    total = COMMUNICATOR_NBYTES
    if link == "local" and "all_to_all" in collectives:
        channels = min(_CHANNELS, _CHANNELS if max_ctas is None else 1 << (max_ctas - 1).bit_length())
        total += (ranks - 1) * channels * _CONNECTION_NBYTES
    return total
