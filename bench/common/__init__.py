"""Code that several suites share: systems that take turns, network namespaces, congestion control, flags."""

from __future__ import annotations

__all__ = ["COMPARED", "RATE", "WARM_UP", "peak_rate"]

COMPARED = 4
"""Number of first steps whose losses and gradient norms must agree between systems."""
RATE = 3e-4
"""Learning rate of AdamW."""
WARM_UP = 10
"""Number of first steps in which the learning rate rises linearly. With a constant rate, two bf16 runs diverge."""
_WIDTH = 384  # largest width that is trained with RATE as the peak rate


def peak_rate(width: int) -> float:
    """Return the peak learning rate for a model of ``width``: ``RATE * min(1, 384 / width)``.

    Adam's first steps change every weight by the rate, so a sum over ``width`` terms changes by ``width * rate``. The
    bound keeps that change equal for all larger widths.
    """
    return RATE * min(1.0, _WIDTH / width)
