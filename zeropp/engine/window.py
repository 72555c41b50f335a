"""The micro-batches between two optimizer steps, and who says where they end.

[Note: who owns the boundary] With ``gradient_accumulation_steps`` N, one caller runs N backwards and then calls
``step()``; another, as with DeepSpeed, calls ``step()`` after each of them and expects all but every Nth call to do
nothing. The calls tell them apart: a micro-batch that no ``step()`` follows is the mark of a caller that accumulates by
itself. Such a caller owns the boundary: every ``step()`` is taken, also in a window that the end of the data cuts
short. A training engine asks by :meth:`Window.call`: there it is calls of ``step()`` that are counted, whatever was
computed between them, unless the caller says where a window ends. All of it is decided by calls that every rank makes
alike, so ranks agree without an exchange.
"""

from __future__ import annotations

__all__ = ["Window"]


class Window:
    """Counts micro-batches: all backwards since the last forward of the root that recorded a graph are one.

    So are those since a ``step()`` that did nothing: whoever calls it after each micro-batch has said where one ends.

    Args:
        steps: micro-batches in a window, gradient_accumulation_steps.
        managed: False leaves the boundary to the caller from the start.

    Attributes:
        steps: as given.
        count: micro-batches of which a backward has run since the last step.
        together: micro-batches that the running or next forward and backward take together.
        root_runs: whether the model has been called as a whole, with a graph; for good, once it has.
        divided: True if ``optimizer.backward()`` has divided a loss of this window by ``steps``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self._managed = managed
        self.count = 0
        self.together = 1
        # The caller has the boundary for good.
        self._owned = steps == 1 or not managed
        # Some micro-batch of this window had no step() after it.
        self._skipped = False
        # step() was called since the last backward, and did nothing.
        self._asked = False
        # The same, unless a backward has failed since: whether zero_grad() does nothing, either.
        self._keeps = False
        self._ever_asked = self._explained = self._long_said = False
        # A training engine says where windows end: by its calls of step(), of this window, or as its caller has said.
        self._by_calls = False
        self._calls = 0
        self._forced: bool | None = None
        self._fresh = True  # the next backward begins a micro-batch
        self.root_runs = self.divided = False

    @property
    def owned(self) -> bool:
        """Whether every ``step()`` is taken, now and later."""
        return self._owned

    @property
    def unfinished(self) -> bool:
        """Whether a ``step()`` would do nothing now."""
        if self._by_calls:
            # Between a step() and the backward that follows, the sums are not those that the next one steps with.
            return self._asked or not self.at_boundary
        return not self._owned and not self._skipped and self.count < self.steps

    @property
    def at_boundary(self) -> bool:
        """Whether a training engine's next ``step()`` ends the window."""
        if self._forced is not None:
            return self._forced
        return not self._managed or self._calls + 1 >= self.steps

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay, since the ``step()`` before ``zero_grad()`` did nothing."""
        return self._keeps

    @property
    def closing(self) -> bool:
        """Whether the running or next backward belongs to the last micro-batch, as far as one can know."""
        if self._by_calls and (self._managed or self._forced is not None):
            return self.at_boundary
        # Also of a caller who has the boundary, and steps whenever it wants: windows are mostly as long as they say.
        # A second backward of one micro-batch, for another loss of the same forward, does not count once more.
        return self.count + self._fresh * self.together >= self.steps

    def resize(self, steps: int) -> None:
        """Let windows have so many micro-batches from here on; as decided on every rank alike.

        Raises:
            RuntimeError: in the middle of one.
        """
        # Gradients that have come were divided by the older number.
        if self.count:
            raise RuntimeError(
                f"{self.count} of {self.steps} micro-batches have come since the last step; change their number after "
                "a step, or discard their gradients with zero_grad(now=True)"
            )
        self.steps = steps
        self._owned = steps == 1 or not self._managed
        self._calls = 0

    def note_forward(self, path: str) -> None:
        """A forward begins at the module of that name and records a graph; inside another it does not count.

        Forwards of parts of the model, for an auxiliary loss perhaps, begin no micro-batch, unless the model is never
        called as a whole.
        """
        # Once the root has run, forwards of parts are never taken for micro-batches again.
        self.root_runs |= path == ""
        self._fresh |= path == "" or not self.root_runs

    def note_backward(self) -> None:
        """A backward is over."""
        if self._fresh:
            # The micro-batch before passed without a step(). A caller who has never asked inside a window accumulates
            # by itself; one who has, left one out. See [Note: who owns the boundary].
            if self.count and not self._asked:
                self._skipped = True
                self._owned |= not self._ever_asked
            self.count += self.together
        # A zero_grad() from here on does not belong to the step() that did nothing: it means the gradients.
        self._fresh = self._asked = self._keeps = False

    def note_failure(self) -> None:
        """A backward has failed: what it leaves, a ``zero_grad()`` is to discard."""
        self._keeps = False

    def ask(self, *, now: bool = False) -> bool:
        """``step()`` was called: whether it is taken. ``now`` takes what is there, if anything is."""
        if now:
            # A caller who owns the boundary steps as in torch, whatever there is.
            return self._owned or self.count > 0
        if self.unfinished:
            self._asked = self._ever_asked = self._keeps = True
            # Also where parts of the model are run from here on.
            self._fresh = True
            return False
        return True

    def call(self) -> bool:
        """A training engine's ``step()`` was called: whether it ends the window. One that does not is counted."""
        self._by_calls = True
        if self.at_boundary:
            return True
        self._calls += 1
        self._asked = self._ever_asked = self._keeps = True
        return False

    def force(self, is_boundary: bool) -> None:
        """From here on a training engine's ``step()`` ends the window, or does not, as its caller says."""
        self._forced = is_boundary
        self._by_calls = True

    def warning(self) -> str | None:
        """A warning for the caller of ``step()``, if it did nothing, came too late, or came too early."""
        if self._asked and not self._explained:
            self._explained = True
            return (
                f"step() did nothing after {self.count} of gradient_accumulation_steps {self.steps} micro-batches, and "
                f"so will zero_grad(); one call in {self.steps} steps. Guard schedulers with "
                "optimizer.step_was_taken; step(now=True) steps with what is there; "
                '{"managed_gradient_accumulation": false} takes every step()'
            )
        if self._skipped and not self._owned and self.count < self.steps:
            return (
                f"step() is taken after {self.count} of gradient_accumulation_steps {self.steps} micro-batches, since "
                "one of them passed without a step(). Discard gradients with zero_grad(), or own the boundary, "
                '{"managed_gradient_accumulation": false}'
            )
        if self.divided and self.root_runs and self.count > self.steps > 1 and not self._long_said:
            self._long_said = True
            return (
                f"step() is taken after {self.count} micro-batches, and gradient_accumulation_steps is {self.steps}. "
                f"optimizer.backward() divides each loss by {self.steps}, which makes the gradient "
                f"{self.count / self.steps:g} times the mean; set gradient_accumulation_steps to {self.count}"
            )
        return None

    def restart(self) -> None:
        """A step was taken or skipped, or gradients were discarded."""
        self.count = self._calls = 0
        self._skipped = self._asked = self._keeps = self.divided = False
        self._fresh = True
