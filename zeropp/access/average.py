"""A sharded exponential moving average of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.access.state import lacks_values
from zeropp.engine.engine import Engine, engine_of
from zeropp.engine.engine_state import EngineState
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["Average", "ema"]


class Average:
    """An exponential moving average of a model's main weights. Created by :func:`ema`.

    Each rank averages its own shards of the main weights, which takes one element in the main dtype per shard element.
    Updates need no communication. Frozen weights and module buffers are not averaged. A parameter that is unfrozen is
    included from the next update on.

    Attributes:
        decay: weight of the old average in an update.
        updates: number of updates so far.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        engine.require_idle("ema()")
        self._engine = engine
        self._pieces: dict[FlatBuffer, Tensor] = {}
        self.decay = decay
        self.updates = 0
        # Weights that were built on the meta device have no values yet. Then the average starts with the loaded
        # weights.
        self._begun = not lacks_values(engine)
        self._join()

    def take_pieces(self) -> dict[FlatBuffer, Tensor]:
        """Return this rank's shards of the average, to save them or to load values into them.

        From this call on, weights that are loaded into the model no longer restart the average.

        Returns:
            For each trainable flat buffer, a tensor of the shape of its main shard. Not a copy.
        """
        self._join()
        self._begun = True
        return self._pieces

    def check_engine(self, engine: Engine) -> None:
        """Check that this average belongs to the model of an engine.

        Raises:
            ValueError: the average belongs to another model.
        """
        if engine is not self._engine:
            raise ValueError("the average is another model's; give the one that zeropp.ema(model) made of this one")

    def _join(self) -> None:
        trainable = self._engine.trainable_buffers
        # Unfreezing parameters creates new flat buffers. Their average starts with their current weights.
        kept = self._pieces if self._begun else {}
        self._pieces = {b: kept[b] if b in kept else b.shard.clone() for b in trainable}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average: ``average = decay * average + (1 - decay) * weights``.

        Call it after each optimizer step that was taken. Not collective.

        Raises:
            RuntimeError: a pass is running.
        """
        self._engine.require_idle("update() of an average")
        self._join()
        self._begun = True
        torch._foreach_lerp_(list(self._pieces.values()), [b.shard for b in self._pieces], 1 - self.decay)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside this context, to evaluate, generate or save with ``full_state``.

        Collective: all ranks enter and leave. Training inside the context is an error.

        Raises:
            RuntimeError: a pass is running, or other ranks make another call.
        """
        self._engine.require_idle("applying an average")
        # Compare the calls before swapping. If only some ranks applied the average, gathers would mix averaged shards
        # with the shards of the weights.
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
        # A refresh in flight still reads the shards that this method overwrites.
        engine.wait_for_refresh()
        for buffer, piece in self._pieces.items():
            weights = buffer.shard.clone()
            # Copy in place, because the optimizer's tensors are views of the shard.
            buffer.shard.copy_(piece)
            piece.copy_(weights)
        # The refresh waits for the next forward. If the average is only saved, the weights are swapped back before that
        # forward, and no averaged weights are sent.
        engine.weights_changed(self._pieces, delay_refresh=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the average of this rank's shards. Each rank must save its own, as with ``optimizer.state_dict()``.

        Returns:
            A dict with "decay", "updates" and "pieces", a list with a copy of each shard of the average.

        Raises:
            RuntimeError: a pass is running.
        """
        self._engine.require_idle("state_dict() of an average")
        self._join()
        return {**self.counts(), "pieces": [p.clone() for p in self._pieces.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a dict that :meth:`state_dict` returned on this rank.

        Args:
            state: the dict.

        Raises:
            ValueError: the shards have other sizes, because they are from another rank, model or sharding.
            RuntimeError: a pass is running.
        """
        self._engine.require_idle("load_state_dict() of an average")
        self._join()
        # The saved shards have no names, so their sizes are the only check.
        given, own = ([piece.numel() for piece in pieces] for pieces in (state["pieces"], self._pieces.values()))
        if given != own:
            raise ValueError(
                f"the average has pieces of {given} elements, expected {own}: each rank must load the state that it "
                "saved itself, with the same settings"
            )
        for piece, saved in zip(self._pieces.values(), state["pieces"], strict=True):
            piece.copy_(saved)
        self.take_counts(state)

    def take_counts(self, state: dict[str, Any]) -> None:
        """Load the numbers that :meth:`counts` returned. The caller has loaded the shards of the average already."""
        self.decay = state["decay"]
        self.updates = state["updates"]
        self._begun = True

    def counts(self) -> dict[str, Any]:
        """Return the decay and the number of updates, the parts of the state that are not tensors."""
        return {"decay": self.decay, "updates": self.updates}


def ema(model: nn.Module, decay: float = 0.999) -> Average:
    """Create an exponential moving average of a wrapped model's main weights. It starts with the current weights.

    Args:
        model: a model wrapped by a ZeroOptimizer.
        decay: weight of the old average in an update, at least 0 and below 1.

    Returns:
        The average, sharded like the main weights and in their dtype. Call its ``update()`` after each step.

    Raises:
        ValueError: decay is out of range, or zeropp does not manage the model.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}; expected a number of at least 0 and below 1, such as 0.999")
    return Average(engine_of(model), decay)
