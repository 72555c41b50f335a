"""Checks that raise when a call is made at the wrong time, and the parts of an engine's state that they read.

A call is refused in the middle of a pass, inside ``GatheredParameters``, while an average of the weights is applied,
while memory that it needs is off the device, or after the engine has ended. :func:`check_idle` checks all of these.
:class:`GatherContexts` stores the open uses of ``GatheredParameters``, and :class:`Parking` the memory off the device.

[Note: states off the device] Between training phases, other work needs the device's memory: rollouts or an evaluation,
for example. ``optimizer.offload_states()`` then parks memory on the host, by name (`zeropp.offload.parked`). A parked
storage is resized to zero but kept, so every view of it is valid again when it has come back. All ranks park and bring
back the same names together, so no rank waits for another one whose call was refused. A call in between names the
memory that it needs (`Engine.require_idle`), and is refused before it changes or sends anything. Whole weights can
still be read, because gathers may start from the parked bytes on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from zeropp._compat import compiles_backwards, storage_id, unguarded
from zeropp.engine.engine_state import EngineState
from zeropp.offload.parked import Parked
from zeropp.order.known_orders import Phase
from zeropp.params.guard import is_guarded, make_readable, make_unreadable
from zeropp.params.unit import Unit

__all__ = [
    "COMPUTING",
    "EVERYTHING",
    "KINDS",
    "NOTHING",
    "TRAINING",
    "WEIGHTS",
    "EngineActivity",
    "GatherContext",
    "GatherContexts",
    "Parking",
    "check_idle",
    "of_a_forward",
    "refuse_compiled_autograd",
    "refuse_retired",
]


# Checks.


class EngineActivity(Protocol):
    """The parts of an engine that the checks read.

    Attributes:
        state: see :class:`EngineState`.
        phase: the running pass.
        gather_contexts: open uses of GatheredParameters.
        parking: memory that is off the device.
    """

    state: EngineState
    phase: Phase
    gather_contexts: GatherContexts
    parking: Parking


def check_idle(
    engine: EngineActivity, what: str, *, inside_gather: bool, averaged: bool, needs: Collection[str]
) -> None:
    """Raise if a call is not allowed now; see :meth:`zeropp.engine.engine.Engine.require_idle`.

    Args:
        engine: engine that is called.
        what: description of the call, for the error.
        inside_gather: True to allow the call inside GatheredParameters.
        averaged: True to allow it while an average of the weights is applied.
        needs: names of the memory that must be on the device.

    Raises:
        RuntimeError: the call is not allowed now.
    """
    if EngineState.CLOSED in engine.state:
        raise _ended(what)
    if engine.phase is not Phase.IDLE:
        interrupted = (
            ". If Ctrl-C has ended that forward, call optimizer.engine.recover() first, on every rank"
            if engine.phase is Phase.FORWARD
            else ""
        )
        raise RuntimeError(
            f"{what} was called in the middle of a {engine.phase.value}; call it between passes{interrupted}"
        )
    if engine.gather_contexts and not inside_gather:
        also = ", or gather all of its parameters and call it under torch.no_grad()" if what == "the model" else ""
        raise RuntimeError(f"{what} was called inside GatheredParameters; leave that first{also}")
    if EngineState.AVERAGED in engine.state and not averaged:
        raise RuntimeError(f"{what} was called while an average of the weights is applied; leave that first")
    engine.parking.require(what, needs)


def refuse_retired(engine: EngineActivity, what: str) -> None:
    """Refuse to train with an engine that was destroyed, though its parameters are still sharded.

    Args:
        engine: engine that is called.
        what: description of the call, for the error.

    Raises:
        RuntimeError: the engine is retired.
    """
    if EngineState.RETIRED in engine.state:
        raise _ended(what)


def refuse_compiled_autograd() -> None:
    """Refuse a backward under compiled autograd, or a forward that such a backward may follow.

    Raises:
        RuntimeError: compiled autograd is on.
    """
    if compiles_backwards():
        # Compiled autograd reads saved weights before the hooks that gather them; torch would report edited weights.
        raise RuntimeError(
            "compiled autograd is on, and cannot be used with a model managed by zeropp: it reads weights before the "
            "hooks that gather them have run. Keep torch._dynamo.config.compiled_autograd False, and do not use the "
            "context of torch._dynamo.compiled_autograd; torch.compile alone works, and compiles forward and backward"
        )


def _ended(what: str) -> RuntimeError:
    """Return the error of a call after the engine has ended."""
    return RuntimeError(
        f"{what} was called after close(), engine.destroy() or another wrapping of the model had ended this engine; "
        "Accelerate's free_memory() destroys the engine, too, and transformers' Trainer.train() calls it at its start. "
        "Wrap the model again; after close(), wrap a model that has its values"
    )


# Memory off the device.

KINDS = {
    "optim_states": "optimizer states",
    "hp_params": "main weights",
    "lp_params": "weights that forward and backward gather",
    "lp_grads": "gradients",
    "carried_errors": "carried errors",
}
"""Names of memory that can be off the device, with words for errors. All names but the last are DeepSpeed's."""


