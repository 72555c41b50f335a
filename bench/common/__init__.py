"""Tools of several suites: systems that take turns, namespaces, congestion control, flags."""

from __future__ import annotations

__all__ = ["COMPARED", "RATE", "WARM_UP", "peak_rate"]

COMPARED = 4
"""First steps, whose losses and norms systems are held to each other by."""
RATE = 3e-4
"""AdamW's learning rate."""
WARM_UP = 10
"""First steps, in which the rate rises linearly to its peak. With a constant rate two bf16 runs diverge."""
_WIDTH = 384  # up to which RATE is the peak


def peak_rate(width: int) -> float:
    """The highest learning rate for a model of ``width``.

    Adam's first steps move every weight by the rate, so that a sum of ``width`` terms moves by the same for all widths.
    """
    return RATE * min(1.0, _WIDTH / width)
