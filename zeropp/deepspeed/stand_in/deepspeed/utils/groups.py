"""Process groups by what they are for: ranks are data-parallel, all of them."""

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
    """The default group."""
    return dist.group.WORLD


def _get_data_parallel_rank() -> int:
    """This process's rank in it."""
    return dist.get_rank()


def _get_data_parallel_world_size() -> int:
    """How many ranks it has."""
    return dist.get_world_size()
