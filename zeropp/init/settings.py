"""Checks of the arguments of ``zero.Init`` and ``materialize``, and the settings that follow from them.

:class:`ShardLimit` compares the host memory of a model's shards with ``zeropp.host_memory_limit`` during construction.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropp.comm.collective import PATIENCE
from zeropp.comm.process_groups import Group, to_process_group
from zeropp.config import Config, ConfigSource, load_config
from zeropp.config.base import notify_once
from zeropp.partition.levels import ranks_per_node
from zeropp.plan.limits import MemoryLimitError, size_text

__all__ = ["InitSettings", "ShardLimit", "choose_group", "choose_settings"]


class ShardLimit:
    """Counter of the host memory of a model's shards, which raises an error above a limit.

    Gradients and optimizer states are not counted here. The ZeroOptimizer counts them, because only then the frozen
    parameters are known.
    """

    def __init__(self, limit: int | None, world: int, local: int) -> None:
        """Start with no parameters.

        Args:
            limit: bytes for all ranks of a node together; None for no limit, or if the shards are not in host memory.
            world: number of ranks that share each parameter.
            local: number of ranks per node; 1 to count this rank's shards only.
        """
        self._limit = limit
        self._world = world
        self._local = local
        # Keyed by id, because tensors compare elementwise. Weak references, because parts of the model may be dropped
        # during construction.
        self._built: dict[int, weakref.ref[nn.Parameter]] = {}
        self._most = 0  # upper bound on the bytes of shards; parameters that were deleted since still count

    def count_parameter(self, parameter: nn.Parameter) -> None:
        """Count a parameter that has been built, unless it has been counted already.

        Raises:
            MemoryLimitError: the shards of all parameters so far exceed the limit.
        """
        # Skip meta parameters: they take no memory yet, and a weak reference would prevent giving them memory later.
        if self._limit is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return
        # A parameter may be assigned to several modules. Count it once.
        if self._find(id(parameter)) is not parameter:
            self._built[id(parameter)] = weakref.ref(parameter)
            self._most += self._nbytes(parameter)
        if self._most > self._limit:
            there = [found for each in self._built if (found := self._find(each)) is not None]
            # Count again exactly: some parameters may have been dropped or cast.
            self._built = {id(each): weakref.ref(each) for each in there}
            self._most = self.require(there)

    def drop_counts(self) -> None:
        """Drop the weak references at the end of the construction.

        ``torch.utils.swap_tensors``, which some moves to another device use, refuses parameters with weak references.
        """
        self._built.clear()

    def require(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes on a node of the shards of the given parameters, without lazy ones, and check the limit.

        Raises:
            MemoryLimitError: the bytes exceed the limit.
        """
        there = [each for each in parameters if not nn.parameter.is_lazy(each)]
        nbytes = sum(map(self._nbytes, there))
        if self._limit is not None and nbytes > self._limit:
            ranks = f"the {self._local} ranks" if self._local > 1 else "the rank"
            raise MemoryLimitError(
                [
                    f"zeropp.host_memory_limit allows {ranks} of a node {size_text(self._limit)}, and pieces of the "
                    f"{len(there)} parameters built so far, {sum(each.numel() for each in there):,} elements, take "
                    f"{size_text(nbytes)}",
                    "a narrower dtype needs less memory, as with zero.Init(dtype=torch.bfloat16)",
                    "with more nodes each node needs less memory; or raise the limit if the host has more memory",
                ]
            )
        return nbytes

    def _find(self, number: int) -> nn.Parameter | None:
        found = self._built.get(number)
        return None if found is None else found()

    def _nbytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes of a parameter's shards on one node: ``local * ceil(numel / world) * element_size``."""
        return self._local * -(-parameter.numel() // self._world) * parameter.element_size()


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class InitSettings:
    """Settings of ``zero.Init`` or ``materialize``.

    Attributes:
        group: ranks to shard over.
        device: device whose memory holds the shards.
        swap: directory of the swap file that holds the shards instead; None without NVMe.
        trains_on: device that the model will train on.
        pinned: True if the shards are in page-locked memory.
        dtype: default dtype of new parameters; None to leave PyTorch's default unchanged.
        seconds: timeout of waits for other ranks.
        gathers_in_apply: True if ``Module.apply`` gathers all parameters of a module together.
        asked: keys and values that the configuration must have when the model is wrapped.
        limit: check of the host memory of the shards.
    """

    group: Group
    device: torch.device
    swap: Path | None
    trains_on: torch.device
    pinned: bool
    dtype: torch.dtype | None
    seconds: float
    gathers_in_apply: bool
    asked: dict[str, object]
    limit: ShardLimit


def choose_settings(
    *,
    group: Group,
    remote_device: torch.device | str | None,
    pin_memory: bool,
    config_dict_or_path: ConfigSource,
    config: ConfigSource,
    dtype: torch.dtype | None,
    hpz_group: Group,
    asked: Mapping[str, object],
) -> InitSettings:
    """Check the arguments of :class:`zeropp.zero.Init`, and return the settings that follow from them.

    Args:
        group: ranks to shard over, from :func:`choose_group`.
        remote_device: storage of the shards; see :class:`zeropp.zero.Init`.
        pin_memory: True for page-locked memory.
        config_dict_or_path: the configuration, or None.
        config: the configuration under its deprecated name, or None.
        dtype: default dtype of new parameters, or None.
        hpz_group: process group of hpZ, or None.
        asked: keys and values that the configuration must have when the model is wrapped.

    Raises:
        ConfigError, TypeError, ValueError: an argument is invalid, or contradicts another one.
    """
    if config is not None:
        if config_dict_or_path is not None:
            raise ValueError("config_dict_or_path and config are both given; config is the older name of the former")
        notify_once("Init's argument config is deprecated; its name is config_dict_or_path", FutureWarning)
    given = config if config_dict_or_path is None else config_dict_or_path
    # final=False omits warnings about "auto" values: transformers fills them in later. Wrapping the model issues the
    # warnings.
    loaded = None if given is None else load_config(given, final=False)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(map(str, _DTYPES))}, or None")
    device = remote_device if remote_device is not None else _offloaded_to(loaded)
    trains_on = _accelerator()
    must = dict(asked)
    if hpz_group is not None:
        must["zero_hpz_partition_size"] = dist.get_world_size(to_process_group(hpz_group))
    if loaded is not None:
        # The groups of ranks that share the weights must not change until the model is wrapped. Other keys may.
        must["mics_shard_size"] = loaded.zero.mics_shard_size
    # Check the device first, because its error explains more than the errors of later checks.
    where = _where(device, trains_on, pin_memory)
    return InitSettings(
        group,
        where,
        _swap(loaded) if device == "nvme" else None,
        trains_on,
        pin_memory and trains_on.type == "cuda",
        dtype,
        PATIENCE if loaded is None else loaded.zeropp.hang_timeout,
        loaded is None or loaded.zero.override_module_apply,
        must,
        _choose_limit(None if device == "nvme" else loaded, group, where),
    )


