"""An exponential moving average of the weights, kept in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.access.state import lacks_values
from zeropp.engine.engine import Engine, engine_of
from zeropp.engine.engine_state import EngineState
from zeropp.params.unit import FlatBuffer

__all__ = ["Average", "ema"]


class Average:
    """An average of a model's main weights: of this rank's shards, 4 bytes an element, and nothing more to send.

    Frozen weights and buffers are what they are. A parameter that is unfrozen joins with the next update.

    Attributes:
        decay: share of the old average in the new one.
        updates: how many there have been.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        engine.require_idle("ema()")
        self._engine = engine
        self._pieces: dict[FlatBuffer, Tensor] = {}
        self.decay = decay
        self.updates = 0
        # Weights that were built without values have none to begin with.
        self._begun = not lacks_values(engine)
        self._join()

    def take_pieces(self) -> dict[FlatBuffer, Tensor]:
        """This rank's part of the average, to save or to load: one element for each of a buffer's shard.

        The average has begun then: weights that are loaded later are no longer its first ones.
        """
        self._join()
        self._begun = True
        return self._pieces

    def require_of(self, engine: Engine) -> None:
        """Make sure whose it is.

        Raises:
            ValueError: another model's.
        """
        if engine is not self._engine:
            raise ValueError("the average is another model's; give the one that zeropp.ema(model) made of this one")

    def _join(self) -> None:
        trainable = self._engine.trainable_buffers
        # By buffer: unfreezing makes a new one, whose average begins with the weights of now.
        kept = self._pieces if self._begun else {}
        self._pieces = {b: kept[b] if b in kept else b.shard.clone() for b in trainable}

    @torch.no_grad()
    def update(self) -> None:
        """``average = decay * average + (1 - decay) * weights``; after each step that was taken. Not collective."""
        self._engine.require_idle("update() of an average")
        self._join()
        self._begun = True
        torch._foreach_lerp_(list(self._pieces.values()), [b.shard for b in self._pieces], 1 - self.decay)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights: evaluate it, generate, save them with ``full_state``.

        Collective: every rank enters.

        Raises:
            RuntimeError: a pass is running, ranks are at different calls; or training goes on inside.
        """
        self._engine.require_idle("applying an average")
        # Before anything is swapped: a rank that evaluated averaged weights alone would mix them into everyone's.
        self._engine.agreement.require_same_call("applied() of an average")
        self._join()
        self._swap()
        self._engine.set_state(EngineState.AVERAGED)
        try:
            yield
        finally:
            self._engine.set_state(EngineState.AVERAGED, on=False)
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        engine = self._engine
        # A refresh of the weights before reads the very shards that are overwritten here.
        engine.wait_for_refresh()
        for buffer, piece in self._pieces.items():
            weights = buffer.shard.clone()
            # In place: the optimizer's slices are views of it.
            buffer.shard.copy_(piece)
            piece.copy_(weights)
        # ``for_now``: an average that is only saved is swapped back before any forward, and need not travel.
        engine.weights_changed(self._pieces, for_now=True)

    def state_dict(self) -> dict[str, Any]:
        """The average of this rank's shards; every rank saves its own, beside ``optimizer.state_dict()``."""
        self._engine.require_idle("state_dict() of an average")
        self._join()
        return {**self.counts(), "pieces": [p.clone() for p in self._pieces.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave on this rank.

        Raises:
            ValueError: pieces of other sizes: of another rank, model or partition.
        """
        self._engine.require_idle("load_state_dict() of an average")
        self._join()
        # Sizes are all that a piece tells of its place.
        given, own = ([piece.numel() for piece in pieces] for pieces in (state["pieces"], self._pieces.values()))
        if given != own:
            raise ValueError(
                f"the average has pieces of {given} elements, expected {own}: each rank loads what it has saved, under "
                "the same settings"
            )
        for piece, saved in zip(self._pieces.values(), state["pieces"], strict=True):
            piece.copy_(saved)
        self.take_counts(state)

    def take_counts(self, state: dict[str, Any]) -> None:
        """Take what :meth:`counts` gave; the pieces are what they are to be."""
        self.decay = state["decay"]
        self.updates = state["updates"]
        self._begun = True

    def counts(self) -> dict[str, Any]:
        """The average's numbers besides its pieces."""
        return {"decay": self.decay, "updates": self.updates}


def ema(model: nn.Module, decay: float = 0.999) -> Average:
    """An exponential moving average of a wrapped model's weights, float32, beginning with those it has now.

    Args:
        model: wrapped by a ZeroOptimizer.
        decay: share of the old average in the new one, at least 0 and below 1.

    Raises:
        ValueError: another decay, or a model that zeropp does not manage.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}; expected a number of at least 0 and below 1, such as 0.999")
    return Average(engine_of(model), decay)