NOTHING: frozenset[str] = frozenset()
COMPUTING = frozenset(["lp_params"])
TRAINING = frozenset(["lp_params", "lp_grads", "carried_errors"])
WEIGHTS = frozenset(["hp_params", "lp_params"])
EVERYTHING = frozenset(KINDS)
_WHERE = "off the device since optimizer.offload_states(); call optimizer.reload_states() first, on every rank"


def of_a_forward() -> frozenset[str]:
    """Return the names of the memory that a forward needs: more if gradients are enabled."""
    return TRAINING if torch.is_grad_enabled() else COMPUTING


class Parking:
    """The parked memory of one engine, by name; see [Note: states off the device].

    Attributes:
        kinds: names of memory that is off the device on any rank. A name stays until all ranks have that memory back.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._parked: dict[str, list[Parked]] = {}
        self._by_storage: dict[int, Parked] = {}
        # Weak references, so that tensors which the user drops while they are parked are freed.
        self._unreadable: dict[str, list[weakref.ref[Tensor]]] = {}

    def park(
        self, kind: str, tensor: Tensor, views: Sequence[Tensor], *, keep: bool, pinned: bool, non_blocking: bool
    ) -> None:
        """Free the device memory of a tensor, and let every use of the tensor raise an error.

        Args:
            kind: name of the memory, a key of ``KINDS``.
            tensor: tensor over the whole storage.
            views: other tensors over the storage that the user may hold and read.
            keep: True to keep the values on the host; False if they are not needed again.
            pinned: True to keep them in page-locked memory.
            non_blocking: True to return before the copy to the host has finished.
        """
        # Read the identity of the storage now: after make_unreadable the tensor refuses it.
        place = storage_id(tensor)
        parked = Parked(tensor, keep=keep, pinned=pinned, non_blocking=non_blocking)
        # Noted at once: the memory is off the device from here on, even if a later line raises.
        self.kinds.add(kind)
        self._by_storage[place] = parked
        self._parked.setdefault(kind, []).append(parked)
        # The engine's own tensor is included: without its guard, torch would read from address 0 and end the process.
        for each in (tensor, *views):
            make_unreadable(each, f"of {KINDS[kind]} ({kind}), {_WHERE}")
            self._unreadable.setdefault(kind, []).append(weakref.ref(each))

    def is_away(self, tensor: Tensor) -> bool:
        """Return True if the memory of a tensor is off the device."""
        with unguarded():
            return bool(self._by_storage) and storage_id(tensor) in self._by_storage

    def values(self, tensor: Tensor) -> Tensor:
        """Return a tensor to read values from: the tensor itself, or its copy on the host if it is parked."""
        return self._by_storage[storage_id(tensor)].copy_of(tensor) if self.is_away(tensor) else tensor

    def bring_back(self, *, non_blocking: bool) -> None:
        """Bring all parked memory back to the device. The caller clears ``kinds`` once all ranks have done so.

        Args:
            non_blocking: True to return before the copies to the device have finished.

        Raises:
            torch.OutOfMemoryError: the device has no room. Memory brought back so far stays, and the call can be
                repeated.
        """
        for kind in list(self._parked):
            # Each storage is removed from the list at once, because the device may have no room for the next one.
            while self._parked[kind]:
                self._parked[kind][-1].bring_back(non_blocking=non_blocking)
                parked = self._parked[kind].pop()
                self._by_storage = {place: other for place, other in self._by_storage.items() if other is not parked}
            # Only now: if the loop above raises, all tensors of this kind still refuse reads, even restored ones.
            for ref in self._unreadable.pop(kind, ()):
                if (tensor := ref()) is not None:
                    make_readable(tensor)
            del self._parked[kind]

    def require(self, what: str, needs: Collection[str]) -> None:
        """Raise if memory that a call needs is off the device.

        Args:
            what: description of the call, for the error.
            needs: names of the memory, keys of ``KINDS``.

        Raises:
            RuntimeError: some of it is off the device.
        """
        # Each forward calls this method, so the usual case returns at once.
        if not self.kinds:
            return
        away = [f"{words} ({kind})" for kind, words in KINDS.items() if kind in self.kinds and kind in needs]
        if away:
            raise RuntimeError(f"{what} needs {', '.join(away)}, {_WHERE}")


# Open uses of GatheredParameters.


class GatherContext(Protocol):
    """One open use of ``GatheredParameters``, with the whole values of its parameters."""

    def has_gathered(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Return True if this use has gathered a parameter and keeps the edits of that rank (None: only reads)."""
        ...

    def lower(self) -> None:
        """Cast the gathered values to the dtypes that the model computes with.

        Raises:
            RuntimeError: edits are kept, and the cast would round them.
        """
        ...


