"""Constructor arguments of the strategies: names, defaults and order of Lightning's DeepSpeedStrategy."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.constants import default_pg_timeout

from zeropp.integrations._lightning.configuration import choose_config

# The base class is only known at run time: two packages, lightning and pytorch_lightning, have classes of these names.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

__all__ = ["FabricArguments", "TrainerArguments"]

Config = Mapping[str, Any] | str | os.PathLike[str] | None


# All arguments are listed, because LightningCLI, editors and readers look at the signature.
class TrainerArguments(_Base):
    """Base class that takes the arguments of a Trainer's strategy and makes the configuration from them.

    Attributes:
        config: configuration from the arguments, without the Trainer's settings (precision, accumulation, clipping).
            It may be changed before a model is set up.
    """

    def __init__(
        self,
        accelerator: Any = None,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1048576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: str | int = "auto",
        config: Config = None,
        logging_level: int = logging.WARNING,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Store the arguments; docs/lightning.md explains their effect."""
        # The first statement, because locals() must contain the arguments only.
        self._given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            precision_plugin=precision_plugin, process_group_backend=process_group_backend, timeout=timeout,
        )  # fmt: skip
        self.config = choose_config(self._given)


# Arguments that Lightning's base class for strategies of Fabric takes.
_HANDED_ON = (
    "accelerator", "parallel_devices", "cluster_environment", "precision", "process_group_backend", "timeout",
)  # fmt: skip
_ARGUMENTS = inspect.signature(TrainerArguments.__init__)
# The two arguments in which Lightning's strategies for Trainer and Fabric differ.
_CHANGED: dict[str, dict[str, Any]] = {
    "logging_batch_size_per_gpu": {"default": None, "annotation": "int | None"},
    "precision_plugin": {"name": "precision"},
}
_FABRIC_ARGUMENTS = _ARGUMENTS.replace(
    parameters=[each.replace(**_CHANGED.get(name, {})) for name, each in _ARGUMENTS.parameters.items()]
)


class FabricArguments(_Base):
    """Base class that takes the arguments of Fabric's strategy, all but two as in :class:`TrainerArguments`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Store the arguments; docs/lightning.md explains their effect."""
        bound = _FABRIC_ARGUMENTS.bind(self, *args, **kwargs)
        bound.apply_defaults()
        self._given = {name: value for name, value in bound.arguments.items() if name != "self"}
        super().__init__(**{name: self._given[name] for name in _HANDED_ON})
        self.config = choose_config(self._given)

    # Editors and inspect.signature() then show the arguments instead of ``*args, **kwargs``.
    __init__.__signature__ = _FABRIC_ARGUMENTS  # type: ignore[attr-defined]
