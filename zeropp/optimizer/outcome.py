"""What has become of the steps that were asked for; see [Note: sums read late]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeropp.engine.boundary import Verdict

__all__ = ["Outcome", "told"]


class Outcome:
    """The end of the last step, and counts of all.

    Args:
        read: gives what the sum of a step says that no host has waited for, or None.

    Attributes:
        grad_norm: at the last step.
        skipped_steps: since the beginning.
        step_was_skipped: the last one.
        step_was_taken: since the last backward.
    """

    def __init__(self, read: Callable[[], Verdict | None]) -> None:
        self._read = read
        self._unread = False
        self._error: RuntimeError | None = None  # which the next step raises, too
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_was_skipped = self.step_was_taken = False

    def decided(self, verdict: Verdict) -> None:
        """A step is over, or is going to be."""
        self._unread = verdict.norm is None
        self.step_was_skipped, self.step_was_taken = not verdict.finite, False
        self.skipped_steps += self.step_was_skipped
        if not self._unread:
            self.grad_norm = verdict.norm

    def load(self, skipped_steps: int) -> None:
        """Go on from a saved count."""
        self.wait()
        self.skipped_steps = skipped_steps

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
                found = self._read()
            except RuntimeError as caught:
                self._error, self.step_was_taken = caught, False
        self._unread = False
        if (error := self._error) is not None:
            self._error = None if stepping else error
            raise error
        if found is not None:
            taken = self.step_was_taken
            self.decided(found)
            # A backward since then has cleared it.
            self.step_was_taken = taken and found.finite


def told(name: str) -> Any:
    """An attribute of the optimizer that asks its outcome."""

    def ask(optimizer: Any) -> Any:
        optimizer.outcome.wait()
        return getattr(optimizer.outcome, name)

    return property(ask)
