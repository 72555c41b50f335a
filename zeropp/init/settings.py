"""The arguments of ``zero.Init``: what they mean together, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeropp.comm.collective import PATIENCE
from zeropp.comm.process_groups import Group, to_process_group
from zeropp.config import Config, ConfigSource, load_config
from zeropp.config.base import notify_once
from zeropp.init.limit import PieceLimit
from zeropp.partition.levels import ranks_per_node

__all__ = ["InitSettings", "choose_group", "choose_settings"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class InitSettings:
    """What a build is to be like.

    Attributes:
        group: ranks to partition among.
        device: in whose memory pieces lie.
        swap: directory of the files that they lie in instead, or None.
        trains_on: the device that the model will train on.
        pinned: pieces lie in page-locked memory.
        dtype: default dtype of what is built; None for what the code says.
        seconds: to wait for other ranks.
        gathers_in_apply: ``Module.apply`` fetches a module's parameters together.
        asked: settings that the configuration must have, too, when the model is wrapped.
        limit: refuses what a host cannot hold.
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
    limit: PieceLimit


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
    """See :class:`zeropp.zero.Init`.

    Raises:
        ConfigError, TypeError, ValueError: an argument cannot be used, or not with another.
    """
    if config is not None:
        if config_dict_or_path is not None:
            raise ValueError("config_dict_or_path and config are both given; config is the older name of the former")
        notify_once("Init's argument config is deprecated; its name is config_dict_or_path", FutureWarning)
    given = config if config_dict_or_path is None else config_dict_or_path
    # Whoever wraps the model says what a configuration leaves open; transformers fills it in between.
    loaded = None if given is None else load_config(given, final=False)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(map(str, _DTYPES))}, or None")
    device = remote_device if remote_device is not None else _offloaded_to(loaded)
    trains_on = _accelerator()
    must = dict(asked)
    if hpz_group is not None:
        must["zero_hpz_partition_size"] = dist.get_world_size(to_process_group(hpz_group))
    if loaded is not None:
        # Over which ranks weights are spread; the rest of the configuration may change.
        must["mics_shard_size"] = loaded.zero.mics_shard_size
    # First, since what it refuses explains more than what would follow.
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


def _choose_limit(config: Config | None, group: Group, where: torch.device) -> PieceLimit:
    limit = None if config is None or where.type != "cpu" else config.zeropp.host_memory_limit
    if config is None or limit is None or not dist.is_initialized():
        return PieceLimit(None, 1, 1)
    ranks = dist.get_process_group_ranks(to_process_group(group))
    try:
        local = ranks_per_node(ranks, config.zeropp.local_world_size)
    except ValueError:
        # Nobody has said. What is too much for this rank alone is refused still.
        local = 1
    return PieceLimit(limit, len(ranks), local)


def choose_group(data_parallel: Group, sequence: Group, mpu: Any) -> Group:
    """The ranks to build among; starts torch.distributed where a launcher has said how and nobody has.

    Raises:
        TypeError: ``mpu`` cannot say.
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
    # DeepSpeed's Init does so, too.
    launched = all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if launched and dist.is_available() and not dist.is_initialized():
        if (device := _accelerator()).type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group()


def _accelerator() -> torch.device:
    if torch.cuda.is_available():
        # A launcher's word before the current device, which is the first one until somebody has chosen.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def _offloaded_to(config: Config | None) -> str | None:
    block = None if config is None else config.zero.offload_param
    return None if block is None or block.device == "none" else block.device


def _where(remote: torch.device | str | None, trains_on: torch.device, pin_memory: bool) -> torch.device:
    """Where pieces lie."""
    kind = None if remote is None else str(remote)
    if kind not in (None, "cpu", "nvme", trains_on.type, str(trains_on)):
        raise ValueError(f'remote_device is {remote!r}; expected "cpu", "nvme", or None for {trains_on}')
    if pin_memory and kind != "cpu":
        raise ValueError(
            f'pin_memory asks for page-locked memory of the host, and remote_device is {remote!r}; give "cpu", too'
        )
    return torch.device("cpu") if kind in ("cpu", "nvme") else trains_on


def _swap(config: Config | None) -> Path:
    """Where the files of pieces go."""
    block = None if config is None else config.zero.offload_param
    if block is None or block.nvme_path is None:
        raise ValueError(
            'remote_device "nvme" keeps weights in files, and nothing says where; give config_dict_or_path='
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ...}}}'
        )
    return block.nvme_path
