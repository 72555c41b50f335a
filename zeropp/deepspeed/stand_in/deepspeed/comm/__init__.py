"""``deepspeed.comm``: names of ``torch.distributed``, and a few functions that only DeepSpeed has."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeropp.deepspeed.distributed import init_distributed as join

__all__ = ["get_all_ranks_from_group", "get_local_rank", "get_world_group", "inference_all_reduce", "init_distributed"]

_SIGNATURE = inspect.signature(join)


def __getattr__(name: str) -> Any:
    # DeepSpeed's collectives have torch's names, so torch.distributed serves all names that are not defined here.
    if not name.startswith("_") and hasattr(dist, name):
        return getattr(dist, name)
    raise AttributeError(f"neither deepspeed.comm of zeropp's stand-in nor torch.distributed has {name!r}")


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Create the default process group, as :func:`zeropp.init_distributed` does, also without a launcher.

    A process without a launcher gets a process group of one rank. The arguments are those of
    :func:`zeropp.init_distributed`. If no ``timeout`` is given, the environment variable ``DEEPSPEED_TIMEOUT`` sets it,
    in minutes.
    """
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if given.get("timeout") is None and minutes is not None:
        given["timeout"] = timedelta(minutes=int(minutes))
    join(**given)
    if not dist.is_initialized():
        # Scripts call get_rank() right after this function, and torch raises if there is no process group.
        dist.init_process_group(given.get("dist_backend") or "gloo", store=dist.HashStore(), rank=0, world_size=1)


def get_local_rank() -> int:
    """Return this process's number on its node, which the launcher passes in LOCAL_RANK; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> ProcessGroup | None:
    """Return the default process group."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a process group, in the group's order."""
    return list(dist.get_process_group_ranks(group))


def inference_all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """Run ``torch.distributed.all_reduce``, and return its result."""
    return dist.all_reduce(tensor, op, group)
