"""Errors that quantized gradients carry over: cleared every so many steps, saved and restored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from zeropp._compat import loss_scale
from zeropp.engine.engine import Engine
from zeropp.wire.codecs import Feedback

__all__ = ["CarriedErrors"]


class CarriedErrors:
    """The errors of all units of one engine.

    An error goes with the next gradient, and a new one takes its place in the same memory. Where a step is skipped, or
    gradients are forgotten before a step, the old one is lost, and the new one is of a gradient that may be huge: one
    rank has NaN, another perhaps 1e8. So all are cleared then. To keep the old ones would take as much memory again.

    Args:
        engine: whose gradients carry them.
        reset: steps after which all of them are cleared, at once.
    """

    def __init__(self, engine: Engine, reset: int) -> None:
        self._engine = engine
        self._reset = reset
        # Since they were cleared.
        self._steps = 0
        # Scale of the losses that the errors came from; None if nobody scaled them.
        self._scale: Tensor | None = None

    def follow(self, scaler: torch.amp.GradScaler | None) -> None:
        """Bring the errors to the scale that the next losses have; exact where that changes by powers of two."""
        if scaler is None:
            # They are of losses that somebody scaled, and by how much the next ones are is not known.
            if self._scale is not None:
                self._scale = None
                self.clear()
            return
        scale, before = loss_scale(scaler, self._engine.device), self._scale
        # A copy: update() changes the scaler's own tensor in place.
        self._scale = scale.clone()
        found = [feedback.scales for feedback in self._named().values()]
        if before is not None and found:
            # Errors are codes with scales, so the scales alone follow; on the device, and the host does not wait.
            torch._foreach_mul_(found, (scale / before).to(torch.bfloat16))

    def _named(self) -> dict[str, Feedback]:
        found: dict[str, Feedback] = {}
        seen: Counter[str] = Counter()
        for buffer in self._engine.trainable_buffers:
            name = f"{buffer.unit}/{buffer.compute_dtype}"
            for hop in buffer.gradient.paths.straight.hops if buffer.gradient is not None else ():
                # Named with the codec: errors of another one are not what this one would lose.
                if hop.feedback is not None:
                    found[f"{name}/{seen[name]}/{hop.spec.outer} {hop.codec.name}"] = hop.feedback
            seen[name] += 1
        return found

    def count_step(self) -> None:
        """An optimizer step was taken; skipped ones do not count."""
        self._steps += 1
        if self._steps >= self._reset:
            self.clear()

    def clear(self) -> None:
        """Begin anew with the next gradients."""
        self._steps = 0
        for feedback in self._named().values():
            # A flag, and no zeros: what is fresh is written, and not read.
            feedback.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Steps since they were cleared, and the errors of this rank."""
        errors = {name: each.saved() for name, each in self._named().items()}
        return {"steps": self._steps, "errors": errors, "scale": None if self._scale is None else float(self._scale)}

    def fits(self, saved: dict[str, Any] | None) -> bool:
        """Tell whether saved errors are of the same units, hops, codecs and sizes; none fit if nothing is carried."""
        errors: dict[str, Tensor] = saved["errors"] if saved is not None else {}
        here = {name: feedback.state.numel() for name, feedback in self._named().items()}
        return {name: each.numel() for name, each in errors.items()} == here

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Take back saved errors that fit."""
        self.clear()
        if saved is None:
            return
        self._steps, scale = saved["steps"], saved.get("scale")
        self._scale = None if scale is None else torch.tensor(scale, device=self._engine.device)
        for name, feedback in self._named().items():
            feedback.state.copy_(saved["errors"][name])
            feedback.fresh = False
