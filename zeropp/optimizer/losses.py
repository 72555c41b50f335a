"""Losses of a ``ZeroOptimizer``: a micro-batch's share, the scale of float16, and backward."""

from __future__ import annotations

from torch import Tensor

from zeropp._compat import uncompiled
from zeropp.access.refusals import explain_freed
from zeropp.engine.engine import Engine
from zeropp.engine.preconditions import refuse_compiled_autograd
from zeropp.optimizer.update import Outcome

__all__ = ["TakesLosses"]


class TakesLosses:
    """A part of ``ZeroOptimizer``."""

    engine: Engine
    outcome: Outcome
    step_was_skipped: bool

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss gets in float16; 1 otherwise. See [Note: loss scale]."""
        # The last step may move it, and may not be known yet: on a card its sum is read late.
        self.outcome.wait()
        return self.engine.reductions.loss_scale.value

    @property
    def overflow(self) -> bool:
        """``step_was_skipped``, by the name that DeepSpeed's users and Accelerate ask for."""
        return self.step_was_skipped

    @uncompiled
    def scale(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor:
        """A micro-batch's loss as :meth:`backward` takes it: divided, and times :attr:`loss_scale`.

        Args:
            loss: scalar, and all of it: what is added afterwards is neither divided nor scaled.
            scale_wrt_gas: divide it by the configured gradient_accumulation_steps.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}; expected the scalar tensor that the model's output gave")
        # Also in an unfinished window that step(now=True) ends: it is divided as if it were whole.
        steps = self.engine.window.steps
        return self.engine.reductions.loss_scale.apply(loss / steps if scale_wrt_gas and steps > 1 else loss)

    @uncompiled
    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """Backward of ``loss`` divided by the configured gradient_accumulation_steps.

        Args:
            loss: scalar.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: False for a loss that has been divided already.
        """
        refuse_compiled_autograd()
        # Outside of the try: an error here is no error of the backward.
        scaled = self.scale(loss, scale_wrt_gas=scale_wrt_gas)
        self.engine.window.divided |= scale_wrt_gas
        try:
            scaled.backward(retain_graph=retain_graph)
        except Exception as error:
            reason = ""
            # Autograd's word for memory that was freed with its unit: somebody has kept a view of a weight.
            if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
                reason = explain_freed(self.engine, str(error))
            # Now, so that other ranks are told of the exception.
            self.engine.end_failed_pass()
            if reason:
                raise RuntimeError(reason) from error
            raise
