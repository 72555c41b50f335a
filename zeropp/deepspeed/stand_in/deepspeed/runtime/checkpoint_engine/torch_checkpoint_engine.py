"""``TorchCheckpointEngine``, for scripts that patch it. zeropp does not use it, so a patch has no effect on zeropp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["TorchCheckpointEngine"]


class TorchCheckpointEngine:
    """Writes and reads files by ``torch.save`` and ``torch.load``. Reading never runs code from the file.

    Args:
        config_params: no effect.
    """

    def __init__(self, config_params: object = None) -> None:
        self.name = "TorchCheckpointEngine"

    def create(self, info: object) -> None:
        """Do nothing; DeepSpeed calls this method before a checkpoint."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder and its missing parents."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write ``state_dict`` to a file."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the tensors and plain values in a file, loaded with ``weights_only=True``."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, tag: object) -> bool:
        """Return True; DeepSpeed calls this method after a checkpoint."""
        return True
