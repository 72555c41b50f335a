"""torch's files. zeropp reads DeepSpeed's without it; scripts that patch it find it, and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["TorchCheckpointEngine"]


class TorchCheckpointEngine:
    """``torch.save`` and ``torch.load`` of what is no code.

    Args:
        config_params: without effect.
    """

    def __init__(self, config_params: object = None) -> None:
        self.name = "TorchCheckpointEngine"

    def create(self, info: object) -> None:
        """Nothing has to begin."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and those above it."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What a file holds: tensors and plain values, for nothing is run that a pickle names."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, tag: object) -> bool:
        """Nothing is left to do."""
        return True