class GatherContexts:
    """The open uses of ``GatheredParameters`` on one engine. The object is true while any is open.

    If all parameters have their whole values, a forward without gradients gathers nothing and needs no other rank. So
    each rank may generate as many tokens as it needs, and each weight is gathered only once.

    Attributes:
        open: uses that are open.
        computed: True to give parameters that are gathered only to be read the dtype that the model computes with.
            DeepSpeed's engine sets it: its scripts send values to other processes, which expect that dtype.
    """

    computed = False

    def __init__(self) -> None:
        self.open: list[GatherContext] = []
        self._computing = False

    def __bool__(self) -> bool:
        return bool(self.open)

    def enter_context(self, context: GatherContext) -> None:
        """Note that a use has gathered its parameters."""
        self.open.append(context)
        self._computing = False

    def leave_context(self, context: GatherContext) -> None:
        """Note that a use is about to shard its parameters again."""
        self.open.remove(context)
        self._computing = False

    def has_gathered(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Return True if an open use has gathered a parameter; see :meth:`GatherContext.has_gathered`."""
        return any(context.has_gathered(parameter, modifier_rank) for context in self.open)

    @property
    def computing(self) -> bool:
        """True if the running forward, or the last one, computes with gathered values."""
        return self._computing and bool(self.open)

    def serve(self, units: Iterable[Unit], *, outermost: bool) -> bool:
        """Return True if a forward computes with gathered values, so that its hooks gather nothing.

        Args:
            units: all units of the model.
            outermost: True if the forward begins; False for a module inside it.

        Raises:
            RuntimeError: all values are gathered, but edits of them would be rounded.
        """
        if outermost:
            # With gradients, backward would reach values that are sharded again, and reduce no gradient.
            whole = not torch.is_grad_enabled() and not any(is_guarded(p) for unit in units for p in unit.parameters)
            if whole:
                for context in self.open:
                    context.lower()
            self._computing = whole
        return self._computing
