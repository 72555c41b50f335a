"""Logs: the logger is zeropp's, so that trainers that set its level set that of what runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.distributed as dist

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("zeropp")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; -1 among them, or None, for all."""
    own = dist.get_rank() if dist.is_initialized() else 0
    chosen = [-1] if ranks is None else list(ranks)
    if own in chosen or -1 in chosen:
        logger.log(level, "[rank %d] %s", own, message)
