"""The configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zeropp.config import ConfigError, load_config

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
        sizes = self.loaded.resolve_batch(world if mpu is None else mpu.get_data_parallel_world_size())
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes

    def __getattr__(self, name: str) -> Any:
        # Blocks and keys by the names that they have in the file.
        if name == "loaded":
            raise AttributeError(name)
        return getattr(self.loaded, name)
