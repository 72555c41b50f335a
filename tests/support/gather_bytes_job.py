"""A program that test_network_namespace starts on every rank: one all-gather of one shard per rank.

The argument is the size of a shard in bytes. Each rank checks the bytes that it receives.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def main(shard_nbytes: int) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    shard = torch.full((shard_nbytes,), dist.get_rank(), dtype=torch.uint8)
    gathered = [torch.empty_like(shard) for _ in range(world)]
    dist.all_gather(gathered, shard)
    for rank, piece in enumerate(gathered):
        if not bool((piece == rank).all()):
            raise RuntimeError(f"piece {rank} arrived with wrong bytes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
