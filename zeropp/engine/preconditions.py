"""Checks that refuse a call at the wrong time, and the states of an engine that they look at.

A call may come in the middle of a pass, inside ``GatheredParameters``, while an average of the weights is applied,
while its memory is off the device, or after the engine has ended. :func:`check_idle` looks at all of these,
:class:`GatherContexts` knows which uses of ``GatheredParameters`` are open, and :class:`Parking` has the memory.

[Note: states off the device] Between training phases something else wants the device: rollouts, an evaluation. What is
not needed then is parked by its name (`zeropp.offload.parked`): storages stay and lose their memory, so that every view
is right again afterwards. All ranks park and bring back the same names together, so that none waits for another that
is refused. Whoever comes between says what it needs (`Engine.require_idle`), and is refused before it changes or sends
anything. Whole weights can be read all the same, since gathering them may begin with the bytes on the host.
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
    """The parts of an engine that rule out calls.

    Attributes:
        state: see :class:`EngineState`.
        phase: the running pass.
        gather_contexts: uses of GatheredParameters that are open.
        parking: memory that is off the device.
    """

    state: EngineState
    phase: Phase
    gather_contexts: GatherContexts
    parking: Parking


def check_idle(
    engine: EngineActivity, what: str, *, inside_gather: bool, averaged: bool, needs: Collection[str]
) -> None:
    """See :meth:`zeropp.engine.engine.Engine.require_idle`."""
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
    """Refuse to train what stays partitioned behind an engine that was destroyed: scripts that go on have not meant it.

    Raises:
        RuntimeError: it is retired.
    """
    if EngineState.RETIRED in engine.state:
        raise _ended(what)


def refuse_compiled_autograd() -> None:
    """Refuse a backward that is compiled, or a forward that one may follow.

    Raises:
        RuntimeError: compiled autograd is on.
    """
    if compiles_backwards():
        # It takes saved weights before any hook has run that would gather them; torch would say that they were edited.
        raise RuntimeError(
            "compiled autograd is on, and cannot be used with a model managed by zeropp: it reads weights before the "
            "hooks that gather them have run. Leave torch._dynamo.config.compiled_autograd False, and the context of "
            "torch._dynamo.compiled_autograd out; torch.compile alone works, and compiles forward and backward"
        )


def _ended(what: str) -> RuntimeError:
    """The error of a call that comes too late."""
    return RuntimeError(
        f"{what} was called after close(), engine.destroy() or another wrapping of the model had ended this engine; "
        "Accelerate's free_memory() destroys, and with it transformers' Trainer.train() at its start. Wrap the model "
        "again, or after close() one that has its values"
    )


# Memory off the device.

KINDS = {
    "optim_states": "optimizer states",
    "hp_params": "main weights",
    "lp_params": "weights that passes begin with",
    "lp_grads": "gradients",
    "carried_errors": "carried errors",
}
"""What each name stands for; all but the last name are DeepSpeed's."""


NOTHING: frozenset[str] = frozenset()
COMPUTING = frozenset(["lp_params"])
TRAINING = frozenset(["lp_params", "lp_grads", "carried_errors"])
WEIGHTS = frozenset(["hp_params", "lp_params"])
EVERYTHING = frozenset(KINDS)
_WHERE = "off the device since optimizer.offload_states(); call optimizer.reload_states() first, on every rank"


def of_a_forward() -> frozenset[str]:
    """The names of memory that a forward needs which begins here."""
    return TRAINING if torch.is_grad_enabled() else COMPUTING


