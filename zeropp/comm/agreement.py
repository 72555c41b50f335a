"""Small exchanges of integers between ranks, and the handling of errors that all ranks must raise together.

In the steady state a pass sends only weights and gradients, because every rank follows the order of collectives that
all ranks learned together. Ranks exchange messages here while an order is learned, at forks of known orders, at the end
of passes that vary, after errors, and when a rank gives up waiting. Between passes they exchange messages where all
ranks must make the same call, such as ``state_dict()``, or use the same settings in a step.

`Watch` logs a warning long before a wait becomes an error. The waiting thread may be blocked inside a torch call, so a
second thread checks it periodically. When a wait has become long, the second thread writes this rank's status into the
store, reads the statuses of the other ranks, and logs all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch.profiler import record_function

import zeropp.comm.watch as status
from zeropp._compat import profiler_enabled
from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import CollectiveError, name_ranks, what_ended
from zeropp.comm.streams import Event
from zeropp.comm.threads import ForkedError
from zeropp.comm.timers import PeriodicThread, StreamStalls
from zeropp.comm.watch import RankStatus, StatusBoard, board_of, by_text, code_of, explain, likely_cause, make_monitor

__all__ = ["ADDED", "AT_WORK", "GATHERED", "MICRO_BATCHES", "SAVED", "SETTINGS", "TRAINED", "Agreement", "Watched"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
# Every exchange has the same length. If ranks are at different kinds of exchange with messages of different sizes, gloo
# ends the process instead of raising an error.
_WIDTH = 8  # integers in an exchange, after the first integer, which encodes kind and pass
# Kinds of exchanges between passes. The kinds that the schedule uses are below 100.
_SAME_CALL, GATHERED, SAVED, TRAINED, ADDED, SETTINGS, AT_WORK, _OBJECTS = 100, 101, 102, 103, 104, 105, 106, 107
MICRO_BATCHES, _CLOSING = 108, 109

# Seconds between two checks of the store for failures of other ranks: the first interval and the longest interval.
_FIRST_LOOK, _RARELY = 1.0, 5.0
_GRACE = 2.0  # seconds for which a failing rank waits for the other ranks' statuses
_FEW = 64  # number of ranks that may send requests to the store at once
# Fraction of ``hang_timeout`` after which a timeout of gloo counts as a hang. gloo uses another clock.
_NEARLY = 0.9
_MEETING = 10.0  # seconds, at most, for which a closing rank waits for the other ranks to close


class Agreement:
    """Small exchanges between the ranks of one engine, and the common error that all ranks raise after a failure.

    Attributes:
        lost: text of the common error after the ranks have lost each other; None before.
        hang_timeout: seconds of waiting for other ranks after which a wait is an error.
        warn_after: seconds of waiting after which a warning is logged; None for no warning.
        where: pass that this rank is in, in words such as "a backward"; "" between passes.
        beyond: action of this rank that no rank's known order contains, for `RankStatus`; or "".
        unconfirmed: True if the last step was taken before the host has read the step sync.
        edits: hash of this rank's edits of frozen weights of which every rank has a full copy; compared between ranks.
    """

    def __init__(
        self,
        comm: Comm,
        hang_timeout: float,
        warn_after: float | None,
        device: torch.device,
        *,
        overlap: bool,
    ) -> None:
        """Start watching waits, if there are other ranks.

        Args:
            comm: process groups of the engine.
            hang_timeout: seconds of waiting for other ranks after which a wait is an error.
            warn_after: seconds of waiting after which a warning is logged; None for no warning.
            device: device of the model.
            overlap: True if work on comm streams runs beside the model.
        """
        # A fake group and a single rank never wait for other ranks, so no thread needs to watch them.
        alone = comm.world == 1 or comm.backend == "fake"
        self.comm = comm
        self._alone = alone
        self.hang_timeout = hang_timeout
        self.warn_after = warn_after
        # Without ``overlap_comm`` work on comm streams runs in the model's own order, and the model stands still
        # meanwhile.
        self.at_once = not alone and not overlap
        # Timers of the stream's waits. On a CPU a wait blocks the host, so :class:`Watched` measures it.
        self.stalls = StreamStalls(device, comm.ledger.add_wait) if device.type == "cuda" else None
        # After ``lost`` is set, this rank waits for no other rank and for no device.
        self.lost: str | None = None
        self.where = ""
        self.beyond = ""
        self._place = 0  # number that identifies the pass, equal on every rank; 0 between passes
        self._step_stopped = False  # True if an exception has ended the last step
        self._stepped = False  # True while refreshes of stepped weights are being issued
        self.unconfirmed = False
        self.edits = 0
        self._sent: list[Event] = []  # events of the refreshes issued after the last step
        self._under_way: list[Event] = []  # events of the last step on the host
        self._when_lost: list[Callable[[], None]] = []
        self.board = board_of(comm.ranks, comm.rank)
        self._code = code_of(comm.job)
        if not alone:
            self.board.join()
        # A gloo wait ends only at its timeout or when its connection is closed, so connections are closed.
        close_connections = partial(comm.close_connections, hops=self.at_once)
        self.watch = Watch(self.board, self._code, comm.rank, comm.world, warn_after, close_connections, alone=alone)
        failed = partial(self.board.some_rank_failed, self._code)
        self.monitor = None if alone else make_monitor(device, hang_timeout, self._give_up, failed)
        if self.monitor is not None:
            comm.set_launch_callback(self.monitors)
        comm.set_loss_callback(self._lost_elsewhere)

    def wait_for_event(self, arrives: Callable[[float], bool], watched: Watched) -> None:
        """Wait until an event happens; raise the common error on a timeout or if a rank or the work has failed.

        Args:
            arrives: function that waits for at most the given seconds and returns True if the event has happened.
            watched: description of the wait, from :meth:`watching`.

        Raises:
            RuntimeError: ``hang_timeout`` was reached, or a rank has failed.
        """
        with watched:
            until = watched.start + self.hang_timeout
            pause = _FIRST_LOOK
            while not arrives(min(pause, max(until - time.monotonic(), 0.0))):
                waited = time.monotonic() >= until
                if waited or self._others_failed():
                    # ``watched`` raises an error with the same text, because ``lost`` is set by then.
                    raise self.failure(watched.doing, waited=waited)
                # The intervals grow, because many ranks may send requests to one store. A failure soon after the start
                # is still noticed soon.
                pause = min(2 * pause, _RARELY)

    def on_loss(self, action: Callable[[], None]) -> None:
        """Register a function to call when the ranks have lost each other, before communicators are aborted."""
        self._when_lost.append(action)

    def watching(
        self, *doing: str, call: str = "", where: str = "", timed: tuple[str, str] | None = None, label: str = ""
    ) -> Watched:
        """Return a context that turns an error of a collective in its body into the common error.

        Args:
            *doing: description of the body for the error message; the parts are joined by spaces.
            call: collective call of the user that the body belongs to, if ranks may reach it one by one; or "".
            where: name of the step, if the rank is in no pass; or "".
            timed: (unit, kind) for which the ledger counts the time of the body as waiting; None to count nothing.
            label: name of the body in the PyTorch profiler; "" to mark nothing.
        """
        return Watched(self, doing, call, where, timed, label)

    def issuing(self, doing: str, unit: str, kind: str) -> Watched:
        """Return a context in which a unit's collectives are issued.

        Without overlap the work runs at once, so its time is counted as waiting.

        Args:
            doing: participle for the error message, such as "gathering".
            unit: name of the unit.
            kind: kind of the work for the ledger, such as "gather".
        """
        label = f"zeropp::{kind} {unit}"
        return self.watching(doing, unit, timed=(unit, kind) if self.at_once else None, label=label)

    def common_error(self, error: RuntimeError | OSError, account: RankStatus, seconds: float) -> RuntimeError | None:
        """Return the common error for an error of a collective; None if the error concerns this rank alone.

        Args:
            error: error that a watched body raised.
            account: status of this rank.
            seconds: time that the body ran.
        """
        # A ForkedError concerns only this process. The other ranks and the parent's objects must not be touched.
        if isinstance(error, ForkedError):
            return None
        # With other ranks, the error must become the common error, because the other ranks would wait in a collective
        # for this rank. With one rank, an out-of-memory error stays torch's own error, so that the program can retry
        # with less.
        if self.comm.world == 1 and isinstance(error, torch.OutOfMemoryError):
            return None
        if self.lost is not None:  # set in the body, or meanwhile by the monitor's thread
            return RuntimeError(self.lost)
        # OSError: disk errors of offloading reach this thread through comm streams.
        if isinstance(error, OSError):
            account = replace(account, until=", until that failed", failure=str(error), unsure=True)
            return self._lose(account, cause=error)
        ended = what_ended(error)
        # If the watching thread has closed the connections because another rank failed, gloo reports a timeout, too.
        if ended == "time ran out":
            if seconds >= _NEARLY * self.hang_timeout:
                return self._lose(account, waited=True)
            ended = "its connections were closed"
        if ended is not None:
            return self._lose(replace(account, until=f", until {ended}"))
        first = (str(error).splitlines() or [""])[0]
        # An error of this rank itself, such as out of memory while work is issued: the other ranks would wait for this
        # rank.
        own = not isinstance(error, (CollectiveError, torch.distributed.DistError))
        failure = f"{type(error).__name__}: {first}" if own else ""
        return self._lose(replace(account, until=f" ({first})", failure=failure), cause=error)

    def queued(self, event: Event, unit: str, kind: str) -> None:
        """Record that a unit's collectives were issued and end with ``event``; the monitor watches them."""
        if self._stepped:
            self._sent.append(event)
        if self.monitor is not None:
            self.monitor.watch_event(event, f"the {kind} of unit {unit!r}")

    def monitors(self, event: Event, doing: str) -> None:
        """Let the monitor watch other work that waits for other ranks.

        Args:
            event: event of the work's end.
            doing: description of the work, in words that follow "waiting for".
        """
        if self.monitor is not None:
            self.monitor.watch_event(event, doing)

    def _give_up(self, waited_for: str, *, waited: bool) -> None:
        """Set the common error and log it; called on the monitor's thread after a hang or a failure of another rank."""
        if self.lost is None:
            # The error is logged, because the main thread may be blocked in a launch and never raise it.
            self._lose(RankStatus(f"waiting for {waited_for}", where=self.where), waited=waited, log=True)

    def step_under_way(self, events: list[Event]) -> None:
        """Record the events of the last step on the host. The step is finished when all events have happened."""
        # The previous step's events can be dropped. Backward has waited for them, because it overwrites the gradients
        # that the host's step reads.
        self._under_way = events

    @contextlib.contextmanager
    def sending_weights(self, *, stepped: bool) -> Iterator[None]:
        """Mark the issuing of refreshes in the body.

        Args:
            stepped: True if weights were stepped before. An error in the body then reports that this rank has stepped
                weights that other ranks may not have stepped.
        """
        self._stepped = stepped
        self._sent.clear()
        yield
        self._stepped = False  # not reset after an error, whose message reads it later

    def enter(self, where: str, place: int) -> None:
        """Record that this rank begins a pass.

        Args:
            where: name of the pass in words, such as "a backward".
            place: number that identifies the pass, equal on every rank.
        """
        self.where = where
        self._place = place
        self.beyond = ""

    def go_on(self, *, met: bool = False) -> None:
        """Record that this rank begins something with the other ranks, which withdraws an earlier stop.

        See [Note: one rank's exception]. After a step that failed, the beginning of a pass does not withdraw the stop:
        other ranks may still wait in the sums of that step.

        Args:
            met: True if an exchange shows that the other ranks are here, or if this rank begins a step.
        """
        if self.lost is None and (met or not self._step_stopped):
            self._step_stopped = False
            # The check saves time: this rank rarely has a stop to withdraw.
            if self.board.ends:
                self.board.go_on(self._code)

    def leave(self) -> None:
        """Record that this rank has ended its pass."""
        self.where = ""
        self._place = 0
        self.beyond = ""

    def exchange(self, kind: int, values: list[int], doing: str, call: str = "") -> list[list[int]]:
        """Gather a few integers from every rank. All ranks must be at the same kind of exchange and in the same pass.

        Args:
            kind: kind of the exchange; one of the constants of this module, or of the schedule below 100.
            values: this rank's integers, at most 8.
            doing: description for the error message.
            call: collective call of the user that the exchange belongs to; or "".

        Returns:
            The integers of every rank.

        Raises:
            RuntimeError: a rank did not arrive within ``hang_timeout``, or is at another kind of exchange or in another
                pass.
        """
        # Place (32 bits) and kind (8 bits) are packed into one 64-bit integer, so that the row stays short.
        head = self._place << 8 | kind
        # All rows have the same width; see ``_WIDTH``.
        row = [head, *values, *[0] * (_WIDTH - len(values))]
        with self.watching(doing, call=call):
            rows = self.comm.all_gather_ints(row)
        if any(row[0] != head for row in rows):
            raise self.failure(doing, call)
        self.go_on(met=True)
        return [row[1 : 1 + len(values)] for row in rows]

    def require_same_call(self, what: str) -> None:
        """Check that every rank makes the same call, before the call gathers or changes anything.

        Args:
            what: the call, such as "full_state()".

        Raises:
            RuntimeError: a rank makes another call, or frozen weights were edited differently on the ranks.
        """
        # crc32 instead of hash(), because hash() of a string differs between processes.
        code = zlib.crc32(what.encode())
        rows = self.exchange(_SAME_CALL, [code, self.edits], f"at {what}", what)
        if any(row[0] != code for row in rows):
            raise self.failure(f"at {what}", what)
        other = next((rank for rank, row in enumerate(rows) if row[1] != rows[0][1]), None)
        if other is not None:
            # Every rank raises this error, so the ranks stay in step and ``lost`` is not set.
            raise RuntimeError(
                f"{what} was called after ranks 0 and {other} had made different edits of frozen weights, as by "
                "merge_and_unload() on one rank alone; each rank has edited its own copy, and weights gathered from "
                "all ranks would mix both versions. Make the same edits on every rank"
            )

    def exchange_objects(self, value: _T, doing: str) -> list[_T]:
        """Gather one picklable value from every rank, in the order of the ranks.

        Args:
            value: this rank's value.
            doing: description for the error message.
        """
        if self.comm.world == 1 or self.comm.backend == "fake":
            return [value] * self.comm.world
        own = pickle.dumps(value)
        # The sizes travel in an exchange of the fixed width, so that a rank at another kind of exchange is noticed.
        sizes = [size for (size,) in self.exchange(_OBJECTS, [len(own)], doing)]
        with self.watching(doing):
            return self.comm.all_gather_sized(own, sizes)

    def failure(self, doing: str, call: str = "", where: str = "", *, waited: bool = False) -> RuntimeError:
        """Return the common error: the likely cause and what each rank was doing. The ranks count as lost from now on.

        Args:
            doing: description of this rank's activity.
            call: collective call of the user that the activity belongs to; or "".
            where: name of the step, if the rank is in no pass; or "".
            waited: True if ``hang_timeout`` was reached.
        """
        return self._lose(RankStatus(doing, call, where or self.where, beyond=self.beyond), waited=waited)

    def meet_to_close(self) -> dict[int, list[str]] | None:
        """Wait up to 10 seconds for all ranks to close, because ranks must destroy communicators together.

        Returns:
            Names of the communicators that each global rank no longer uses; None if a rank does not come.
        """
        comm = self.comm
        # The user may have called destroy_process_group() before, which destroys all groups.
        if not comm.communicates or not comm.has_groups:
            return {}
        if self.lost is not None:
            return None
        head = self._place << 8 | _CLOSING
        seconds = min(self.hang_timeout, _MEETING)
        try:
            # The first row has the width of every exchange, because other ranks may be in another exchange.
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
        # Report a failure, because ranks that continue training would wait for this rank.
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.board.lose(self._code, account, closed=True)
        return None

    def close(self) -> None:
        """Stop the watching threads."""
        self.watch.close()
        if self.monitor is not None:
            self.monitor.close()

    def stopped(self, error: BaseException | None, where: str = "", *, step: int | None = None) -> None:
        """Report to the other ranks that an exception has ended this rank's pass or step.

        See [Note: one rank's exception].

        Args:
            error: the exception; None if it is not known.
            where: place of the exception in words, if the rank is in no pass.
            step: number of the step, if the exception ended a step; equal on all ranks, and different from all passes.
        """
        if self._alone or self.lost is not None:
            return
        self._step_stopped |= step is not None
        failure = "an exception" if error is None else _in_a_line(error)
        account = RankStatus(f"in {self.where or where}", failure=failure, unsure=step is not None)
        self.board.stop(self._code, self._place if step is None else step, account, at_once=True)

    @contextlib.contextmanager
    def reporting_errors(self, where: str, *, step: int | None = None) -> Iterator[None]:
        """Call :meth:`stopped` if the body raises an exception, then raise the exception.

        Args:
            where: place of the body in words.
            step: number of the step, if the body is a step.
        """
        try:
            yield
        except BaseException as error:
            self.stopped(error, where, step=step)
            raise

    def found_stopped(self, failure: str) -> None:
        """Report that this rank's pass has ended, if the exception is not known. Does not wait for the store.

        Args:
            failure: text of the failure.
        """
        if not self._alone and self.lost is None and not self.board.is_stopped(self._code):
            account = RankStatus(f"in {self.where}", failure=failure)
            self.board.stop(self._code, self._place, account, at_once=False)

    def _lose(
        self, account: RankStatus, *, waited: bool = False, log: bool = False, cause: Exception | None = None
    ) -> RuntimeError:
        """Collect the statuses of all ranks, set the common error, end pending work, and return the error.

        Args:
            account: status of this rank.
            waited: True if ``hang_timeout`` was reached.
            log: True to log the error, too.
            cause: error of this rank that the common error is raised from; None if there is none.
        """
        comm = self.comm
        accounts = {comm.rank: account}
        store_is_gone = False
        if comm.world > 1 and comm.backend != "fake":
            try:
                # The store is used, because ranks that have lost each other cannot take part in a collective any more.
                accounts = self._ask_around(account)
            # The process that serves the store is gone or hangs; it may be the failed rank. No error of this request
            # may prevent the abort below.
            except Exception:
                store_is_gone = True
        parts = [explain(accounts, comm.world)]
        if store_is_gone:
            parts[0] += "; the statuses of other ranks are missing because the job's store is gone or does not answer"
        # A refresh is issued after the step and needs all ranks. If a refresh has not finished, this rank may have
        # stepped weights that other ranks have not. If a disk has failed (``unsure``), the weights on it may not have
        # been stepped.
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
        lost = RuntimeError(self.lost)
        lost.__cause__ = cause
        return lost

    def _lost_elsewhere(self, reason: str) -> None:
        """Set the common error because another engine has aborted process groups that this engine uses."""
        if self.lost is None:
            self.lost = (
                f"another model of this process has lost the other ranks, and shares process groups with this: {reason}"
            )
            self._end_work()
            self.comm.tell_sharers(reason)
            # Ranks that wait for this rank in this model read the reason from the store.
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.board.lose(self._code, RankStatus("using process groups that another model has lost"), closed=True)

    def _end_work(self) -> None:
        """Call the functions registered by :meth:`on_loss`, then abort the communicators."""
        # Abort last, when no comm stream waits any more for a collective that may never end.
        for action in (*self._when_lost, self.comm.abort):
            try:
                action()
            except Exception as error:  # the other actions must still run, and the common error must be raised
                _log.error("cleaning up after the ranks lost each other failed: %s", error)

    def _has_sent(self) -> bool:
        """Return True if all weights of the last step are stepped and refreshed."""
        try:
            return all(event.done() for event in (*self._sent, *self._under_way))
        except RuntimeError:  # a failed device raises errors from every query
            return False

    def _others_failed(self) -> bool:
        """Return True if the store shows that another rank has failed, which gloo does not report to waiting ranks."""
        if self.comm.world == 1 or self.comm.backend == "fake":
            return False
        # Ignore errors of the store here: the rank's later error or warning says that the store does not answer.
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self.board.some_rank_failed(self._code)
        return False

    def _ask_around(self, account: RankStatus) -> dict[int, RankStatus]:
        """Write this rank's status to the store, and collect the other ranks' statuses for about two seconds."""
        try:
            self.board.lose(self._code, account)
        finally:
            if account.failure:
                # Ranks that wait for the device check the store periodically, but ranks in a gloo exchange do not.
                # Their wait ends only at its timeout or when the connection is closed.
                self.comm.close_connections(hops=self.at_once)
        rank, world = self.comm.rank, self.comm.world
        # Many ranks send requests to one store. With more ranks the requests are rarer and spread over time: see
        # [Note: accounts in the store].
        late = rank / world if world > _FEW else 0.0
        until = time.monotonic() + _GRACE + late
        pause = 0.05 * max(world / _FEW, 1.0) ** 1.5 + late
        accounts: dict[int, RankStatus] | None = None
        # Other ranks notice the same failure at nearly the same time, and their statuses make the message better.
        while (left := until - time.monotonic()) > 0 and (accounts is None or len(accounts) < world):
            time.sleep(min(pause, left))
            pause *= 2
            try:
                accounts = self.board.accounts(self._code)
            except (RuntimeError, TimeoutError):
                if accounts is None:  # statuses from an earlier request are still useful
                    raise
        return {**(accounts or {}), rank: account}


