"""Agreement between ranks outside the steady state, and the ways in which they tell each other what went wrong.

In the steady state a pass exchanges nothing beside weights and gradients: every rank follows the order it has learned
together with the others. Messages here are sent while an order is learned, where known orders part, at the end of
passes that vary, after errors, and when a rank gives up waiting; and between passes, where all ranks must come to the
same call, such as ``state_dict()``, or bring the same settings to a step.

`Watch` warns long before waiting becomes an error. The thread that waits may be inside a call of torch and cannot
speak. So another one looks at it now and then, puts the rank's account into the store once it has waited for long,
reads the others' and logs them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

import zeropp.comm.watch as status
from zeropp.comm.hops import Comm, make_stalls
from zeropp.comm.process_groups import CollectiveError, name_ranks, what_ended
from zeropp.comm.streams import Event
from zeropp.comm.threads import ForkedError
from zeropp.comm.timers import Patrol
from zeropp.comm.watch import RankStatus, StatusBoard, board_of, by_text, code_of, explain, likely_cause, make_monitor

__all__ = ["ADDED", "AT_WORK", "GATHERED", "MICRO_BATCHES", "SAVED", "SETTINGS", "TRAINED", "Agreement"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
# An exchange of another kind must be as long: gloo does not report messages of other sizes, it ends the process.
_WIDTH = 8  # integers in an exchange, behind the one that tells its kind and pass
# Kinds of exchanges between passes; the schedule has its own below 100.
_SAME_CALL, GATHERED, SAVED, TRAINED, ADDED, SETTINGS, AT_WORK, _OBJECTS = 100, 101, 102, 103, 104, 105, 106, 107
MICRO_BATCHES, _CLOSING = 108, 109

_FIRST_LOOK, _RARELY = 1.0, 5.0  # seconds between looks whether another rank has failed: the first, and the longest
_GRACE = 2.0  # seconds a failing rank waits for the others' accounts of the same failure
_FEW = 64  # ranks that may ask the store at the same moment
_NEARLY = 0.9  # of hang_timeout: gloo's clock is another one
_MEETING = 10.0  # seconds a rank that closes waits for the others to close


class Agreement:
    """Exchange of small rows of integers, and of last words."""

    def __init__(
        self,
        comm: Comm,
        hang_timeout: float,
        warn_after: float | None,
        device: torch.device,
        *,
        overlap: bool,
    ) -> None:
        """Start watching, if there are other ranks; ``overlap`` tells whether work on comm streams runs beside the
        model.
        """
        # A fake group answers at once, and a single rank waits for nobody: neither needs a thread that watches.
        alone = comm.world == 1 or comm.backend == "fake"
        self.comm = comm
        self._alone = alone
        self.hang_timeout = hang_timeout
        self.warn_after = warn_after
        # Without ``overlap_comm`` work on comm streams is done in the model's own order, which stands still for it.
        self.at_once = not alone and not overlap
        self.stalls = make_stalls(device, comm.ledger.add_wait)
        # The common error, once it was raised. Nothing is waited for after it.
        self.lost: str | None = None
        self.where = ""  # the pass that this rank is in, in words
        self.beyond = ""  # see RankStatus
        self._place = 0  # tells that pass from others; equal on every rank
        self._step_stopped = False  # whether an exception has ended the last step
        self._stepped = False  # whether stepped weights are being queued for where they are cached
        self.unconfirmed = False  # whether a step was taken whose sum no host has read yet
        self.edits = 0  # follows from this rank's edits of frozen weights that all ranks hold; ranks compare it
        self._sent: list[Event] = []  # ends of what was queued so
        self._under_way: list[Event] = []  # ends of what the host steps
        self._when_lost: list[Callable[[], None]] = []
        self.board = board_of(comm.ranks, comm.rank)
        self._code = code_of(comm.job)
        if not alone:
            self.board.join()
        # gloo's own waits end with their time or with a connection, so it is closed.
        hang_up = partial(comm.hang_up, hops=self.at_once)
        self.watch = Watch(self.board, self._code, comm.rank, comm.world, warn_after, hang_up, alone=alone)
        failed = partial(self.board.some_rank_failed, self._code)
        self.monitor = None if alone else make_monitor(device, hang_timeout, self._give_up, failed)
        if self.monitor is not None:
            comm.tell_issued(self.monitors)
        comm.on_lost_elsewhere(self._lost_elsewhere)

    def wait_for_event(
        self, arrives: Callable[[float], bool], doing: str, timed: tuple[str, str] | None = None
    ) -> None:
        """Call ``arrives(hang_timeout)``; raise the common error if it is in vain or what it waits for has failed.

        Args:
            arrives: whether what is waited for has come within so many seconds.
            doing: for the error.
            timed: (unit, kind) in the ledger that the time goes to.
        """
        timing = contextlib.nullcontext() if timed is None else self.stalls.timing(*timed)
        with timing, self.watching(doing):
            until = time.monotonic() + self.hang_timeout
            pause = _FIRST_LOOK
            while not arrives(min(pause, max(until - time.monotonic(), 0.0))):
                waited = time.monotonic() >= until
                if waited or self._others_failed():
                    # Raised inside ``watching``, which lets it through: ``lost`` is set by then.
                    raise self.failure(doing, waited=waited)
                # Less and less often: many ranks may be asking one store, and what fails soon is heard of soon.
                pause = min(2 * pause, _RARELY)

    def on_loss(self, action: Callable[[], None]) -> None:
        """Do something once the ranks have lost each other, before communicators are aborted."""
        self._when_lost.append(action)

    @contextlib.contextmanager
    def watching(self, *doing: str, call: str = "", where: str = "") -> Iterator[None]:
        """Turn an error of a collective into the common error; at once if the ranks have lost each other before.

        Args:
            doing: for the error.
            call: the collective call of the user that this is a part of, if ranks may come to it one by one.
            where: the step, if the rank is in no pass.
        """
        if self.lost is not None:
            raise RuntimeError(self.lost)
        began = time.monotonic()
        try:
            # Formed only when somebody asks: most waits are short, and this runs at every use of a unit.
            with self.watch.waiting(lambda: RankStatus(" ".join(doing), call, where or self.where, beyond=self.beyond)):
                yield
            if self.lost is not None:  # meanwhile, on the monitor's thread: what was waited for has not come
                raise RuntimeError(self.lost)
        # Of this process alone: no rank is to blame, and nothing of its parent's is touched.
        except ForkedError:
            raise
        # A disk's errors come from comm streams, too.
        except (RuntimeError, OSError) as error:
            # Other ranks would wait in a collective to which this one does not come. Alone, out of memory stays
            # torch's own error, after which one may try less.
            alone = self.comm.world == 1 and isinstance(error, torch.OutOfMemoryError)
            if alone:
                raise
            if self.lost is not None:  # raised inside, or on the monitor's thread while this went wrong, too
                raise RuntimeError(self.lost) from None
            account = RankStatus(" ".join(doing), call, where or self.where, beyond=self.beyond)
            if isinstance(error, OSError):
                raise self._lose(
                    replace(account, until=", until that failed", failure=str(error), unsure=True)
                ) from error
            ended = what_ended(error)
            # Connections that the watching thread has closed, since another rank has failed, end with such words, too.
            if ended == "time ran out":
                if time.monotonic() - began >= _NEARLY * self.hang_timeout:
                    raise self._lose(account, waited=True) from None
                ended = "its connections were closed"
            if ended is not None:
                raise self._lose(replace(account, until=f", until {ended}")) from None
            first = (str(error).splitlines() or [""])[0]
            # An error of this rank's own, as where memory runs out while work is queued: the others would wait for it.
            own = not isinstance(error, (CollectiveError, torch.distributed.DistError))
            failure = f"{type(error).__name__}: {first}" if own else ""
            raise self._lose(replace(account, until=f" ({first})", failure=failure)) from error

    @contextlib.contextmanager
    def issuing(self, doing: str, unit: str, kind: str) -> Iterator[None]:
        """Watch a unit's work being queued; where it is done at once, its time is told under this kind."""
        timing = self.stalls.timing(unit, kind) if self.at_once else contextlib.nullcontext()
        with timing, self.watching(doing, unit):
            yield

    def queued(self, event: Event, unit: str, kind: str) -> None:
        """A unit's work was queued and ends with ``event``."""
        if self._stepped:
            self._sent.append(event)
        if self.monitor is not None:
            self.monitor.watch_event(event, f"the {kind} of unit {unit!r}")

    def monitors(self, event: Event, doing: str) -> None:
        """Other work that waits for other ranks was queued; ``doing`` says which, after "waiting for"."""
        if self.monitor is not None:
            self.monitor.watch_event(event, doing)

    def _give_up(self, waited_for: str, *, waited: bool) -> None:
        """On the monitor's thread: the device has not come on for ``hang_timeout``, or another rank has failed."""
        if self.lost is None:
            # The main thread may be in a launch, and never come to raise it.
            self._lose(RankStatus(f"waiting for {waited_for}", where=self.where), waited=waited, log=True)

    def step_under_way(self, events: list[Event]) -> None:
        """The host steps weights until ``events``; they are the last step's."""
        # Those of the step before have been waited for: their gradients would have been written over.
        self._under_way = events

    @contextlib.contextmanager
    def sending_weights(self, *, stepped: bool) -> Iterator[None]:
        """Let errors inside say that weights were ``stepped`` before."""
        self._stepped = stepped
        self._sent.clear()
        yield
        self._stepped = False  # not after an error, which is told later

    def enter(self, where: str, place: int) -> None:
        """This rank begins a pass; ``place`` tells it from others, on every rank alike."""
        self.where = where
        self._place = place
        self.beyond = ""

    def go_on(self, *, met: bool = False) -> None:
        """Note that this rank begins something with the others; see [Note: one rank's exception].

        Args:
            met: the others have come, or this is a step. A step that has failed may have left them in its sums, so a
                pass that begins after it does not end the stop.
        """
        if self.lost is None and (met or not self._step_stopped):
            self._step_stopped = False
            # Nearly always this rank has nothing to take back.
            if self.board.ends:
                self.board.go_on(self._code)

    def leave(self) -> None:
        """This rank is in no pass any more."""
        self.where = ""
        self._place = 0
        self.beyond = ""

    def exchange(self, kind: int, values: list[int], doing: str, call: str = "") -> list[list[int]]:
        """Every rank's values; all ranks must be at the same kind of exchange, in the same pass, or in none.

        Args:
            kind: of exchange.
            values: this rank's.
            doing: for the error.
            call: see :meth:`watching`.

        Raises:
            RuntimeError: some rank did not come within ``hang_timeout``, or is somewhere else.
        """
        # In one number, so that a row is no wider for it: a place has 32 bits and a kind 8, of 64.
        head = self._place << 8 | kind
        # One width, or ranks at different kinds could not talk.
        row = [head, *values, *[0] * (_WIDTH - len(values))]
        with self.watching(doing, call=call):
            rows = self.comm.all_gather_ints(row)
        if any(row[0] != head for row in rows):
            raise self.failure(doing, call)
        self.go_on(met=True)
        return [row[1 : 1 + len(values)] for row in rows]

    def require_same_call(self, what: str) -> None:
        """Make sure that every rank has come to the same call, before it gathers or changes anything.

        Raises:
            RuntimeError: some rank has not, or has edited weights by itself.
        """
        # Not hash(): of strings it is another number in every process.
        code = zlib.crc32(what.encode())
        rows = self.exchange(_SAME_CALL, [code, self.edits], f"at {what}", what)
        if any(row[0] != code for row in rows):
            raise self.failure(f"at {what}", what)
        other = next((rank for rank, row in enumerate(rows) if row[1] != rows[0][1]), None)
        if other is not None:
            # Every rank comes to this, so they are not lost to each other.
            raise RuntimeError(
                f"{what} was called after ranks 0 and {other} had made different edits of frozen weights, as by "
                "merge_and_unload() on one rank alone; each rank has edited its own copy, and what they keep together "
                "would be of both kinds. Make the same edits on every rank"
            )

    def exchange_objects(self, value: _T, doing: str) -> list[_T]:
        """Every rank's picklable value; for the end of a learned phase and for reports."""
        if self.comm.world == 1 or self.comm.backend == "fake":
            return [value] * self.comm.world
        own = pickle.dumps(value)
        # Sizes by an exchange of the one width: ranks that are somewhere else hear of it, see above.
        sizes = [size for (size,) in self.exchange(_OBJECTS, [len(own)], doing)]
        with self.watching(doing):
            return self.comm.all_gather_sized(own, sizes)

    def failure(self, doing: str, call: str = "", where: str = "", *, waited: bool = False) -> RuntimeError:
        """The error to raise when waiting is over: the likely cause, and what each rank was doing.

        Args:
            doing: of this rank.
            call: see :meth:`watching`.
            where: see :meth:`watching`.
            waited: whether ``hang_timeout`` was reached.
        """
        return self._lose(RankStatus(doing, call, where or self.where, beyond=self.beyond), waited=waited)

    def meet_to_close(self) -> dict[int, list[str]] | None:
        """Wait a few seconds for all ranks to close, which ranks do before they destroy communicators.

        Returns:
            Names of the communicators that each global rank uses no more; None if a rank does not come.
        """
        comm = self.comm
        # The user may have ended torch.distributed before, and all groups with it.
        if not comm.communicates or not comm.has_groups:
            return {}
        if self.lost is not None:
            return None
        head = self._place << 8 | _CLOSING
        seconds = min(self.hang_timeout, _MEETING)
        try:
            # First a row as wide as any other exchange, in which other ranks may be.
            if all(row[0] == head for row in comm.all_gather_ints([head, *[0] * _WIDTH], seconds)):
                names = comm.all_gather_objects(comm.unused_after, seconds)
                return dict(zip(comm.ranks, names, strict=True))
            late = "are in another call"
        except RuntimeError as error:
            late = f"do not close theirs within {seconds:g} s ({error})"
        _log.info(
            "rank %d closes its optimizer, and other ranks %s; it aborts the communicators that it would have "
            "destroyed together with them",
            comm.rank,
            late,
        )
        account = RankStatus("closing its optimizer", failure="it closed its optimizer before the others")
        # For ranks that train on and would wait for this one.
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.board.lose(self._code, account, closed=True)
        return None

    def close(self) -> None:
        """Stop watching."""
        self.watch.close()
        if self.monitor is not None:
            self.monitor.close()

    def stopped(self, error: BaseException | None, where: str = "", *, step: int | None = None) -> None:
        """Tell ranks that wait for this one that an exception has ended what they do together.

        See [Note: one rank's exception].

        Args:
            error: the exception, if it is known.
            where: it was raised, if the rank is in no pass.
            step: the place of a step, if it was one; the same on all ranks, and of no pass.
        """
        if self._alone or self.lost is not None:
            return
        self._step_stopped |= step is not None
        failure = "an exception" if error is None else _in_a_line(error)
        account = RankStatus(f"in {self.where or where}", failure=failure, unsure=step is not None)
        self.board.stop(self._code, self._place if step is None else step, account, at_once=True)

    @contextlib.contextmanager
    def reporting_errors(self, where: str, *, step: int | None = None) -> Iterator[None]:
        """Call :meth:`stopped` if what is inside raises an exception."""
        try:
            yield
        except BaseException as error:
            self.stopped(error, where, step=step)
            raise

    def found_stopped(self, failure: str) -> None:
        """:meth:`stopped`, where the exception is not known, and nobody may wait for the store."""
        if not self._alone and self.lost is None and not self.board.is_stopped(self._code):
            account = RankStatus(f"in {self.where}", failure=failure)
            self.board.stop(self._code, self._place, account, at_once=False)

    def _lose(self, account: RankStatus, *, waited: bool = False, log: bool = False) -> RuntimeError:
        comm = self.comm
        accounts = {comm.rank: account}
        store_is_gone = False
        if comm.world > 1 and comm.backend != "fake":
            try:
                # Over the store: ranks that have lost each other can no longer meet in a collective.
                accounts = self._ask_around(account)
            # The process that keeps the store is gone or stands still, perhaps the very one that failed.
            # And nothing that asking raises may keep the abort from coming.
            except Exception:
                store_is_gone = True
        parts = [explain(accounts, comm.world)]
        if store_is_gone:
            parts[0] += "; the others cannot be asked, since the job's store is gone or does not answer"
        # What has not been sent may be stepped on this rank and not on others: its refresh was queued behind the step,
        # and does not end without them. A disk that has failed may hold what was to be stepped.
        failed = any(each.unsure for each in accounts.values())
        parts.append(
            "This rank has stepped weights that others may not have: go on from a checkpoint"
            if self._stepped or (self.unconfirmed and comm.world > 1) or not self._has_sent()
            else "Some ranks may have stepped weights, and others not: go on from a checkpoint"
            if failed
            else "No weight was changed by this step"
        )
        if waited:
            parts.append(
                f"hang_timeout, {self.hang_timeout:g} s, was reached: slow is not hung, so if a rank was only late, "
                'raise {"zeropp": {"hang_timeout": seconds}} and the timeout given to init_process_group'
            )
        first = self.lost is None
        self.lost = ". ".join(parts)
        if first:
            if log:
                _log.error("rank %d: %s", comm.rank, self.lost)
            self._end_work()
            comm.tell_sharers(self.lost)
        return RuntimeError(self.lost)

    def _lost_elsewhere(self, reason: str) -> None:
        """Another engine has aborted process groups that this one uses."""
        if self.lost is None:
            self.lost = (
                f"another model of this process has lost its ranks, and shares process groups with this: {reason}"
            )
            self._end_work()
            self.comm.tell_sharers(reason)
            # Whoever waits in this model is told what has stopped the rank in the other.
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.board.lose(self._code, RankStatus("using process groups that another model has lost"), closed=True)

    def _end_work(self) -> None:
        # Aborting comes last: by then no comm stream waits for a collective that may never end.
        for action in (*self._when_lost, self.comm.abort):
            try:
                action()
            except Exception as error:  # the others must still be done, and the error be raised
                _log.error("after the ranks lost each other: %s", error)

    def _has_sent(self) -> bool:
        """Tell whether weights are stepped, and have come to where they are cached."""
        try:
            return all(event.done() for event in (*self._sent, *self._under_way))
        except RuntimeError:  # a device that has failed answers nothing any more
            return False

    def _others_failed(self) -> bool:
        """Tell whether a rank has said what is wrong with it: gloo does not tell those that wait for it."""
        if self.comm.world == 1 or self.comm.backend == "fake":
            return False
        # A store that is gone is the business of whoever waits for it.
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self.board.some_rank_failed(self._code)
        return False

    def _ask_around(self, account: RankStatus) -> dict[int, RankStatus]:
        try:
            self.board.lose(self._code, account)
        finally:
            if account.failure:
                # Ranks that wait for the device ask for this now and then, but not those in an exchange: gloo's own
                # waits end with their time or the connection.
                self.comm.hang_up(hops=self.at_once)
        rank, world = self.comm.rank, self.comm.world
        # Many ranks ask one store: the more there are, the less often, and not all at once. See
        # [Note: accounts in the store].
        late = rank / world if world > _FEW else 0.0
        until = time.monotonic() + _GRACE + late
        pause = 0.05 * max(world / _FEW, 1.0) ** 1.5 + late
        accounts: dict[int, RankStatus] | None = None
        # Others run into the same failure at nearly the same time, and the message is better with what they say.
        while (left := until - time.monotonic()) > 0 and (accounts is None or len(accounts) < world):
            time.sleep(min(pause, left))
            pause *= 2
            try:
                accounts = self.board.accounts(self._code)
            except (RuntimeError, TimeoutError):
                if accounts is None:  # what was heard before is worth telling
                    raise
        return {**(accounts or {}), rank: account}


