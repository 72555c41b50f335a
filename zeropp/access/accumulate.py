"""Accumulation of gradients layer by layer: every micro-batch goes through a stage before any goes through the next.

[Note: layer-major] To the engine this is one forward of the model and one backward: the same units in the same order as
for one micro-batch, so that an order learned in either serves both, and each unit is fetched once a pass and reduced
once. All micro-batches are in one graph. Autograd takes what was computed last first, among all that is ready, so that
backward, too, brings every micro-batch through a stage before any reaches the stage before; and it adds up what the
micro-batches give a parameter before it hands it over. Results do not rest on that, only how often units are fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropp._compat import unguarded
from zeropp.access.refusals import check_structure, explain_freed
from zeropp.comm.agreement import MICRO_BATCHES
from zeropp.engine.engine import Engine
from zeropp.engine.hooks import OWNED_AS

__all__ = ["accumulate"]

Stage = Callable[[Any], Any]
LossFn = Callable[[Any, Any], Tensor]


def accumulate(
    model: nn.Module,
    micro_batches: Iterable[tuple[Any, Any]],
    loss_fn: LossFn,
    *,
    stages: Iterable[Stage] | None = None,
) -> Tensor:
    """Forward and backward of several micro-batches, stage by stage; in place of a loop over them, before ``step()``.

    Weights are fetched twice for all micro-batches together, and gradients sent once, where a loop does so for each. It
    costs the activations of all of them at once: recompute in stages what is too much, by torch's checkpointing.
    Collective: every rank calls it, with as many micro-batches.

    Gradients are those of the mean loss, as of a loop with ``optimizer.backward``: losses are divided by the
    configured ``gradient_accumulation_steps``, and the micro-batches count in its window; without that key by their
    number. Sums over micro-batches are made before ranks' are, in the dtype of the main weights and from the last
    micro-batch to the first; a loop rounds them in another order. Random numbers are drawn stage by stage; buffers,
    as of BatchNorm, see micro-batches in their order.

    Args:
        model: the wrapped one.
        micro_batches: pairs of what the first stage gets, and of what ``loss_fn`` gets.
        loss_fn: ``loss_fn(output of the last stage, second of the pair)``: the loss of a micro-batch, one element.
        stages: what the model consists of, in order: modules, or anything that calls them. Each gets, as in
            ``nn.Sequential``, the one object that the stage before returned. What a stage uses stays gathered until
            all micro-batches have passed it. None if the model is an ``nn.Sequential``, whose children they are.

    Returns:
        [n] losses of this rank's micro-batches, in order, undivided and without a graph.

    Raises:
        TypeError, ValueError: an argument, or what a stage or ``loss_fn`` returned, cannot be used; or the window has
            no room for so many micro-batches. The other ranks raise RuntimeError.
        RuntimeError: the model is not wrapped, a pass is running, or gradients are disabled.
    """
    engine = _engine_of(model)
    pairs, order = _agree(engine, lambda: _check_arguments(engine, model, micro_batches, loss_fn, stages))
    window = engine.accumulation
    targets = [target for _, target in pairs]
    divisor = window.steps if window.steps > 1 else len(pairs)
    losses: list[Tensor] = []

    def forward(inputs: list[Any]) -> list[Tensor]:
        # A copy of the list, from which activations are dropped as stages are done with them.
        losses.extend(_forward(engine, order, list(inputs), targets, loss_fn))
        return [engine.loss_scale.apply(loss / divisor) for loss in losses]

    # Without the key every call is a window of one.
    window.together = len(pairs) if window.steps > 1 else 1
    try:
        with _summed_in_main_dtype(engine):
            # Targets stay outside: the engine casts what goes into a model.
            scaled: Any = engine.run_as(model, forward, [given for given, _ in pairs])
            _backward(engine, scaled)
    finally:
        window.together = 1
    return torch.stack([loss.detach().reshape(()) for loss in losses])


def _engine_of(model: nn.Module) -> Engine:
    """The engine of a whole model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accumulate got a {type(model).__name__} as model; expected the module that was given to ZeroOptimizer, "
            "and its stages in stages=[...]"
        )
    engine = model.__dict__.get(OWNED_AS)
    if not isinstance(engine, Engine):
        raise RuntimeError(
            f"accumulate got a {type(model).__name__} that zeropp does not manage; expected a model that was given to "
            "ZeroOptimizer. Without zeropp there is nothing to gain by it: accumulate in a loop"
        )
    engine.require_idle("accumulate")
    if engine.root is not model:
        raise ValueError(
            f"accumulate got a {type(model).__name__} that is a part of the wrapped model; give the model that was "
            "given to ZeroOptimizer, and its stages in stages=[...]"
        )
    return engine


_Work = tuple[list[tuple[Any, Any]], list[Stage]]


def _agree(engine: Engine, prepare: Callable[[], _Work]) -> _Work:
    """Do what may be refused, and refuse it on every rank, before any of them begins."""
    work: _Work | None = None
    error: Exception | None = None
    try:
        work = prepare()
    except Exception as caught:
        error = caught
    # 0 stands for arguments that this rank has refused.
    count = 0 if work is None else len(work[0])
    rows = engine.agreement.exchange(MICRO_BATCHES, [count], "comparing micro-batches", "accumulate")
    if error is not None:
        raise error
    counts = {rank: row[0] for rank, row in zip(engine.comm.ranks, rows, strict=True)}
    refused = [rank for rank, other in counts.items() if other == 0]
    if refused:
        raise RuntimeError(f"accumulate was refused on ranks {refused}, see the errors there; no rank has begun")
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"accumulate got different numbers of micro-batches, by rank {counts}; give every rank as many: each "
            "counts alike in the mean over ranks"
        )
    assert work is not None  # else it was raised
    return work


