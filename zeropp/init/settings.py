"""The arguments of ``zero.Init``: their meaning together, refused combinations, and the limit of host memory.

:class:`PieceLimit` holds the host memory that a model takes while it is built against ``zeropp.host_memory_limit``.
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

__all__ = ["InitSettings", "PieceLimit", "choose_group", "choose_settings"]


class PieceLimit:
    """Refuses parameters whose pieces a host cannot hold.

    What is trained later takes more than pieces: gradients, states. It is for the ZeroOptimizer to count, when it is
    known which parameters are frozen.
    """

    def __init__(self, limit: int | None, world: int, local: int) -> None:
        """Count from nothing.

        Args:
            limit: bytes of a node's ranks together; None for none, and where pieces are not in the host's memory.
            world: ranks that have a piece each.
            local: ranks of a node.
        """
        self._limit = limit
        self._world = world
        self._local = local
        # By identity, since tensors compare by elements; weakly, since parts may be given up while they are built.
        self._built: dict[int, weakref.ref[nn.Parameter]] = {}
        self._most = 0  # bytes of all that were ever counted

    def count_parameter(self, parameter: nn.Parameter) -> None:
        """Count one that has been built, unless it was counted before.

        Raises:
            MemoryLimitError: pieces of all there are so far take more than the limit.
        """
        # On the meta device it takes nothing yet, and a weak reference would be in the way of its getting values.
        if self._limit is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return
        # Modules give each other what was counted when the first of them got it.
        if self._find(id(parameter)) is not parameter:
            self._built[id(parameter)] = weakref.ref(parameter)
            self._most += self._nbytes(parameter)
        if self._most > self._limit:
            there = [found for each in self._built if (found := self._find(each)) is not None]
            # As they are now: some may have gone, or been cast.
            self._built = {id(each): weakref.ref(each) for each in there}
            self._most = self.require(there)

    def drop_counts(self) -> None:
        """Nothing is built any more; torch gives no parameter another device while something refers to it weakly."""
        self._built.clear()

    def require(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes on a node of the pieces of a whole model, if it may have so many.

        Raises:
            MemoryLimitError: it may not.
        """
        there = [each for each in parameters if not nn.parameter.is_lazy(each)]
        nbytes = sum(map(self._nbytes, there))
        if self._limit is not None and nbytes > self._limit:
            ranks = f"the {self._local} ranks" if self._local > 1 else "the rank"
            raise MemoryLimitError(
                [
                    f"zeropp.host_memory_limit allows {ranks} of a node {size_text(self._limit)}, and pieces of the "
                    f"{len(there)} parameters there are so far, {sum(each.numel() for each in there):,} elements, take "
                    f"{size_text(nbytes)}",
                    "pieces of a narrower dtype take less, as of zero.Init(dtype=torch.bfloat16)",
                    "more nodes take less each, as does a larger limit if there is one",
                ]
            )
        return nbytes

    def _find(self, number: int) -> nn.Parameter | None:
        found = self._built.get(number)
        return None if found is None else found()

    def _nbytes(self, parameter: nn.Parameter) -> int:
        """Bytes that all pieces on a node take."""
        return self._local * -(-parameter.numel() // self._world) * parameter.element_size()


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class InitSettings:
    """The settings of a build.

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
    """The device of the pieces."""
    kind = None if remote is None else str(remote)
    if kind not in (None, "cpu", "nvme", trains_on.type, str(trains_on)):
        raise ValueError(f'remote_device is {remote!r}; expected "cpu", "nvme", or None for {trains_on}')
    if pin_memory and kind != "cpu":
        raise ValueError(
            f'pin_memory asks for page-locked memory of the host, and remote_device is {remote!r}; give "cpu", too'
        )
    return torch.device("cpu") if kind in ("cpu", "nvme") else trains_on


def _swap(config: Config | None) -> Path:
    """The folder for files of pieces."""
    block = None if config is None else config.zero.offload_param
    if block is None or block.nvme_path is None:
        raise ValueError(
            'remote_device "nvme" keeps weights in files, and nothing says where; give config_dict_or_path='
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ...}}}'
        )
    return block.nvme_path
