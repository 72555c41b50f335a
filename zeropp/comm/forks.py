"""Forked children: they have none of their parent's threads, and would wait for them for ever."""

from __future__ import annotations

import os

__all__ = ["ForkedError", "generation", "require_same"]


class ForkedError(RuntimeError):
    """A child was to use what its parent alone can."""


# Not the process's number, which the system may be asked for a thousand times a step, and may use again.
_generation = 0


def generation() -> int:
    """How many forks lie between this process and the one that first imported this."""
    return _generation


def require_same(began: int) -> None:
    """Refuse what needs the threads of the process it began in.

    Args:
        began: :func:`generation` there.

    Raises:
        ForkedError: this is a child of that process.
    """
    if began != _generation:
        raise ForkedError(
            f"process {os.getpid()} was forked from one that zeropp works in, and has none of its threads, which "
            "gather, step, read and write; use the model in the process that wrapped it, and hand copies to this one"
        )


def _count() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count)