def _check_arguments(
    engine: Engine, model: nn.Module, micro_batches: Any, loss_fn: object, stages: Iterable[Stage] | None
) -> _Work:
    """The arguments as lists."""
    if not torch.is_grad_enabled():
        raise RuntimeError("accumulate was called with gradients disabled, as in torch.no_grad(), and needs them")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; expected a function of an output and a target")
    order = _stages_of(model, stages)
    # A tensor can be iterated as well, and its rows would be taken for pairs.
    if not isinstance(micro_batches, Iterable) or isinstance(micro_batches, Tensor):
        raise TypeError(
            f"micro_batches is a {type(micro_batches).__name__}; expected a list of pairs (inputs, target), one for "
            "each micro-batch"
        )
    pairs = list(micro_batches)
    for number, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            length = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
            raise TypeError(
                f"micro-batch {number} is a {type(pair).__name__}{length}; expected a pair (inputs, target): "
                "the first stage gets the inputs, and loss_fn the target, each of any type"
            )
    if not pairs:
        raise ValueError("accumulate got no micro-batches; expected one or more pairs (inputs, target)")
    steps, count = engine.accumulation.steps, engine.accumulation.count
    if steps > 1 and count + len(pairs) > steps:
        raise ValueError(
            f"accumulate got {len(pairs)} micro-batches, and the window of gradient_accumulation_steps {steps} has "
            f"room for {steps - count}: {count} came since the last step. Give it that many at most; or leave the key "
            "out, and each call takes the mean of its own"
        )
    # The hook that does this is on the model's own forward, which is not called here.
    check_structure(model)
    return pairs, order


def _stages_of(model: nn.Module, stages: Iterable[Stage] | None) -> list[Stage]:
    if stages is None:
        # A subclass may call its children in another order.
        if type(model).forward is not nn.Sequential.forward or "forward" in model.__dict__:
            raise TypeError(
                f"a {type(model).__name__} does not say in which order its parts are called, as an nn.Sequential does; "
                "give them in stages=[...], as in stages=[model.embedding, *model.blocks, model.head]"
            )
        stages = list(model.children())
    if isinstance(stages, (nn.Module, dict)) and not isinstance(stages, (nn.Sequential, nn.ModuleList)):
        raise TypeError(f"stages is a {type(stages).__name__}; expected a list of modules or functions, in order")
    order = list(stages)
    for number, stage in enumerate(order):
        if not callable(stage):
            raise TypeError(
                f"stage {number} is a {type(stage).__name__}; expected a module, or a function that calls some"
            )
    if not order:
        raise ValueError("accumulate got no stages; expected the parts of the model in the order they are called")
    return order


def _forward(
    engine: Engine, stages: Sequence[Stage], values: list[Any], targets: Sequence[Any], loss_fn: LossFn
) -> list[Tensor]:
    """All micro-batches through one stage after the other, and through the loss with the last."""
    losses = []
    for number, stage in enumerate(stages):
        # Without it each micro-batch would release the weights, and the next would gather them again.
        with engine.pin_units():
            for micro, value in enumerate(values):
                output = stage(value)
                if output is None:
                    raise TypeError(
                        f"stage {number}, {_name(stage)}, returned None for micro-batch {micro}; expected what the "
                        f"{'loss' if number == len(stages) - 1 else 'next stage'} is to get"
                    )
                # At once, and in place: logits of every micro-batch would be the largest things there are.
                values[micro] = None
                if number < len(stages) - 1:
                    values[micro] = output
                else:
                    losses.append(_checked(loss_fn(output, targets[micro]), micro))
    return losses


def _name(stage: Stage) -> str:
    return str(getattr(stage, "__qualname__", type(stage).__name__))


def _checked(loss: object, micro: int) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned a {type(loss).__name__} for micro-batch {micro}; expected a scalar tensor")
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)} for micro-batch {micro}; expected a scalar, as of "
            "a mean over the elements"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of micro-batch {micro} has no graph: it depends on no trained parameter, or was detached"
        )
    return loss


def _backward(engine: Engine, losses: Sequence[Tensor]) -> None:
    try:
        torch.autograd.backward(losses)
    except RuntimeError as error:
        # torch has no type of its own for this error.
        if "modified by an inplace operation" in str(error):
            raise RuntimeError(explain_freed(engine, str(error))) from error
        raise


@contextlib.contextmanager
def _summed_in_main_dtype(engine: Engine) -> Iterator[None]:
    """Inside, gradients of 16-bit weights are added up in the dtype of the main weights.

    Sums in 16 bits lose small terms; a loop over micro-batches makes them in the shards, which have that dtype.
    """
    narrow = [(p, g.dtype) for g in engine.gradients for p in g.parameters if p.dtype != g.dtype]
    with unguarded():
        for parameter, dtype in narrow:
            # Strays wait there for the step sync, and must be of one dtype with what is added to them.
            if parameter.grad is None:
                parameter.grad_dtype = dtype
    try:
        yield
    finally:
        # A backward that has failed leaves gradients, which the engine forgets.
        engine.notice_failed_backward()
        if not engine.running:
            with unguarded():
                for parameter, _ in narrow:
                    if parameter.grad is None:
                        parameter.grad_dtype = parameter.dtype
