"""``DeepSpeedConfig``: a checked configuration with the batch sizes for the current world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zeropp.config import ConfigError, load_config
from zeropp.config.top import resolve_batch

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """A checked configuration, with batch sizes computed for the current world size.

    Blocks and keys of the configuration can be read as attributes.

    Args:
        config: dict, path of a JSON file, or JSON encoded in base64.
        mpu: object whose ``get_data_parallel_world_size()`` gives the world size; None for torch's world size, or 1
            without a process group.
        mesh_device: no effect.

    Raises:
        ConfigError: the configuration is invalid.
    """

    def __init__(self, config: Mapping[str, Any] | str, mpu: Any = None, mesh_device: Any = None) -> None:
        self.loaded = load_config(config)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._world: int = world if mpu is None else mpu.get_data_parallel_world_size()
        sizes = self.loaded.resolve_batch(self._world)
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes

    def _configure_train_batch_size(self) -> None:
        """Compute the three batch sizes again, after a script has assigned some of them and set others to None.

        Raises:
            AssertionError: the sizes contradict each other, or both batch sizes are None.
        """
        given = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        try:
            sizes = resolve_batch(*given, self._world)
        except ConfigError as error:
            raise AssertionError(str(error)) from error
        assert sizes[0] is not None, "none of train_batch_size and train_micro_batch_size_per_gpu is set; set one"
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes

    def __getattr__(self, name: str) -> Any:
        # Blocks and keys of the configuration, by their names in the JSON. Without the check, reading ``loaded`` before
        # __init__ sets it (as in copy.copy) would call this method without end.
        if name == "loaded":
            raise AttributeError(name)
        return getattr(self.loaded, name)
