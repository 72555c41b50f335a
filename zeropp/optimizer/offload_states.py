"""``offload_states`` and ``reload_states`` move a rank's device memory to the host between two phases of training.

See [Note: states off the device]. This file lists the tensors that belong to each kind of memory.
`zeropp.engine.preconditions` parks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp._compat import is_aliased
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine
from zeropp.engine.preconditions import COMPUTING, EVERYTHING, KINDS, NOTHING, TRAINING
from zeropp.optimizer.sharded_params import ShardedParams, Slice
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["chosen_kinds", "offload_states", "reload_states"]

# DeepSpeed's name for a buffer that zeropp allocates only during a backward, so there is nothing to move.
_PASSING = "contiguous_grad_buffer"


def offload_states(
    engine: Engine,
    optimizer: Optimizer,
    slices: ShardedParams,
    kinds: frozenset[str],
    *,
    pin_memory: bool,
    non_blocking: bool,
) -> None:
    """Move memory to the host; see :meth:`zeropp.optimizer.wrapper.ZeroOptimizer.offload_states`.

    Args:
        engine: engine whose memory is moved.
        optimizer: the wrapped optimizer, whose states are moved.
        slices: this rank's slices in the optimizer's groups.
        kinds: kinds of memory to move, from :data:`zeropp.engine.preconditions.KINDS`.
        pin_memory: True to use page-locked host memory if the device is a GPU.
        non_blocking: True to return while the device still copies.

    Raises:
        RuntimeError: the call failed on some rank, or some gradients have not been reduced.
    """
    # Refuse the call while an average is applied: the average would be moved as if it were the weights.
    engine.require_idle("offload_states", needs=NOTHING)
    engine.agreement.require_same_call(f"offload_states({sorted(kinds)})")
    # No work in flight may read or write the memory. Refreshes need main weights, and all ranks must start them
    # together.
    engine.finish_load()
    engine.start_delayed_refresh()
    engine.wait_for_refresh()
    if kinds & COMPUTING:
        # Drop units that are prefetched for the next pass, because their gathers in flight read the memory that is
        # moved.
        engine.release_prefetched()

    # Only copies from and to a GPU benefit from page-locked memory, and torch refuses to allocate it without a GPU.
    pinned = pin_memory and engine.device.type == "cuda"

    def park() -> None:
        # Refuse stray gradients now, because reload_states drops all stray gradients as leftovers of a refused
        # backward.
        if kinds & TRAINING and any(gradient.has_stray() for gradient in engine.gradients):
            raise RuntimeError(
                "offload_states was called while some gradients are not reduced; call step() or zero_grad() first"
            )
        for each in _memory(engine, optimizer, slices, kinds):
            engine.parking.park(
                each.kind, each.tensor, each.views, keep=each.keep, pinned=pinned, non_blocking=non_blocking
            )

    _on_every_rank(engine, "offload_states()", park)


def reload_states(engine: Engine, *, non_blocking: bool) -> None:
    """Move memory back; see :meth:`zeropp.optimizer.wrapper.ZeroOptimizer.reload_states`.

    Args:
        engine: engine whose memory is moved.
        non_blocking: True to return while the device still copies.
    """
    if engine.closed:
        # States and slices stay usable after the engine is closed, but its process groups do not, so restore without an
        # exchange.
        engine.parking.bring_back(non_blocking=non_blocking)
        engine.parking.kinds.clear()
        return
    engine.require_idle("reload_states", needs=NOTHING)
    engine.agreement.require_same_call("reload_states()")
    if engine.parking.kinds & TRAINING:
        # offload_states made sure that there were no stray gradients, so these come from a backward that was refused.
        engine.pending.forget_stray()
    _on_every_rank(engine, "reload_states()", lambda: engine.parking.bring_back(non_blocking=non_blocking))
    engine.parking.kinds.clear()


def chosen_kinds(include: object, device: str | Enum | torch.device) -> frozenset[str]:
    """Return the kinds of memory to move, from the arguments of ``offload_states``.

    Args:
        include: kinds as strings or enum members, a single one of them, or None for all kinds.
        device: target device; only "cpu" is accepted.

    Raises:
        ValueError: an unknown kind or another device.
        TypeError: ``include`` is not iterable.
    """
    name = device.value if isinstance(device, Enum) else str(device)
    kinds = _named_kinds(include)
    if name != "cpu":
        raise ValueError(f'device is {name!r}; states go to the memory of the host, "cpu", between phases')
    return kinds


def _named_kinds(include: object) -> frozenset[str]:
    """Return the kinds that ``include`` names; all kinds for None."""
    if include is None:
        return EVERYTHING
    # Python's own error would say "not iterable", without the argument's name and the accepted values.
    if not isinstance(include, Iterable):
        raise TypeError(f"include is {include!r}; expected some of {[*KINDS, _PASSING]}, or None for all of them")
    given = [include] if isinstance(include, str | Enum) else list(include)
    names = [each.value if isinstance(each, Enum) else each for each in given]
    wrong = [name for name in names if name not in (*KINDS, _PASSING)]
    if wrong:
        raise ValueError(f"include has {wrong}; expected some of {[*KINDS, _PASSING]}, or None for all of them")
    return frozenset(names) - {_PASSING}


@dataclass(frozen=True)
class _Memory:
    """One storage that can be moved to the host.

    Attributes:
        kind: kind of memory.
        tensor: tensor over the whole storage.
        views: other tensors over the storage that users may hold.
        keep: True to preserve the values; False to restore zeros.
    """

    kind: str
    tensor: Tensor
    views: Sequence[Tensor] = ()
    keep: bool = True


def _memory(engine: Engine, optimizer: Optimizer, slices: ShardedParams, kinds: frozenset[str]) -> list[_Memory]:
    """Return the storages of the given kinds that are on the device now."""
    named = (*_weights(engine, slices), *_gradients(engine, slices), *_states(engine, optimizer, slices, kinds))
    # Skip storages that an earlier call has moved, and storages of empty parameters: both have 0 bytes now.
    return [each for each in named if each.kind in kinds and each.tensor.untyped_storage().nbytes() > 0]


def _weights(engine: Engine, slices: ShardedParams) -> Iterator[_Memory]:
    """Yield the storages of main weights and cached weights."""
    cut = _by_buffer(slices)
    for buffer in engine.buffers:
        cached = buffer.paths.refresh is not None
        if buffer.main.place == "device":
            views = [part.parameter for part in cut.get(buffer, [])]
            # Without cached weights each gather starts from the main shard, so passes need it: the kind is lp_params.
            yield _Memory("hp_params" if cached else "lp_params", buffer.shard, views)
        source = buffer.wire_copy
        if source is not None and source.row is not None and source.follows and source.row.place == "device":
            yield _Memory("lp_params", source.row.tensor)
        if buffer.secondary is not None:
            yield _Memory("lp_params", buffer.secondary)
        # Include flat buffers that always hold the full weights. Gathered buffers are not included: they are released,
        # or a user reads them.
        if buffer.paths.fetch is None and not buffer.paths.shared:
            yield _Memory("lp_params", buffer.flat)


def _gradients(engine: Engine, slices: ShardedParams) -> Iterator[_Memory]:
    """Yield the storages of gradient shards, held gradients and error feedback."""
    cut = _by_buffer(slices)
    for buffer in engine.trainable_buffers:
        gradient = buffer.gradient
        assert gradient is not None  # trainable buffers have a gradient
        if gradient.row.place == "device":
            views = [view for part in cut.get(buffer, []) for view in (part.gradient, part.seen)]
            # The shard has no meaningful values before a gradient arrives: the first reduction overwrites it.
            yield _Memory("lp_grads", gradient.shard, views, keep=gradient.arrived)
        # Held gradients are on the device even if gradient shards are offloaded.
        if gradient.held is not None:
            yield _Memory("lp_grads", gradient.held)
        for feedback in gradient.feedbacks:
            yield _Memory("carried_errors", feedback.state, [feedback.scales])


def _states(engine: Engine, optimizer: Optimizer, slices: ShardedParams, kinds: frozenset[str]) -> Iterator[_Memory]:
    """Yield the storages of optimizer states, and warn of states that cannot be moved."""
    if "optim_states" not in kinds:
        return
    stay: list[str] = []
    device = engine.device.type
    for name, states in _states_on_device(engine, optimizer, slices):
        for key, value in states.items():
            # Skip step counts, which are single numbers and mostly on the host.
            if not isinstance(value, Tensor) or value.dim() == 0 or value.device.type != device:
                continue
            # Skip states that an earlier call has moved: their tensors are unreadable, so _is_own cannot check them.
            if engine.parking.is_away(value):
                continue
            if _is_own(value):
                yield _Memory("optim_states", value)
            else:
                stay.append(f"{key} of {name}")
    if stay:
        warn_user(
            f"optimizer states {stay[:5]}{'...' if stay[5:] else ''} stay on the device: their memory is shared with "
            "other tensors, or they are of a subclass of torch.Tensor"
        )


def _states_on_device(
    engine: Engine, optimizer: Optimizer, slices: ShardedParams
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and states of each parameter whose states may be on the device."""
    apart = not engine.maker.tiers.states.serves(engine.device)
    for part in slices.all:
        here = part.buffer is not None and part.buffer.main.place == "device" and not (apart and part.on_host)
        if here and part.parameter in optimizer.state:
            yield part.name, optimizer.state[part.parameter]
    if engine.maker.tiers.main.serves(engine.device):
        # States of frozen parameters are kept whole, apart from the optimizer.
        yield from slices.frozen_states().items()


