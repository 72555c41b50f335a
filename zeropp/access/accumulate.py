"""Gradient accumulation layer by layer: all micro-batches pass through one stage before any passes through the next.

[Note: layer-major] The engine sees one forward and one backward of the model, with the same units in the same order as
for a single micro-batch. So both share the learned order, and each unit is gathered once per pass and reduced once. All
micro-batches are in one autograd graph. Among the nodes that are ready, autograd runs the node that was created last.
So backward, too, runs all micro-batches through a stage before it runs the stage before, and autograd adds up the
micro-batches' gradients of a parameter before it accumulates them. The results do not depend on this order. Only the
number of gathers does.
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
    """Run forward and backward of several micro-batches stage by stage. Call it instead of a loop, before ``step()``.

    A loop gathers the weights twice and reduces the gradients once per micro-batch. This function gathers the weights
    twice and reduces once in total. But the activations of all micro-batches are in memory at once; use
    ``torch.utils.checkpoint`` inside stages to reduce them. Collective: all ranks call it with the same number of
    micro-batches.

    The gradients are those of the mean loss, as in a loop with ``optimizer.backward``. Each loss is divided by
    ``gradient_accumulation_steps`` if it is configured, and by the number of micro-batches otherwise. The micro-batches
    count in the accumulation window. Their gradients are summed, from last to first, in the dtype of the main weights,
    before the sum over ranks; a loop rounds in another order. Random numbers are drawn stage by stage. Module buffers,
    such as those of BatchNorm, are updated in the order of micro-batches.

    Args:
        model: the wrapped model.
        micro_batches: pairs (inputs, target): the input of the first stage, and the second argument of ``loss_fn``.
        loss_fn: function of the last stage's output and the target; returns the loss, a tensor with one element.
        stages: the parts of the model in order: modules, or functions that call modules. Each stage gets the object
            that the previous stage returned, as in ``nn.Sequential``. The units that a stage uses stay gathered until
            all micro-batches have passed it. None for an ``nn.Sequential``, which means its children.

    Returns:
        [n] losses of this rank's n micro-batches, in order, undivided and detached.

    Raises:
        TypeError, ValueError: an argument or the result of a stage or ``loss_fn`` is invalid, or there are more
            micro-batches than the accumulation window has left. For an invalid argument, other ranks raise
            RuntimeError. If ranks give different numbers of micro-batches, all ranks raise ValueError.
        RuntimeError: the model is not wrapped, a pass is running, or gradients are disabled.
    """
    engine = _engine_of(model)
    pairs, order = _agree(engine, lambda: _check_arguments(engine, model, micro_batches, loss_fn, stages))
    window = engine.accumulation
    targets = [target for _, target in pairs]
    divisor = window.steps if window.steps > 1 else len(pairs)
    losses: list[Tensor] = []

    def forward(inputs: list[Any]) -> list[Tensor]:
        # Pass a copy of the list, because _forward drops activations from it as soon as stages have used them.
        losses.extend(_forward(engine, order, list(inputs), targets, loss_fn))
        return [engine.loss_scale.apply(loss / divisor) for loss in losses]

    # Without gradient_accumulation_steps, each call is one accumulation window and counts as one micro-batch.
    window.together = len(pairs) if window.steps > 1 else 1
    try:
        with _summed_in_main_dtype(engine):
            # Pass only the inputs through run_as, because it casts floating-point arguments to the compute dtype.
            # Targets must keep their dtype.
            scaled: Any = engine.run_as(model, forward, [given for given, _ in pairs])
            _backward(engine, scaled)
    finally:
        window.together = 1
    return torch.stack([loss.detach().reshape(()) for loss in losses])


def _engine_of(model: nn.Module) -> Engine:
    """Return the engine of a wrapped model. Raise an error for other objects and for parts of a wrapped model."""
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
    """Check the arguments, and compare the outcome over ranks, so that either all ranks raise or all ranks start."""
    work: _Work | None = None
    error: Exception | None = None
    try:
        work = prepare()
    except Exception as caught:
        error = caught
    # A count of 0 tells the other ranks that this rank's arguments are invalid.
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
    assert work is not None  # otherwise `error` has been raised
    return work


def _check_arguments(
    engine: Engine, model: nn.Module, micro_batches: Any, loss_fn: object, stages: Iterable[Stage] | None
) -> _Work:
    """Check the arguments; return the micro-batches and the stages as lists."""
    if not torch.is_grad_enabled():
        raise RuntimeError("accumulate was called with gradients disabled, as in torch.no_grad(), and needs them")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; expected a function of an output and a target")
    order = _stages_of(model, stages)
    # A tensor is iterable, too. Reject it, because its rows would be mistaken for pairs.
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
    # The hook on the model's forward does this check, but this function does not call the model's forward.
    check_structure(model)
    return pairs, order


def _stages_of(model: nn.Module, stages: Iterable[Stage] | None) -> list[Stage]:
    if stages is None:
        # A subclass with its own forward may call its children in another order, so its stages must be given.
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
    """Run all micro-batches through each stage in turn.

    In the last stage, compute each loss right after its micro-batch.
    """
    losses = []
    for number, stage in enumerate(stages):
        # Without pin_units, each micro-batch would free the units of the stage, and the next would gather them again.
        with engine.pin_units():
            for micro, value in enumerate(values):
                output = stage(value)
                if output is None:
                    raise TypeError(
                        f"stage {number}, {_name(stage)}, returned None for micro-batch {micro}; expected what the "
                        f"{'loss' if number == len(stages) - 1 else 'next stage'} is to get"
                    )
                # Drop each input right after its use. Otherwise all inputs of the last stage would stay in memory until
                # the last loss is computed. They may be logits.
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
        # PyTorch has no exception class for this error, so look at the message.
        if "modified by an inplace operation" in str(error):
            raise RuntimeError(explain_freed(engine, str(error))) from error
        raise


@contextlib.contextmanager
def _summed_in_main_dtype(engine: Engine) -> Iterator[None]:
    """Accumulate gradients of 16-bit weights in the dtype of the main weights inside this context.

    Autograd would sum the micro-batches in 16 bits and lose small terms. A loop over micro-batches does not, because
    the gradient shards that it adds to have the main dtype.
    """
    narrow = [(p, g.dtype) for g in engine.gradients for p in g.parameters if p.dtype != g.dtype]
    with unguarded():
        for parameter, dtype in narrow:
            # A .grad that is not None holds a stray gradient until the step sync. Keep its dtype, because autograd
            # needs the same dtype for gradients that it adds to it.
            if parameter.grad is None:
                parameter.grad_dtype = dtype
    try:
        yield
    finally:
        # A failed backward leaves gradients in .grad. The engine drops them here.
        engine.notice_failed_backward()
        if not engine.running:
            with unguarded():
                for parameter, _ in narrow:
                    if parameter.grad is None:
                        parameter.grad_dtype = parameter.dtype
