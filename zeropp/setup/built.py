"""Models that were built to be partitioned: what their builder knows, and the configuration must agree with."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from zeropp.config import Config
from zeropp.params.piece import piece_of
from zeropp.params.spread import Spread

__all__ = ["built_for", "check_built", "complete"]


def _spreads(parameters: Iterable[nn.Parameter]) -> list[Spread]:
    found: dict[int, Spread] = {}
    for parameter in parameters:
        piece = piece_of(parameter)
        if piece is not None and isinstance(piece.fetcher, Spread):
            found[id(piece.fetcher)] = piece.fetcher
    return list(found.values())


def built_for(parameters: Collection[nn.Parameter]) -> torch.device | None:
    """The device that a model was built to train on, if it is elsewhere and was built to be partitioned."""
    spreads = _spreads(parameters)
    if not spreads or all(parameter.device == spreads[0].trains_on for parameter in parameters):
        return None
    return spreads[0].trains_on


def complete(model: nn.Module) -> None:
    """If a model is wrapped inside the block that builds it, it is built now. Collective if it is.

    Its block goes on with what is built after it.
    """
    for spread in _spreads(model.parameters()):
        if spread.building:
            spread.complete()


def check_built(parameters: Collection[nn.Parameter], config: Config, ranks: tuple[int, ...]) -> None:
    """Make sure that a model is wrapped as it was built. Local.

    Args:
        parameters: all of the model's.
        config: to wrap it with.
        ranks: global ones, of the group to wrap it for.

    Raises:
        ValueError: other ranks, or another setting.
        RuntimeError: its values are lent.
    """
    if any(piece is not None and piece.lent for piece in map(piece_of, parameters)):
        raise RuntimeError("the model was wrapped inside GatheredParameters; leave that block first")
    for spread in _spreads(parameters):
        if spread.world > 1 and spread.carrier.ranks != ranks:
            raise ValueError(
                f"the model was built in zero.Init for ranks {list(spread.carrier.ranks)}, and process_group has ranks "
                f"{list(ranks)}; give both the same group"
            )
        for key, value in spread.asked.items():
            found = getattr(config.zero, key)
            if found != value:
                raise ValueError(
                    f"zero.Init was told of {key} {value}, and the configuration has zero_optimization.{key} {found}; "
                    "give both the same"
                )
