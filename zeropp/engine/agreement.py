"""How ranks agree outside the steady state, and how they tell each other what went wrong.

In the steady state nothing is exchanged beside weights and gradients: every rank follows the sequence it has learned
together with the others. Messages here are only sent while a sequence is learned, when all ranks leave it together,
and when a rank gives up waiting.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from zeropp._compat import default_store
from zeropp.comm import Comm
from zeropp.stalls import make_stalls

__all__ = ["ADDED", "LENT", "SAVED", "TRAINED", "Agreement"]

_T = TypeVar("_T")
_WIDTH = 8  # integers in an exchange
# Kinds of exchanges between passes; the schedule has its own below 100.
_MEET, LENT, SAVED, TRAINED, ADDED = 100, 101, 102, 103, 104

_TOGETHER = 0.2  # seconds within which ranks that do the same come to the same place
_GRACE = 3.0  # seconds a failing rank waits for the others' accounts of the same failure


class Agreement:
    """Exchange of small rows of integers, and of last words."""

    def __init__(self, comm: Comm, hang_timeout: float, device: torch.device, *, at_once: bool) -> None:
        self.comm = comm
        self.hang_timeout = hang_timeout
        self.at_once = at_once  # work on lanes is done in the model's own order, which stands still for it
        self.stalls = make_stalls(device, comm.ledger.add_wait)
        self.lost: str | None = None  # the common error, once it was raised: nothing is waited for after it
        self._incident = f"{comm.job}/hang"

    def wait(self, wait: Callable[[float], bool], doing: str, exposed: tuple[str, str] | None = None) -> None:
        """Call ``wait(hang_timeout)``; raise the common error if it is in vain or what it waits for has failed.

        Args:
            wait: whether what is waited for has come within so many seconds.
            doing: for the error.
            exposed: (unit, kind) in the ledger that the time goes to.
        """
        timing = contextlib.nullcontext() if exposed is None else self.stalls.timing(*exposed)
        with timing, self.watching(doing):
            if not wait(self.hang_timeout):
                raise self.failure(doing)

    @contextlib.contextmanager
    def watching(self, *doing: str) -> Iterator[None]:
        """Turn an error of a collective into the common error; at once if the ranks have lost each other before."""
        if self.lost is not None:
            raise RuntimeError(self.lost)
        try:
            yield
        except RuntimeError as error:
            alone = self.comm.world == 1 and isinstance(error, torch.OutOfMemoryError)  # nobody waits: try less
            if self.lost is not None or alone:
                raise
            raise self.failure(f"{' '.join(doing)} ({str(error).splitlines()[0]})") from error

    @contextlib.contextmanager
    def issuing(self, doing: str, unit: str, kind: str) -> Iterator[None]:
        """Watch a unit's work being queued; where it is done at once, its time is told under this kind."""
        timing = self.stalls.timing(unit, kind) if self.at_once else contextlib.nullcontext()
        with timing, self.watching(doing, unit):
            yield

    def exchange(self, kind: int, values: list[int], doing: str) -> list[list[int]]:
        """Every rank's values; all ranks must be at the same kind of exchange.

        Raises:
            RuntimeError: some rank did not come within ``hang_timeout``, or is at another kind of exchange.
        """
        row = [kind, *values, *[0] * (_WIDTH - len(values))]  # one width, or ranks at different kinds could not talk
        with self.watching(doing):
            rows = self.comm.all_gather_ints(row)
        if any(row[0] != kind for row in rows):
            others = [rank for rank, row in enumerate(rows) if row[0] != kind]
            raise self.failure(f"{doing}, while ranks {others} are somewhere else in the program")
        return [row[1 : 1 + len(values)] for row in rows]

    def meet(self, what: str) -> None:
        """Make sure that every rank has come to the same call, before it gathers or changes anything.

        Raises:
            RuntimeError: some rank has not.
        """
        code = zlib.crc32(what.encode())
        rows = self.exchange(_MEET, [code], f"at {what}")
        if any(row != [code] for row in rows):
            raise self.failure(f"at {what}, and others at another collective call")

    def exchange_objects(self, value: _T, doing: str) -> list[_T]:
        """Every rank's picklable value; for the end of a learned phase and for reports."""
        with self.watching(doing):
            return self.comm.all_gather_objects(value)

    def all_come(self, incident: int) -> bool:
        """Whether all ranks call this for the same incident at about the same time; one answer for all that call.

        Args:
            incident: 0, 1, 2, ...; all ranks have agreed on something between one and the next.
        """
        comm = self.comm
        if comm.world == 1 or comm.backend == "fake":
            return True
        store, name = default_store(), f"{comm.job}/leave/{incident}"
        if comm.rank == 0 and incident > 1:
            for key in ("count", "answer"):
                store.delete_key(f"{comm.job}/leave/{incident - 2}/{key}")
        if store.add(f"{name}/count", 1) == comm.world:
            return store.compare_set(f"{name}/answer", "", "all") == b"all"
        until = time.monotonic() + _TOGETHER
        while time.monotonic() < until and not store.check([f"{name}/answer"]):
            time.sleep(0.001)
        return store.compare_set(f"{name}/answer", "", "some") == b"all"

    def failure(self, doing: str) -> RuntimeError:
        """The error to raise when waiting is over: what this rank waits for, and what the others say."""
        comm = self.comm
        accounts = self._collect(f"rank {comm.rank} was {doing}")
        self.lost = (
            f"the ranks are no longer in step (hang_timeout {self.hang_timeout:g} s): {accounts}. No weight was "
            "changed by this step. Every rank must run the same modules in the same order; look for code that "
            "depends on the rank or on its data, or for a rank that failed earlier. Slow is not hung: if a rank was "
            'only late, raise {"zeropp": {"hang_timeout": seconds}}'
        )
        return RuntimeError(self.lost)

    def _collect(self, own: str) -> str:
        comm = self.comm
        if comm.world == 1 or comm.backend == "fake":
            return own
        keys = [f"{self._incident}/{rank}" for rank in range(comm.world)]
        try:
            return self._ask_around(default_store(), keys, own)
        except RuntimeError:  # the process that keeps the store is gone, perhaps the very one that failed
            return f"{own}; the others cannot be asked, since the job's store is gone"

    def _ask_around(self, store: dist.Store, keys: list[str], own: str) -> str:
        comm = self.comm
        store.set(keys[comm.rank], own)
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and not store.check(keys):
            time.sleep(0.05)
        heard = [key for key in keys if store.check([key])]
        accounts = [store.get(key).decode() for key in heard]
        silent = [rank for rank, key in enumerate(keys) if key not in heard]
        if silent:
            accounts.append(f"ranks {silent} said nothing")
        return "; ".join(accounts)
