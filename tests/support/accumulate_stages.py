"""The models of :mod:`tests.support.small_models` as lists of stages, trained by ``zeropp.accumulate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeropp
from tests.support.parity import Recipe, Trained, build, make_optimizer, micro_batch
from tests.support.small_models import MODELS

__all__ = ["STAGES", "pairs", "rank", "scored", "train_layered"]

Stages = list[Callable[[Any], Any]]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def scored(name: str, output: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of a model of ``MODELS`` for an output that is already computed."""
    return MODELS[name].loss(lambda *inputs: output, batch)


def _stem(model: Any, ids: Tensor) -> Tensor:
    x: Tensor = model.embedding(ids)
    return x + model.position(torch.arange(ids.shape[1])) if hasattr(model, "position") else x


def gpt(model: Any) -> Stages:
    """Return the stages of a GPT: embeddings, blocks, norm, and the head module or the tied embedding."""
    blocks: Stages = list(model.blocks)
    if model.recompute == "block":
        blocks = [partial(checkpoint, block, use_reentrant=model.reentrant) for block in model.blocks]
    head = model.head if model.tie == "parameter" else (lambda x: nn.functional.linear(x, model.embedding.weight))
    return [partial(_stem, model), *blocks, model.norm, head]


def repeated(model: Any) -> Stages:
    """Return stages that call two blocks six times in mixed order."""
    halves = [lambda x, index=index: model.blocks[index](x) / 2 for index in (0, 1, 0, 0, 1, 0)]
    return [model.embedding, *halves, model.head]


def low_rank(model: Any) -> Stages:
    layers = [lambda x, layer=layer: x + torch.tanh(layer(x)) for layer in model.layers]
    return [model.embedding, *layers, model.norm, model.head]


def raw_root(model: Any) -> Stages:
    """Return stages that use the root's own parameters in plain functions."""
    return [
        lambda ids: model.table[ids] + model.shift + model.offset.to(model.shift.dtype),
        *model.blocks,
        lambda x: (x @ model.table.t()) / model.temperature,
    ]


def structured(model: Any) -> Stages:
    """Return stages whose outputs contain their inputs, in dicts, tuples, dataclasses and objects unknown to pytree."""

    def block(index: int, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, index: model.blocks[index](state["x"](state))}

    def first(state: dict[Any, Any]) -> Any:
        return state["embedded"]

    ways = [first, lambda s: s[0]["out"][0], lambda s: s[1][1][0], lambda s: s[2].state]

    def head(state: dict[Any, Any]) -> dict[str, Tensor]:
        logits = model.head(state[3].deep.out)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), state["ids"].flatten().roll(1))
        return {"loss": loss + 0.1 * (state[0]["side"] + state[1][1][1] + state[3].side[0])}

    def stage(index: int, state: dict[Any, Any]) -> dict[Any, Any]:
        return block(index, {**state, "x": ways[index]})

    stem = lambda ids: {"ids": ids, "embedded": model.embedding(ids)}  # noqa: E731 (as a user would write it)
    return [stem, *(partial(stage, index) for index in range(4)), head]


def encoder(model: Any) -> Stages:
    return [model.embedding, *model.layers, lambda x: model.head(x + model.attention(x, x, x)[0])]


def convolutions(model: Any) -> Stages:
    blocks = [lambda x, block=block: x + block(x) for block in model.blocks]
    return [model.stem, *blocks, lambda x: model.rise(model.batch_norm(x)).mean((2, 3)), model.head]


STAGES: dict[str, Callable[[Any], Stages]] = {
    "gpt": gpt,
    "gpt tied by use": gpt,
    "gpt, blocks recomputed": gpt,
    "gpt, blocks reentrant": gpt,
    "frozen middle": gpt,
    "frozen middle, blocks reentrant": gpt,
    "repeated blocks": repeated,
    "low rank": low_rank,
    "raw root": raw_root,
    "structured outputs": structured,
    "encoder": encoder,
    "convolutions": convolutions,
}


def pairs(recipe: Recipe, step: int, count: int, first: int = 0) -> list[tuple[Any, Any]]:
    """Return this rank's micro-batches as pairs: the input of the model, and the whole batch for the loss."""
    batches = [micro_batch(recipe, step, micro, rank()) for micro in range(first, first + count)]
    return [(batch[0], batch) for batch in batches]


def train_layered(recipe: Recipe, how: str = "all") -> Trained:
    """Train the recipe on this rank with ``zeropp.accumulate``.

    Args:
        recipe: the recipe.
        how: "all": one call for all micro-batches of a step. "halves": two calls. "in turn": every other step runs a
            plain loop instead. "no_sync": two calls, the first inside ``no_sync``.
    """
    model = build(recipe, seed=7 + 100 * rank())
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, recipe.config())
    stages, loss = STAGES[recipe.model](model), partial(scored, recipe.model)
    run = partial(zeropp.accumulate, model, loss_fn=loss, stages=stages)
    half = recipe.accumulation // 2
    losses: list[float] = []
    norms = []
    for step in range(recipe.steps):
        optimizer.zero_grad()
        if how == "in turn" and step % 2:
            for given, batch in pairs(recipe, step, recipe.accumulation):
                value = scored(recipe.model, model(given), batch)
                losses.append(value.item())
                optimizer.backward(value)
        elif how == "no_sync":
            with optimizer.no_sync():
                losses += run(micro_batches=pairs(recipe, step, half)).tolist()
            losses += run(micro_batches=pairs(recipe, step, recipe.accumulation - half, half)).tolist()
        elif how == "halves":
            losses += run(micro_batches=pairs(recipe, step, half)).tolist()
            losses += run(micro_batches=pairs(recipe, step, recipe.accumulation - half, half)).tolist()
        else:
            losses += run(micro_batches=pairs(recipe, step, recipe.accumulation)).tolist()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    trained = Trained(losses, norms, zeropp.full_state(model), names)
    optimizer.close()
    return trained
