"""The arguments of ``zero.Init``: what they mean together, and what is refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zeropp.comm.collective import PATIENCE
from zeropp.comm.members import Group, to_process_group
from zeropp.config import Config, ConfigSource, load_config
from zeropp.config.base import notify

__all__ = ["InitSettings", "choose_settings"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class InitSettings:
    """What a build is to be like.

    Attributes:
        group: ranks to partition among.
        device: where pieces lie.
        trains_on: the device that the model will train on.
        pinned: pieces lie in page-locked memory.
        dtype: default dtype of what is built; None for what the code says.
        seconds: to wait for other ranks.
        gathers_in_apply: ``Module.apply`` fetches a module's parameters together.
        asked: settings that the configuration must have, too, when the model is wrapped.
    """

    group: Group
    device: torch.device
    trains_on: torch.device
    pinned: bool
    dtype: torch.dtype | None
    seconds: float
    gathers_in_apply: bool
    asked: dict[str, object]


def choose_settings(
    *,
    data_parallel_group: Group,
    sequence_data_parallel_group: Group,
    remote_device: str | None,
    pin_memory: bool,
    config_dict_or_path: ConfigSource,
    config: ConfigSource,
    dtype: torch.dtype | None,
    mpu: Any,
    hpz_group: Group,
    asked: dict[str, object],
) -> InitSettings:
    """See :class:`zeropp.zero.Init`.

    Raises:
        ConfigError, TypeError, ValueError: an argument cannot be used, or not with another.
    """
    if config is not None:
        if config_dict_or_path is not None:
            raise ValueError("config_dict_or_path and config are both given; config is the older name of the former")
        notify("Init's argument config is deprecated; its name is config_dict_or_path", FutureWarning)
    given = config if config_dict_or_path is None else config_dict_or_path
    loaded = None if given is None else load_config(given)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(map(str, _DTYPES))}, or None")
    _connect()
    device = remote_device if remote_device is not None else _offloaded_to(loaded)
    trains_on = _accelerator()
    if hpz_group is not None:
        asked["zero_hpz_partition_size"] = dist.get_world_size(to_process_group(hpz_group))
    return InitSettings(
        _choose_group(data_parallel_group, sequence_data_parallel_group, mpu),
        _where(device, trains_on, pin_memory),
        trains_on,
        pin_memory and trains_on.type == "cuda",
        dtype,
        PATIENCE if loaded is None else loaded.zeropp.hang_timeout,
        loaded is None or loaded.zero.override_module_apply,
        # Over which ranks weights are spread; the rest of the configuration may change.
        {**asked, "mics_shard_size": loaded.zero.mics_shard_size} if loaded is not None else asked,
    )


def _choose_group(data_parallel: Group, sequence: Group, mpu: Any) -> Group:
    if data_parallel is not None and sequence is not None:
        raise ValueError(
            "data_parallel_group and sequence_data_parallel_group are both given; the second takes the place of the "
            "first where sequences are split over ranks. Give one"
        )
    chosen = data_parallel if sequence is None else sequence
    if chosen is None and mpu is not None:
        if not callable(getattr(mpu, "get_data_parallel_group", None)):
            raise TypeError(f"mpu is a {type(mpu).__name__} without get_data_parallel_group(); give one that has it")
        found: Group = mpu.get_data_parallel_group()
        return found
    return chosen


def _connect() -> None:
    """Start torch.distributed where a launcher has said how and nobody has: DeepSpeed's Init does so, too."""
    launched = all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if launched and dist.is_available() and not dist.is_initialized():
        dist.init_process_group()


def _accelerator() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _offloaded_to(config: Config | None) -> str | None:
    block = None if config is None else config.zero.offload_param
    return None if block is None or block.device == "none" else block.device


def _where(remote: str | None, trains_on: torch.device, pin_memory: bool) -> torch.device:
    if remote == "nvme":
        raise ValueError(
            'remote_device "nvme" keeps weights in files, which is not in this version; give "cpu", or None for the '
            "device that trains"
        )
    try:
        device = trains_on if remote is None else torch.device(remote)
    except RuntimeError as error:
        raise ValueError(f'remote_device is {remote!r}; expected "cpu", or None ({error})') from None
    if pin_memory and remote != "cpu":
        raise ValueError(
            f'pin_memory asks for page-locked memory of the host, and remote_device is {remote!r}; give "cpu", too'
        )
    return trains_on if device.type == trains_on.type and device.index is None else device
