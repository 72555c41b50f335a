"""The configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zeropp.config import ConfigError, load_config
from zeropp.config.top import resolve_batch

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """A configuration, and its sizes of batches for the ranks there are.

    Args:
        config: a dict, the path of a JSON file, or base64 of JSON.
        mpu: asked for ``get_data_parallel_world_size()``.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, config: Mapping[str, Any] | str, mpu: Any = None, mesh_device: Any = None) -> None:
        self.loaded = load_config(config)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._world: int = world if mpu is None else mpu.get_data_parallel_world_size()
        sizes = self.loaded.resolve_batch(self._world)
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes

    def _configure_train_batch_size(self) -> None:
        """Complete the three sizes again, of which None is to be found; for those who have assigned some.

        Raises:
            AssertionError: they do not agree, or there is no size.
        """
        given = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        try:
            sizes = resolve_batch(*given, self._world)
        except ConfigError as error:
            raise AssertionError(str(error)) from error
        assert sizes[0] is not None, "none of train_batch_size and train_micro_batch_size_per_gpu is set; set one"
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes

    def __getattr__(self, name: str) -> Any:
        # Blocks and keys by the names that they have in the file.
        if name == "loaded":
            raise AttributeError(name)
        return getattr(self.loaded, name)
