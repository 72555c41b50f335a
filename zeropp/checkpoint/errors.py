"""What a checkpoint cannot be used for, or not be written for."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or of something else; or it could not be written."""
