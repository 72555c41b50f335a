"""What every rank knows of a step before it is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What every rank knows after the reduction.

    Attributes:
        norm: gradient norm over the whole model, all ranks; not finite if any gradient is; None if it is read late.
        used: for each unit, whether each trainable parameter had a gradient on any rank since the last zero_grad.
        late: some rank does not know it yet, so that all go through the step, which the device may leave out.
        checked: a step with a norm that is not finite is skipped.
        sent: gradients that backwards had held, or that came out of order, had to be reduced first.
    """

    norm: float | None
    used: list[list[bool]]
    late: bool = False
    checked: bool = True
    sent: bool = False

    @property
    def skips(self) -> bool:
        """Whether the step is skipped; False if only the device knows, which then leaves the step out."""
        return self.checked and self.norm is not None and not math.isfinite(self.norm)
