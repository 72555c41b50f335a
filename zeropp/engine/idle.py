"""What refuses calls that have to wait for the end of something: a pass, a loan, an average, or time off the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from zeropp._compat import compiles_backwards
from zeropp.engine.loans import Loans
from zeropp.engine.parking import Parking
from zeropp.order.known_orders import Phase

__all__ = ["Occupied", "refuse_compiled_autograd", "refuse_occupied", "refuse_retired"]


class Occupied(Protocol):
    """An engine, as far as it tells what it is in.

    Attributes:
        closed: it was taken off its model.
        retired: it was destroyed, or the model is being wrapped again.
        phase: the running pass.
        loans: uses of GatheredParameters that are open.
        averaged: main weights hold an average.
        parking: what is off the device.
    """

    closed: bool
    retired: bool
    phase: Phase
    loans: Loans
    averaged: bool
    parking: Parking

    @property
    def running(self) -> bool:
        """Whether a pass is running."""
        ...


def refuse_occupied(engine: Occupied, what: str, *, lent: bool, averaged: bool, needs: Collection[str]) -> None:
    """See :meth:`zeropp.engine.engine.Engine.require_idle`."""
    if engine.closed:
        raise _ended(what)
    if engine.running:
        raise RuntimeError(f"{what} was called in the middle of a {engine.phase.value}; call it between passes")
    if engine.loans and not lent:
        also = ", or gather all of its parameters and call it under torch.no_grad()" if what == "the model" else ""
        raise RuntimeError(f"{what} was called inside GatheredParameters; leave that first{also}")
    if engine.averaged and not averaged:
        raise RuntimeError(f"{what} was called while an average of the weights is applied; leave that first")
    engine.parking.require(what, needs)


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


def refuse_retired(engine: Occupied, what: str) -> None:
    """Refuse to train what stays partitioned behind an engine that was destroyed: scripts that go on have not meant it.

    Raises:
        RuntimeError: it is retired.
    """
    if engine.retired:
        raise _ended(what)


def _ended(what: str) -> RuntimeError:
    """What is raised by a call that comes too late."""
    return RuntimeError(
        f"{what} was called after close(), engine.destroy() or another wrapping of the model had ended this engine; "
        "Accelerate's free_memory() destroys, and with it transformers' Trainer.train() at its start. Wrap the model "
        "again, or after close() one that has its values"
    )