def _in_a_line(error: BaseException) -> str:
    """Return the type and the first line of an exception; only the type if converting the exception to text fails."""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return type(error).__name__


# A thread that watches this rank's waits.

_LOOKS_WHILE_WAITING = 4  # number of checks until a wait is long
# Seconds, at most, after a status was written until the other statuses are read: other ranks may begin to wait a little
# later.
_LATER = 1.0


class Watch:
    """A thread that watches this rank's waits in one engine, warns of long waits, and checks for failed ranks.

    Args:
        board: statuses of the engine's ranks.
        engine: code of the engine on the board.
        rank: this rank in the engine's group.
        world: number of ranks.
        after: seconds of a wait until the warning; None for no warning.
        when_failed: function called on the watching thread if this rank waits and another rank has failed.
        alone: True if this rank never waits for other ranks; then nothing is watched.

    Attributes:
        current: the innermost wait of the main thread; None if it does not wait. Waits can be nested, for example an
            exchange inside a user's call. The watching thread reads this attribute without a lock, because assigning a
            reference is atomic.
        started: True once :meth:`start` was called.
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
        self.current: Watched | None = None
        self.started = False
        self._asked = 0.0  # time of the last check for failed ranks
        self._periodic = PeriodicThread("watch", self.look, self.end)

    def start(self) -> None:
        """Start the watching thread, at the first wait: a rank that never waits for other ranks needs no thread."""
        if self._after is not None and not self._periodic.started:
            self._periodic.start(min(self._after / _LOOKS_WHILE_WAITING, status.PERIOD))
        self.started = True

    def withdraw(self) -> None:
        """Withdraw the status that was written because of a long wait."""
        self._board.post_waiting(self._engine, None)

    def end(self) -> None:
        """Write a pending status at the end of the program; called on the watching thread."""
        # There is no time limit, because a limit needs a new thread, and Python starts no threads at this point.
        self._board.write_status(limit=False)

    def close(self) -> None:
        """End the watching thread."""
        self._after = None
        self._periodic.stopped.set()

    def look(self) -> None:
        """Check the present wait, and log a warning if the wait is long; called on the watching thread."""
        # Read ``current`` only once, because the main thread may change it at any moment.
        wait = self.current
        now = time.monotonic()
        self._board.tell_stop()
        if wait is None or self._after is None:
            return
        waited = now - wait.start
        if waited >= status.ASKING and now - self._asked >= status.ASKING:
            self._asked = now
            with contextlib.suppress(RuntimeError, TimeoutError):
                if self._board.some_rank_failed(self._engine) and self.current is wait:
                    self._when_failed()
        if wait.told or waited < self._after:
            return
        # ``told`` is set before the status is written, so that a wait that ends meanwhile withdraws the status.
        wait.told = True
        account = wait.status
        try:
            self._board.post_waiting(self._engine, account)
            # Wait on the event and not by sleep(), so that the end of the program does not wait for this thread.
            self._periodic.stopped.wait(min(_LATER, self._after / _LOOKS_WHILE_WAITING))
            words = self._words({**self._board.accounts(self._engine), self._rank: account})
        except (RuntimeError, TimeoutError) as error:
            words = (
                f"rank {self._rank} has been waiting for {self._after:g} s, {account}; the statuses of other ranks are "
                f"missing because the job's store, in rank 0's process or the launcher's, does not answer ({error})"
            )
        if self.current is wait:
            _log.warning("%s", words)
        else:
            # The wait has ended meanwhile, perhaps before the status was written, so the status must be withdrawn
            # again.
            self._board.post_waiting(self._engine, None)

    def _words(self, accounts: dict[int, RankStatus]) -> str:
        """Return the text of the warning: the status of each rank and the likely cause."""
        said = by_text({rank: str(account) for rank, account in accounts.items() if rank != self._rank})
        others = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}" for text, ranks in said.items()]
        silent = [rank for rank in range(self._world) if rank not in accounts]
        if silent:
            others.append(f"{name_ranks(silent)} {'is' if len(silent) == 1 else 'are'} not waiting for other ranks")
        return (
            f"rank {self._rank} has been waiting for {self._after:g} s, {accounts[self._rank]}; {'; '.join(others)}. "
            f"Perhaps {likely_cause(accounts, self._world)}"
        )


class Watched:
    """A context in which this rank may wait for other ranks.

    An error of a collective in the body becomes the common error of all ranks, and the watching thread warns of a long
    wait. The object may be entered again once it has been left, so each unit prepares one for each kind of its work.

    Args:
        agreement: exchanges between the ranks.
        doing: description of the body; the parts are joined by spaces.
        call: collective call of the user that the body belongs to; or "".
        where: name of the step, if the rank is in no pass; or "".
        timed: (unit, kind) for which the ledger counts the time of the body as waiting; None to count nothing.
        label: name of the body in the PyTorch profiler; "" to mark nothing.

    Attributes:
        start: time.monotonic() at the beginning of the body.
        told: True once the status of this wait is being written to the store.
        around: wait inside which this one takes place; None if there is none.
    """

    __slots__ = (
        "_agreement", "_call", "_label", "_parts", "_range", "_timed", "_timer", "_where", "around", "start", "told",
    )  # fmt: skip

    def __init__(
        self,
        agreement: Agreement,
        doing: tuple[str, ...],
        call: str,
        where: str,
        timed: tuple[str, str] | None,
        label: str,
    ) -> None:
        self._agreement = agreement
        self._parts = doing
        self._call = call
        self._where = where
        self._timed = timed
        self._timer = None if agreement.stalls is None or timed is None else agreement.stalls.timer(*timed)
        self._label = label
        self._range: record_function | None = None
        self.start = 0.0
        self.told = False
        self.around: Watched | None = None

    @property
    def doing(self) -> str:
        """Description of the body, in words such as "gathering block 3"."""
        return " ".join(self._parts)

    @property
    def status(self) -> RankStatus:
        """Status of this rank in the body. Made when it is needed, because most waits are short."""
        agreement = self._agreement
        return RankStatus(self.doing, self._call, self._where or agreement.where, beyond=agreement.beyond)

    def __enter__(self) -> None:
        """Begin the body.

        Raises:
            RuntimeError: the ranks have lost each other before.
        """
        agreement = self._agreement
        if agreement.lost is not None:
            raise RuntimeError(agreement.lost)
        self.told = False
        self.start = time.monotonic()
        watch = agreement.watch
        if not watch.started:
            watch.start()
        self.around = watch.current
        watch.current = self
        if self._timer is not None:
            self._timer.begin()
        if self._label and profiler_enabled():
            self._range = record_function(self._label)
            self._range.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the body.

        Raises:
            RuntimeError: the common error, for an error in the body, or if the ranks have lost each other meanwhile.
        """
        agreement = self._agreement
        watch = agreement.watch
        if watch.current is self:
            watch.current = self.around
        self.around = None
        if self.told:
            watch.withdraw()
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if error is None:
            # The monitor's thread may have set ``lost`` meanwhile, after a wait that never ended.
            if agreement.lost is not None:
                raise RuntimeError(agreement.lost)
            if self._timer is not None:
                self._timer.end()
            elif self._timed is not None:
                agreement.comm.ledger.add_wait(*self._timed, time.monotonic() - self.start)
        elif isinstance(error, (RuntimeError, OSError)):
            common = agreement.common_error(error, self.status, time.monotonic() - self.start)
            if common is not None:
                raise common from common.__cause__
