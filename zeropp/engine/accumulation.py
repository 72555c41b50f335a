"""Gradient accumulation: which backward is the last before a step, and which calls of ``step()`` act.

[Note: when a step acts] With ``managed_gradient_accumulation`` true, the default, ``step()`` acts when at least
``gradient_accumulation_steps`` micro-batches have been taken since the last step, or with ``now=True``; otherwise it
does nothing. With false every ``step()`` acts. A micro-batch is all backwards since the last training forward of the
model. No earlier call changes this rule, and every rank makes the same calls, so ranks agree without an exchange.
"""

from __future__ import annotations

__all__ = ["GradAccumulation"]


class GradAccumulation:
    """Counts the micro-batches since the last step; see [Note: when a step acts].

    Args:
        steps: micro-batches of a window, gradient_accumulation_steps.
        managed: False lets every ``step()`` act.

    Attributes:
        steps: as given.
        count: micro-batches of which a backward has run since the last step.
        together: micro-batches that the running or next forward and backward take together.
        divided: True if ``optimizer.backward()`` has divided a loss of this window by ``steps``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.count = 0
        self.together = 1
        self.divided = False
        # The next backward begins a micro-batch.
        self._fresh = True
        # The model itself was called since the last step, and not only parts of it.
        self._model_ran = False
        # step() did nothing, and no backward has run or failed since.
        self._ignored = False
        self._ignored_before = self._long_before = False  # warnings that were given

    @property
    def every_step_acts(self) -> bool:
        """True if ``step()`` acts whatever has been taken."""
        return self.steps == 1 or not self.managed

    @property
    def unfinished(self) -> bool:
        """True if a ``step()`` would do nothing now."""
        return not self.every_step_acts and self.count < self.steps

    @property
    def keeps_gradients(self) -> bool:
        """True if ``zero_grad()`` does nothing, since the ``step()`` before it did nothing."""
        return self._ignored

    @property
    def closing(self) -> bool:
        """True if the running or next backward belongs to the last micro-batch before a step.

        It is an estimate where every ``step()`` acts, or with ``now=True``. A wrong one costs bytes and changes no
        result.
        """
        # A second backward of one micro-batch, for another loss of the same forward, does not count once more.
        return self.count + self._fresh * self.together >= self.steps

    def note_forward(self, path: str) -> None:
        """A forward begins at the module of that name and records a graph; inside another it does not count."""
        # A forward of a part, for an auxiliary loss perhaps, belongs to the micro-batch of the model.
        if path == "":
            self._fresh = self._model_ran = True

    def note_backward(self) -> None:
        """A backward is over."""
        if self._fresh:
            self.count += self.together
        # A zero_grad() from here on does not belong to the step() that did nothing: it means the gradients.
        self._fresh = self._ignored = False

    def note_failure(self) -> None:
        """A backward has failed: ``zero_grad()`` is to discard the gradients that it leaves."""
        self._ignored = False

    def note_step_call(self, *, now: bool = False) -> bool:
        """Tell whether a call of ``step()`` acts. With ``now`` it does if anything has been taken."""
        if now:
            return self.every_step_acts or self.count > 0
        if self.unfinished:
            self.ignore_step()
            return False
        return True

    def ignore_step(self) -> None:
        """A ``step()`` has done nothing, and so is the ``zero_grad()`` after it to do."""
        self._ignored = True

    def warning(self) -> str | None:
        """A warning for the caller of ``step()``, the first time that it did nothing or came too late; else None."""
        if self._ignored and not self._ignored_before:
            self._ignored_before = True
            parts = ""
            if not self._model_ran:
                parts = (
                    " Micro-batches begin with forwards of the wrapped model, which has not been called since the last "
                    "step, only modules inside it."
                )
            return (
                f"step() did nothing after {self.count} of gradient_accumulation_steps {self.steps} micro-batches, and "
                f"so will the zero_grad() after it; every later step() before micro-batch {self.steps} does the same "
                f"without a warning.{parts} step(now=True) steps with what is there, as at the end of the data; "
                '{"managed_gradient_accumulation": false} lets every step() act. optimizer.step_was_taken tells a '
                "scheduler whether to go on"
            )
        if self.divided and self.count > self.steps > 1 and not self._long_before:
            self._long_before = True
            return (
                f"step() acts after {self.count} micro-batches, and gradient_accumulation_steps is {self.steps}. "
                f"optimizer.backward() divides each loss by {self.steps}, which makes the gradient "
                f"{self.count / self.steps:g} times the mean; set gradient_accumulation_steps to {self.count}, or call "
                "step(now=True) where a window ends early"
            )
        return None

    def restart(self) -> None:
        """A step was taken or skipped, or gradients were discarded."""
        self.count = 0
        self._fresh = True
        self._model_ran = self._ignored = self.divided = False
