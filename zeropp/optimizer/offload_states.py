"""``offload_states`` and ``reload_states``: a rank's memory goes to the host between two phases of training.

See [Note: states off the device]. This file says which memory each name means; `zeropp.engine.preconditions` parks it.
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
from zeropp.params.unit import FlatBuffer

__all__ = ["chosen_kinds", "offload_states", "reload_states"]

# DeepSpeed's, for what lives within a backward here.
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
    """Send memory to the host; see :meth:`zeropp.optimizer.wrapper.ZeroOptimizer.offload_states`.

    Args:
        engine: whose memory it is.
        optimizer: the wrapped one, with states.
        slices: in its groups.
        kinds: names in :data:`zeropp.engine.preconditions.KINDS`.
        pin_memory: into page-locked memory, where the device is a GPU.
        non_blocking: return while the device still copies.
    """
    # Not while an average is applied: it would be taken for the weights, and swapped back in the middle.
    engine.require_idle("offload_states", needs=NOTHING)
    engine.agreement.require_same_call(f"offload_states({sorted(kinds)})")
    # Nothing may be about to write, or to read; refreshes need main weights, and are started on all ranks or none.
    engine.finish_load()
    engine.start_delayed_refresh()
    engine.wait_for_refresh()
    if kinds & COMPUTING:
        # Gathered for the next pass, or on its way: the latter reads what is about to go.
        engine.release_prefetched()

    # Page-locked memory is of use to a card alone, and without one torch refuses it.
    pinned = pin_memory and engine.device.type == "cuda"

    def park() -> None:
        # What a refused backward leaves in ``.grad`` is dropped by reload_states, and must be told from these.
        if kinds & TRAINING and any(gradient.has_stray() for gradient in engine.gradients):
            raise RuntimeError(
                "offload_states was called while there are gradients that no sum has; call step() or zero_grad() first"
            )
        for each in _memory(engine, optimizer, slices, kinds):
            engine.parking.park(
                each.kind, each.tensor, each.views, keep=each.keep, pinned=pinned, non_blocking=non_blocking
            )

    _on_every_rank(engine, "offload_states()", park)


def reload_states(engine: Engine, *, non_blocking: bool) -> None:
    """Bring memory back; see :meth:`zeropp.optimizer.wrapper.ZeroOptimizer.reload_states`."""
    if engine.closed:
        # States and slices outlive the engine; its process groups do not, and no other rank is asked.
        engine.parking.bring_back(non_blocking=non_blocking)
        engine.parking.kinds.clear()
        return
    engine.require_idle("reload_states", needs=NOTHING)
    engine.agreement.require_same_call("reload_states()")
    if engine.parking.kinds & TRAINING:
        # There were none: these are of a backward that was refused.
        engine.pending.forget_stray()
    _on_every_rank(engine, "reload_states()", lambda: engine.parking.bring_back(non_blocking=non_blocking))
    engine.parking.kinds.clear()


def chosen_kinds(include: object, device: str | Enum | torch.device) -> frozenset[str]:
    """Names of memory to send away, from the arguments of ``offload_states``.

    Raises:
        ValueError, TypeError: another name or device.
    """
    name = device.value if isinstance(device, Enum) else str(device)
    kinds = _named_kinds(include)
    if name != "cpu":
        raise ValueError(f'device is {name!r}; states go to the memory of the host, "cpu", between phases')
    return kinds


def _named_kinds(include: object) -> frozenset[str]:
    if include is None:
        return EVERYTHING
    # Python's own words for it would be of iteration, and name neither the argument nor what it takes.
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
    """Memory of one name.

    Attributes:
        kind: the name.
        tensor: over all of a storage.
        views: others of it that somebody holds.
        keep: whether what it says matters.
    """

    kind: str
    tensor: Tensor
    views: Sequence[Tensor] = ()
    keep: bool = True


def _memory(engine: Engine, optimizer: Optimizer, slices: ShardedParams, kinds: frozenset[str]) -> list[_Memory]:
    """The tensors that can be sent away."""
    named = (*_weights(engine, slices), *_gradients(engine, slices), *_states(engine, optimizer, slices, kinds))
    # Not what an earlier call has sent away, nor empty parameters.
    return [each for each in named if each.kind in kinds and each.tensor.untyped_storage().nbytes() > 0]


def _weights(engine: Engine, slices: ShardedParams) -> Iterator[_Memory]:
    cut = _by_buffer(slices)
    for buffer in engine.buffers:
        cached = buffer.paths.refresh is not None
        if buffer.main.place == "device":
            views = [part.parameter for part in cut.get(buffer, [])]
            # Where nothing is cached every gather begins here, so that no pass could do without.
            yield _Memory("hp_params" if cached else "lp_params", buffer.shard, views)
        source = buffer.wire_copy
        if source is not None and source.row is not None and source.follows and source.row.place == "device":
            yield _Memory("lp_params", source.row.tensor)
        if buffer.secondary is not None:
            yield _Memory("lp_params", buffer.secondary)
        # Gathered ones are none of it: they are somebody's, or have been released.
        if buffer.paths.fetch is None and not buffer.paths.shared:
            yield _Memory("lp_params", buffer.flat)


def _gradients(engine: Engine, slices: ShardedParams) -> Iterator[_Memory]:
    cut = _by_buffer(slices)
    for buffer in engine.trainable_buffers:
        gradient = buffer.gradient
        assert gradient is not None  # or it would not be trainable
        if gradient.row.place == "device":
            views = [view for part in cut.get(buffer, []) for view in (part.gradient, part.seen)]
            # Until a gradient arrives, which overwrites it, it says nothing.
            yield _Memory("lp_grads", gradient.shard, views, keep=gradient.arrived)
        # Made on the device, wherever sums stay.
        if gradient.held is not None:
            yield _Memory("lp_grads", gradient.held)
        for feedback in gradient.feedbacks:
            yield _Memory("carried_errors", feedback.state, [feedback.scales])


def _states(engine: Engine, optimizer: Optimizer, slices: ShardedParams, kinds: frozenset[str]) -> Iterator[_Memory]:
    if "optim_states" not in kinds:
        return
    stay: list[str] = []
    device = engine.device.type
    for name, states in _states_on_device(engine, optimizer, slices):
        for key, value in states.items():
            # Counts of steps are numbers, and mostly on the host.
            if not isinstance(value, Tensor) or value.dim() == 0 or value.device.type != device:
                continue
            # By an earlier call; it could not be asked whose it is.
            if engine.parking.is_away(value):
                continue
            if _is_own(value):
                yield _Memory("optim_states", value)
            else:
                stay.append(f"{key} of {name}")
    if stay:
        warn_user(
            f"optimizer states {stay[:5]}{'...' if stay[5:] else ''} stay on the device: something else refers to "
            "their memory too, or they are of a class of their own"
        )


def _states_on_device(
    engine: Engine, optimizer: Optimizer, slices: ShardedParams
) -> Iterator[tuple[str, dict[str, Any]]]:
    apart = not engine.maker.tiers.states.serves(engine.device)
    for part in slices.all:
        here = part.buffer is not None and part.buffer.main.place == "device" and not (apart and part.on_host)
        if here and part.parameter in optimizer.state:
            yield part.name, optimizer.state[part.parameter]
    if engine.maker.tiers.main.serves(engine.device):
        # Of parameters that are frozen, whole.
        yield from slices.frozen_states().items()


def _by_buffer(slices: ShardedParams) -> dict[FlatBuffer, list[Slice]]:
    found: dict[FlatBuffer, list[Slice]] = {}
    for part in slices.all:
        if part.buffer is not None:
            found.setdefault(part.buffer, []).append(part)
    return found


def _is_own(value: Tensor) -> bool:
    """Tell whether a state has a storage to itself, which can be resized."""
    # A subclass, as of 8-bit states, has its memory in tensors of which nothing is known here.
    if type(value) is not Tensor:
        return False
    storage = value.untyped_storage()
    return storage.resizable() and storage.nbytes() == value.nbytes and not is_aliased(value)


def _on_every_rank(engine: Engine, doing: str, work: Callable[[], None]) -> None:
    """Do local work, and raise on every rank if it failed on any: others would go on to where this one does not."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    own = "" if error is None else f"{type(error).__name__}: {error}", sorted(engine.parking.kinds)
    told = engine.agreement.exchange_objects(own, doing)
    # A rank may have nothing of what is away elsewhere, and must be refused with the others all the same.
    engine.parking.kinds.update(*(kinds for _, kinds in told))
    if error is not None:
        raise error
    for rank, (text, _) in zip(engine.comm.ranks, told, strict=True):
        if text:
            raise RuntimeError(f"{doing} failed on rank {rank}: {text}. Call reload_states() to have all as it was")