def _by_buffer(slices: ShardedParams) -> dict[FlatBuffer, list[Slice]]:
    """Return the slices of each flat buffer."""
    found: dict[FlatBuffer, list[Slice]] = {}
    for part in slices.all:
        if part.buffer is not None:
            found.setdefault(part.buffer, []).append(part)
    return found


def _is_own(value: Tensor) -> bool:
    """Return True if a state is the only tensor of a resizable storage that has exactly the state's bytes."""
    # A subclass, such as an 8-bit state, keeps its values in inner tensors that this code cannot find.
    if type(value) is not Tensor:
        return False
    storage = value.untyped_storage()
    return storage.resizable() and storage.nbytes() == value.nbytes and not is_aliased(value)


def _on_every_rank(engine: Engine, doing: str, work: Callable[[], None]) -> None:
    """Run local work, and raise on every rank if the work failed on any rank. Collective.

    Without the common error, other ranks would continue to collectives that the failed rank does not reach.

    Args:
        engine: engine of this rank.
        doing: name of the call, for error messages.
        work: function to run.

    Raises:
        RuntimeError: the work failed on another rank. On the failed rank, the original error is raised.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    own = "" if error is None else f"{type(error).__name__}: {error}", sorted(engine.parking.kinds)
    told = engine.agreement.exchange_objects(own, doing)
    # A kind may be off the device on another rank only. Record it here, too, so that all ranks refuse the same calls.
    engine.parking.kinds.update(*(kinds for _, kinds in told))
    if error is not None:
        raise error
    for rank, (text, _) in zip(engine.comm.ranks, told, strict=True):
        if text:
            raise RuntimeError(f"{doing} failed on rank {rank}: {text}. Call reload_states() to restore all memory")
