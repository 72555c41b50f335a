"""The error of a checkpoint that cannot be used or written."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or of something else; or it could not be written."""