def _choose_limit(config: Config | None, group: Group, where: torch.device) -> ShardLimit:
    limit = None if config is None or where.type != "cpu" else config.zeropp.host_memory_limit
    if config is None or limit is None or not dist.is_initialized():
        return ShardLimit(None, 1, 1)
    ranks = dist.get_process_group_ranks(to_process_group(group))
    try:
        local = ranks_per_node(ranks, config.zeropp.local_world_size)
    except ValueError:
        # The number of ranks per node is unknown or not the same on all nodes, so count this rank's memory only.
        local = 1
    return ShardLimit(limit, len(ranks), local)


def choose_group(data_parallel: Group, sequence: Group, mpu: Any) -> Group:
    """Return the process group to shard over. Initialise torch.distributed if a launcher has set its variables.

    Args:
        data_parallel: process group, or None.
        sequence: process group that replaces ``data_parallel``, or None.
        mpu: object with ``get_data_parallel_group()`` that is used if both groups are None, or None.

    Raises:
        TypeError: ``mpu`` has no such method.
    """
    _connect()
    chosen = data_parallel if sequence is None else sequence
    if chosen is None and mpu is not None:
        if not callable(getattr(mpu, "get_data_parallel_group", None)):
            raise TypeError(f"mpu is a {type(mpu).__name__} without get_data_parallel_group(); give one that has it")
        found: Group = mpu.get_data_parallel_group()
        return found
    return chosen


def _connect() -> None:
    # As in DeepSpeed, zero.Init initialises torch.distributed itself.
    launched = all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if launched and dist.is_available() and not dist.is_initialized():
        if (device := _accelerator()).type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group()


def _accelerator() -> torch.device:
    if torch.cuda.is_available():
        # Prefer the launcher's LOCAL_RANK. The current device is 0 on all ranks until it is set.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def _offloaded_to(config: Config | None) -> str | None:
    block = None if config is None else config.zero.offload_param
    return None if block is None or block.device == "none" else block.device


def _where(remote: torch.device | str | None, trains_on: torch.device, pin_memory: bool) -> torch.device:
    """Return the device whose memory holds the shards; the CPU also for shards in files."""
    kind = None if remote is None else str(remote)
    if kind not in (None, "cpu", "nvme", trains_on.type, str(trains_on)):
        raise ValueError(f'remote_device is {remote!r}; expected "cpu", "nvme", or None for {trains_on}')
    if pin_memory and kind != "cpu":
        raise ValueError(
            f'pin_memory asks for page-locked memory of the host, and remote_device is {remote!r}; give "cpu", too'
        )
    return torch.device("cpu") if kind in ("cpu", "nvme") else trains_on


def _swap(config: Config | None) -> Path:
    """Return the directory of the swap file for the shards."""
    block = None if config is None else config.zero.offload_param
    if block is None or block.nvme_path is None:
        raise ValueError(
            'remote_device "nvme" keeps weights in files, and nothing says where; give config_dict_or_path='
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ...}}}'
        )
    return block.nvme_path
