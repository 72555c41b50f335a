"""``torch.distributed`` by the names of ``deepspeed.comm``; what is not here is torch's own of that name."""

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
    # Collectives and questions alike: there is one process group, and torch's own names for it.
    if not name.startswith("_") and hasattr(dist, name):
        return getattr(dist, name)
    raise AttributeError(f"neither deepspeed.comm of zeropp's stand-in nor torch.distributed has {name!r}")


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """See :func:`zeropp.init_distributed`. A process that nobody launched gets a group of its own here.

    ``DEEPSPEED_TIMEOUT`` in the environment is the timeout in minutes, where none is given.
    """
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if given.get("timeout") is None and minutes is not None:
        given["timeout"] = timedelta(minutes=int(minutes))
    join(**given)
    if not dist.is_initialized():
        # Scripts ask for ranks right after this, and torch answers where there is a group.
        dist.init_process_group(given.get("dist_backend") or "gloo", store=dist.HashStore(), rank=0, world_size=1)


def get_local_rank() -> int:
    """This process's number on its host, by the launcher's variable; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> ProcessGroup | None:
    """The default process group."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(group))


def inference_all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """``all_reduce``."""
    return dist.all_reduce(tensor, op, group)
