"""The error feedback block of quantized gradients."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Lt

from zeropp.config.base import Block, NonNegative, Positive


class LocoConfig(Block):
    """Carries what quantizing a gradient lost over to the next step (LoCo). It acts on quantized
    gradients. Where a step is skipped, or gradients are forgotten before a step, what was carried is
    lost with them, on every rank, and carrying begins anew."""

    # 1 would keep the old error for ever and take nothing new in. The default is DeepSpeed's.
    err_beta: Annotated[NonNegative, Lt(1)] = 0.8
    """Share of the carried error that is kept at each step, below 1; the newest error gets the rest. 0.5
    leaves less than DeepSpeed's 0.8 in Adam's averages, see docs/convergence.md."""

    reset_T: Positive = 1024
    """Optimizer steps after which the carried errors are cleared; skipped ones clear them, too."""
