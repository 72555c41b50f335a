"""DeepSpeed's logging names. The logger is zeropp's, so a script that sets its level sets zeropp's level."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.distributed as dist

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("zeropp")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: text to log.
        ranks: ranks that log; None, or a list with -1, for all ranks.
        level: level of the message, as in ``logging``.
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    chosen = [-1] if ranks is None else list(ranks)
    if own in chosen or -1 in chosen:
        logger.log(level, "[rank %d] %s", own, message)