class Parking:
    """Parked memory of one engine, by name; see [Note: states off the device].

    Attributes:
        kinds: names of which something is away on any rank, and until all ranks have it back.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._parked: dict[str, list[Parked]] = {}
        self._by_storage: dict[int, Parked] = {}
        # Weakly: what is dropped meanwhile is dropped.
        self._unreadable: dict[str, list[weakref.ref[Tensor]]] = {}

    def park(
        self, kind: str, tensor: Tensor, views: Sequence[Tensor], *, keep: bool, pinned: bool, non_blocking: bool
    ) -> None:
        """Give back the memory under a tensor; see :class:`Parked`.

        Args:
            kind: its name in ``KINDS``.
            tensor: over all of the storage.
            views: others of it that somebody holds, and might read.
            keep: whether its bytes matter.
            pinned: see :class:`Parked`.
            non_blocking: see :class:`Parked`.
        """
        # Before the tensor refuses to be asked.
        place = storage_id(tensor)
        parked = Parked(tensor, keep=keep, pinned=pinned, non_blocking=non_blocking)
        # From here on it is away, whatever becomes of the rest.
        self.kinds.add(kind)
        self._by_storage[place] = parked
        self._parked.setdefault(kind, []).append(parked)
        # The first is the engine's own: a use that nobody thought of raises, too, and does not end the process.
        for each in (tensor, *views):
            make_unreadable(each, f"of {KINDS[kind]} ({kind}), {_WHERE}")
            self._unreadable.setdefault(kind, []).append(weakref.ref(each))

    def is_away(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory has been given back."""
        with unguarded():
            return bool(self._by_storage) and storage_id(tensor) in self._by_storage

    def values(self, tensor: Tensor) -> Tensor:
        """A tensor's values, to read: itself, or those on the host."""
        return self._by_storage[storage_id(tensor)].copy_of(tensor) if self.is_away(tensor) else tensor

    def bring_back(self, *, non_blocking: bool) -> None:
        """Bring back everything; ``kinds`` are cleared when other ranks have theirs.

        Raises:
            torch.OutOfMemoryError: the device has no room. What is back is back, and this can be called again.
        """
        for kind in list(self._parked):
            # One by one, noted at once: there may be no room for the next.
            while self._parked[kind]:
                self._parked[kind][-1].bring_back(non_blocking=non_blocking)
                parked = self._parked[kind].pop()
                self._by_storage = {place: other for place, other in self._by_storage.items() if other is not parked}
            # Not before the last storage: a slice and its gradient, say, are read together.
            for ref in self._unreadable.pop(kind, ()):
                if (tensor := ref()) is not None:
                    make_readable(tensor)
            del self._parked[kind]

    def require(self, what: str, needs: Collection[str]) -> None:
        """Refuse something that needs what is away.

        Raises:
            RuntimeError: with what to call.
        """
        # Asked by every forward, for which nearly always nothing is away.
        if not self.kinds:
            return
        away = [f"{words} ({kind})" for kind, words in KINDS.items() if kind in self.kinds and kind in needs]
        if away:
            raise RuntimeError(f"{what} needs {', '.join(away)}, {_WHERE}")


# Open uses of GatheredParameters.


class GatherContext(Protocol):
    """Whole values of parameters inside GatheredParameters."""

    def has_gathered(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Tell whether a parameter has its values from here, and edits of that rank are kept."""
        ...

    def lower(self) -> None:
        """Let parameters have the dtypes that they are computed with.

        Raises:
            RuntimeError: edits would be rounded.
        """
        ...


class GatherContexts:
    """Uses of ``GatheredParameters`` on one engine; true while any is open.

    Where all parameters have their whole values, a forward without gradients needs no other rank: hooks have nothing to
    gather. So ranks may generate as many tokens as each of them has to, and no weight travels twice.

    Attributes:
        open: the uses that are open.
        computed: values that are gathered to be read have the dtype that the model computes with. A training engine
            sets it, since its scripts send values on to others, and expect the dtype that parameters have outside.
    """

    computed = False

    def __init__(self) -> None:
        self.open: list[GatherContext] = []
        self._computing = False

    def __bool__(self) -> bool:
        return bool(self.open)

    def enter_context(self, context: GatherContext) -> None:
        """Parameters have been gathered."""
        self.open.append(context)
        self._computing = False

    def leave_context(self, context: GatherContext) -> None:
        """Parameters are about to be partitioned again."""
        self.open.remove(context)
        self._computing = False

    def has_gathered(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Tell whether an open use has a parameter's values; see :meth:`GatherContext.has_gathered`."""
        return any(context.has_gathered(parameter, modifier_rank) for context in self.open)

    @property
    def computing(self) -> bool:
        """True if the forward that is running, or ran last, computes with gathered values."""
        return self._computing and bool(self.open)

    def serve(self, units: Iterable[Unit], *, outermost: bool) -> bool:
        """Tell whether a forward can run, or goes on, with gathered values.

        Raises:
            RuntimeError: it can, and edits would be rounded.
        """
        if outermost:
            # A graph would lead to values that go back, and through which no gradient is reduced.
            whole = not torch.is_grad_enabled() and not any(is_guarded(p) for unit in units for p in unit.parameters)
            if whole:
                for context in self.open:
                    context.lower()
            self._computing = whole
        return self._computing