def _in_a_line(error: BaseException) -> str:
    """The type and first line of an exception, whose text may itself raise one."""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return type(error).__name__


# A thread that looks at this rank's waiting.

_LOOKS_WHILE_WAITING = 4  # before waiting is long
_LATER = 1.0  # seconds, or the time to the next look: for accounts of ranks that began to wait a little later


class Watch:
    """Watches one rank's waiting in one engine.

    Args:
        board: with the statuses of the engine's ranks.
        engine: its code there.
        rank: this rank in the engine's group.
        world: how many there are.
        after: seconds, or None never to say anything.
        when_failed: called on the watching thread while this rank waits for others, one of which has failed.
        alone: there is nobody to wait for.
    """

    def __init__(
        self,
        board: StatusBoard,
        engine: str,
        rank: int,
        world: int,
        after: float | None,
        when_failed: Callable[[], None] = lambda: None,
        *,
        alone: bool = False,
    ) -> None:
        self._board = board
        self._engine = engine
        self._rank = rank
        self._world = world
        self._when_failed = when_failed
        self._after = None if alone else math.inf if after is None else after
        self._current: _Wait | None = None
        self._asked = 0.0  # when it was last asked whether a rank has failed
        self._patrol = Patrol("watch", self.look, self.end)

    @contextlib.contextmanager
    def waiting(self, account: Callable[[], RankStatus]) -> Iterator[None]:
        """Inside, this rank may wait for others; ``account`` says where."""
        if self._after is None:
            yield
            return
        # At the first wait: a rank that never waits for others needs no thread.
        if not self._patrol.started:
            self._patrol.start(min(self._after / _LOOKS_WHILE_WAITING, status.PERIOD))
        # Waits nest, as an exchange does inside a call of the user. The other thread reads ``_current`` without a
        # lock: one reference replaces another.
        before = self._current
        wait = _Wait(account, time.monotonic())
        self._current = wait
        try:
            yield
        finally:
            self._current = before
            if wait.told:
                self._board.post_waiting(self._engine, None)

    def end(self) -> None:
        """Write a status that has not been written yet, as the program ends; on the watching thread."""
        # Without a limit: Python does not start threads any more by then.
        self._board.write_status(limit=False)

    def close(self) -> None:
        """Stop watching."""
        self._after = None
        self._patrol.stopped.set()

    def look(self) -> None:
        """Speak if the wait of this moment has become long; on the watching thread."""
        # Read once: the main thread may begin or end a wait at any moment.
        wait = self._current
        now = time.monotonic()
        self._board.tell_stop()
        if wait is None or self._after is None:
            return
        waited = now - wait.start
        if waited >= status.ASKING and now - self._asked >= status.ASKING:
            self._asked = now
            with contextlib.suppress(RuntimeError, TimeoutError):
                if self._board.some_rank_failed(self._engine) and self._current is wait:
                    self._when_failed()
        if wait.told or waited < self._after:
            return
        # Before the account goes out, so that a wait that ends meanwhile withdraws it.
        wait.told = True
        account = wait.account()
        try:
            self._board.post_waiting(self._engine, account)
            # On the event and not in sleep, so that the end of the program need not wait for this.
            self._patrol.stopped.wait(min(_LATER, self._after / _LOOKS_WHILE_WAITING))
            words = self._words({**self._board.accounts(self._engine), self._rank: account})
        except (RuntimeError, TimeoutError) as error:
            words = (
                f"rank {self._rank} has been waiting for {self._after:g} s, {account}; the others cannot be asked, "
                f"since the job's store, which rank 0 keeps, or the launcher, does not answer ({error})"
            )
        if self._current is wait:
            _log.warning("%s", words)
        else:
            # The wait ended meanwhile, perhaps before its account was there to be withdrawn.
            self._board.post_waiting(self._engine, None)

    def _words(self, accounts: dict[int, RankStatus]) -> str:
        said = by_text({rank: str(account) for rank, account in accounts.items() if rank != self._rank})
        others = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}" for text, ranks in said.items()]
        silent = [rank for rank in range(self._world) if rank not in accounts]
        if silent:
            others.append(f"{name_ranks(silent)} {'waits' if len(silent) == 1 else 'wait'} for nobody")
        return (
            f"rank {self._rank} has been waiting for {self._after:g} s, {accounts[self._rank]}; {'; '.join(others)}. "
            f"Perhaps {likely_cause(accounts, self._world)}"
        )


@dataclass(eq=False)
class _Wait:
    """One wait of the rank's main thread."""

    account: Callable[[], RankStatus]
    start: float
    told: bool = False
