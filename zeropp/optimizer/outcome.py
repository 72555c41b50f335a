"""Results of the steps that were asked for: taken, skipped, or not known yet; see [Note: sums read late]."""

from __future__ import annotations

from typing import Any

from zeropp.optimizer.checks import weakly
from zeropp.optimizer.step_sync import Boundary, Verdict
from zeropp.params.loss_scale import LossScale

__all__ = ["Outcome", "told"]


class Outcome:
    """The end of the last step, and counts of all.

    Args:
        boundary: has what the sum of a step says that no host has waited for.
        loss_scale: moved by what becomes of steps.

    Attributes:
        grad_norm: at the last step.
        skipped_steps: since the beginning.
        step_was_skipped: the last one.
        step_was_taken: since the last backward.
    """

    def __init__(self, boundary: Boundary, loss_scale: LossScale) -> None:
        self._boundary = boundary
        self._loss_scale = loss_scale
        # The engine has the scale, and must not keep its wrapper alive.
        loss_scale.wait_for_last = weakly(self.wait)
        self._unread = False
        # Text of an error that the next step raises, too. No exception: it would hold what holds this.
        self._error: str | None = None
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_was_skipped = self.step_was_taken = False

    def decided(self, verdict: Verdict) -> None:
        """A step is over, or is going to be."""
        self._unread = verdict.norm is None
        self.step_was_skipped, self.step_was_taken = verdict.skips, False
        self.skipped_steps += self.step_was_skipped
        if not self._unread:
            self.grad_norm = verdict.norm
            # Last, since it may raise.
            self._loss_scale.update(overflow=self.step_was_skipped)

    def load(self, skipped_steps: int, loss_scale: dict[str, Any] | None = None) -> None:
        """Go on from a saved count; what is wrong with the step before is of no interest any more."""
        # On every rank, whether it has asked or not: one alone would raise at the next step, or read a sum.
        self._boundary.forget_unread()
        self._error, self._unread = None, False
        self.step_was_skipped = self.step_was_taken = False
        self.skipped_steps = skipped_steps
        if loss_scale is not None:
            self._loss_scale.load_state_dict(loss_scale)

    def count(self) -> int:
        """``skipped_steps``, to be saved: also after a step at which ranks were out of step, which is none of them.

        Raises:
            RuntimeError: the ranks have lost each other. Some may have stepped and others not.
        """
        try:
            self.wait()
        except RuntimeError:
            # Settings that differ the next step tells of.
            if self._boundary.engine.agreement.lost is not None:
                raise
        return self.skipped_steps

    def pass_over(self) -> None:
        """A step was asked for inside a window, and does nothing."""
        self.wait()
        self.step_was_skipped = self.step_was_taken = False

    def wait(self, *, stepping: bool = False) -> None:
        """Wait for what the device has decided by itself.

        Raises:
            RuntimeError: ranks were out of step; no weight was changed. Until the next step, at which every rank raises
                it: one that has asked before would otherwise go on there, and wait for the others.
        """
        found = None
        if self._error is None and self._unread:
            try:
                found = self._boundary.read_unread()
            except RuntimeError as caught:
                self._error, self.step_was_taken = str(caught), False
        self._unread = False
        if (error := self._error) is not None:
            self._error = None if stepping else error
            raise RuntimeError(error)
        if found is not None:
            taken = self.step_was_taken
            self.decided(found)
            # A backward since then has cleared it.
            self.step_was_taken = taken and not found.skips


def told(name: str) -> Any:
    """An attribute of the optimizer that asks its outcome."""

    def ask(optimizer: Any) -> Any:
        optimizer.outcome.wait()
        return getattr(optimizer.outcome, name)

    return property(ask)
