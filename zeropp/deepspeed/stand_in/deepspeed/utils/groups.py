"""DeepSpeed's functions for the data-parallel process group, which contains all ranks in zeropp."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"deepspeed.utils.groups.{name} is not in zeropp's stand-in for DeepSpeed: zeropp has no sequence, tensor, "
        "expert or pipeline parallelism; see docs/migrating.md of zeropp"
    )


def _get_data_parallel_group() -> ProcessGroup | None:
    """Return the default process group, which contains all data-parallel ranks."""
    return dist.group.WORLD


def _get_data_parallel_rank() -> int:
    """Return this process's rank in the data-parallel group."""
    return dist.get_rank()


def _get_data_parallel_world_size() -> int:
    """Return the number of ranks in the data-parallel group."""
    return dist.get_world_size()
