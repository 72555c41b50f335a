"""``offload_states`` and ``reload_states``: a rank's memory goes to the host between two phases of training.

See [Note: states off the device]. Here is which memory each name means.
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
from zeropp.config.base import notify
from zeropp.engine.engine import Engine
from zeropp.engine.preconditions import COMPUTING, EVERYTHING, KINDS, NOTHING, TRAINING
from zeropp.optimizer.slices import Slice, Slices
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["OffloadsStates"]

# DeepSpeed's, for what lives within a backward here.
_PASSING = "contiguous_grad_buffer"


class OffloadsStates:
    """The calls of a ``ZeroOptimizer`` that move states off the device and back between phases of training."""

    engine: Engine
    inner: Optimizer
    slices: Slices

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload_states(
        self,
        include: Iterable[str | Enum] | None = None,
        device: str | Enum | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Give this rank's device memory back between phases, until :meth:`reload_states`. Collective, between passes.

        What is there goes to the host's memory, and comes back bit for bit: also gradients of an unfinished window, and
        what a step under way is about to write, which is waited for. Again, for further names, adds those. What
        ``offload_optimizer`` or ``offload_param`` keeps elsewhere stays there. A use that needs what is away raises,
        and says what to call; ``state_dict()`` of the model, ``full_state``, exports and reading in
        ``GatheredParameters`` go on from the host. Views of slices, gradients and states that you have made yourself
        must not be used meanwhile.

        Args:
            include: names, or members of an enum with such values, as DeepSpeed's ``OffloadStateTypeEnum``; None for
                all. "optim_states"; "hp_params", main weights where something else of them is there to compute with;
                "lp_params", what passes begin with: weights that are cached between uses, shards where none are;
                "lp_grads", the gradients' memory; "carried_errors" of quantized gradients. "contiguous_grad_buffer"
                lives within a backward here, and is nothing.
            device: where to; only the host's memory, "cpu".
            pin_memory: into page-locked memory, where the device is a GPU.
            non_blocking: return while the device still copies; what it is given later waits.

        Raises:
            ValueError, TypeError: another name or device.
            RuntimeError: a pass is running, ranks are at different calls, there is no room on some rank; or gradients
                have come that are not part of any sum yet, as after a backward that failed.
        """
        engine, kinds = self.engine, _chosen(include)
        _check_device(device)
        # Not while an average is applied: it would be taken for the weights, and swapped back in the middle.
        engine.require_idle("offload_states", needs=NOTHING)
        engine.agreement.require_same_call(f"offload_states({sorted(kinds)})")
        # Nothing may be about to write, or to read; refreshes need main weights, and are started on all ranks or none.
        engine.finish_load()
        engine.refresh.start_put_off()
        engine.refresh.wait()
        if kinds & COMPUTING:
            # Gathered for the next pass, or on its way: the latter reads what is about to go.
            engine.schedule.live_units.release_planned()

        # Page-locked memory is of use to a card alone, and without one torch refuses it.
        pinned = pin_memory and engine.device.type == "cuda"
        _on_every_rank(engine, "offload_states()", lambda: self._park(kinds, pinned, non_blocking))

    @torch.inference_mode(False)
    @torch.no_grad()
    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything back that :meth:`offload_states` has sent away; nothing if nothing is. Collective.

        Args:
            non_blocking: return while the device still copies; what it is given later waits.

        Raises:
            RuntimeError: there is no room on some rank; call it again when there is.
        """
        engine = self.engine
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

    def empty_partition_cache(self) -> None:
        """Release weights that stay gathered between passes, for the next one. Collective; the next gathers them."""
        engine = self.engine
        engine.require_idle("empty_partition_cache", needs=NOTHING)
        engine.agreement.require_same_call("empty_partition_cache()")
        engine.schedule.live_units.release_planned()

    def _park(self, kinds: frozenset[str], pinned: bool, non_blocking: bool) -> None:
        """This rank's part of :meth:`offload_states`."""
        engine = self.engine
        # What a refused backward leaves in ``.grad`` is dropped by reload_states, and must be told from these.
        if kinds & TRAINING and any(gradient.has_stray() for gradient in engine.gradients):
            raise RuntimeError(
                "offload_states was called while there are gradients that no sum has; call step() or zero_grad() first"
            )
        for each in self._memory(kinds):
            engine.parking.park(
                each.kind, each.tensor, each.views, keep=each.keep, pinned=pinned, non_blocking=non_blocking
            )

    def _memory(self, kinds: frozenset[str]) -> list[_Memory]:
        """The tensors that can be sent away."""
        engine, slices = self.engine, self.slices
        named = (*_weights(engine, slices), *_gradients(engine, slices), *self._states(kinds))
        # Not what an earlier call has sent away, nor empty parameters.
        return [each for each in named if each.kind in kinds and each.tensor.untyped_storage().nbytes() > 0]

    def _states(self, kinds: frozenset[str]) -> Iterator[_Memory]:
        if "optim_states" not in kinds:
            return
        stay, device = list[str](), self.engine.device.type
        for name, states in self._states_on_device():
            for key, value in states.items():
                # Counts of steps are numbers, and mostly on the host.
                if not isinstance(value, Tensor) or value.dim() == 0 or value.device.type != device:
                    continue
                # By an earlier call; it could not be asked whose it is.
                if self.engine.parking.is_away(value):
                    continue
                if _is_own(value):
                    yield _Memory("optim_states", value)
                else:
                    stay.append(f"{key} of {name}")
        if stay:
            notify(
                f"optimizer states {stay[:5]}{'...' if stay[5:] else ''} stay on the device: something else refers to "
                "their memory too, or they are of a class of their own"
            )

    def _states_on_device(self) -> Iterator[tuple[str, dict[str, Any]]]:
        apart = not self.engine.maker.homes.states.serves(self.engine.device)
        for part in self.slices.cut:
            here = part.buffer is not None and part.buffer.main.place == "device" and not (apart and part.on_host)
            if here and part.parameter in self.inner.state:
                yield part.name, self.inner.state[part.parameter]
        if self.engine.maker.homes.main.serves(self.engine.device):
            # Of parameters that are frozen, whole.
            yield from self.slices.frozen_states().items()


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


def _weights(engine: Engine, slices: Slices) -> Iterator[_Memory]:
    cut = _by_buffer(slices)
    for buffer in engine.buffers:
        cached = buffer.paths.refresh is not None
        if buffer.main.place == "device":
            views = [part.parameter for part in cut.get(buffer, [])]
            # Where nothing is cached every gather begins here, so that no pass could do without.
            yield _Memory("hp_params" if cached else "lp_params", buffer.shard, views)
        source = buffer.source
        if source is not None and source.row is not None and source.follows and source.row.place == "device":
            yield _Memory("lp_params", source.row.tensor)
        if buffer.secondary is not None:
            yield _Memory("lp_params", buffer.secondary)
        # Gathered ones are none of it: they are somebody's, or have been released.
        if buffer.paths.fetch is None and not buffer.paths.shared:
            yield _Memory("lp_params", buffer.flat)


def _gradients(engine: Engine, slices: Slices) -> Iterator[_Memory]:
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


def _by_buffer(slices: Slices) -> dict[FlatBuffer, list[Slice]]:
    found: dict[FlatBuffer, list[Slice]] = {}
    for part in slices.cut:
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


def _chosen(include: Any) -> frozenset[str]:
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


def _check_device(device: str | Enum | torch.device) -> None:
    name = device.value if isinstance(device, Enum) else str(device)
    if name != "cpu":
        raise ValueError(f'device is {name!r}; states go to the memory of the host, "cpu", between phases')


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
