"""Statuses of ranks in the job's store, and the number of bytes that the store's process sends and receives."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeropp.comm import agreement, watch
from zeropp.comm.agreement import Agreement
from zeropp.comm.watch import RankStatus, StatusBoard, code_of

WORLD = 1024


class CountingStore:
    """A store in this process that counts requests and the bytes of requests and answers."""

    def __init__(self) -> None:
        self._store, self.nbytes, self.requests = dist.HashStore(), 0, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: object) -> object:
            answer = call(*args)
            self.requests += 1
            self.nbytes += _size(args) + _size(answer)
            return answer

        return counted


def _size(value: object) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


class Clock:
    """A clock that advances only when ``sleep`` is called."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """A counting store that replaces the job's store."""
    made = CountingStore()
    monkeypatch.setattr(watch, "default_store", lambda: made)
    monkeypatch.setattr(agreement, "time", Clock())
    return made


ACTOR, CRITIC = code_of("the actor"), code_of("the critic")


def boards_of(world: int) -> list[StatusBoard]:
    """Return a status board for each rank, all in this process."""
    boards = [StatusBoard(tuple(range(world)), number) for number in range(world)]
    for board in boards:
        board.join()
    return boards


def rank_of(board: StatusBoard, number: int, world: int) -> Agreement:
    comm: Any = SimpleNamespace(
        rank=number, world=world, job="the actor", backend="fake", close_connections=lambda hops: None
    )
    comm.ranks = tuple(range(world))
    comm.ledger, comm.set_loss_callback = SimpleNamespace(add_wait=lambda *args: None), lambda action: None
    made = Agreement(comm, 600.0, None, torch.device("cpu"), overlap=True)
    made.board = board
    return made


def account(number: int) -> RankStatus:
    return RankStatus(f"waiting for the gather of unit 'blocks.{number % 4}'", where="a forward")


def test_after_a_loss_the_store_is_asked_for_less_than_100_megabytes(store: CountingStore) -> None:
    """1024 ranks have waited for long and read the store after a loss; one rank has no status."""
    boards = boards_of(WORLD)
    for number, board in enumerate(boards):
        board.post_waiting(ACTOR, account(number))
    boards[-1].post_waiting(ACTOR, None)
    for number, board in enumerate(boards[:-1]):
        board.lose(ACTOR, account(number))
    before = store.nbytes
    for number in range(0, WORLD - 1, 16):
        found = rank_of(boards[number], number, WORLD)._ask_around(account(number))
        assert found == {other: account(other) for other in range(WORLD - 1)}
    assert before + 16 * (store.nbytes - before) < 100e6


def test_the_last_word_of_each_rank_counts(store: CountingStore) -> None:
    """Waits that are over leave no keys in the store."""
    first, second, third = boards_of(3)
    for _ in range(50):
        first.post_waiting(ACTOR, account(0))
        second.post_waiting(ACTOR, account(1))
        assert third.accounts(ACTOR) == {0: account(0), 1: account(1)}
        first.post_waiting(ACTOR, None)
        assert third.accounts(ACTOR) == {1: account(1)}
        second.post_waiting(ACTOR, None)
        assert third.accounts(ACTOR) == {}
    assert store.num_keys() < 10
    assert not third.some_rank_failed(ACTOR)
    # A rank that has stopped, goes on and then waits.
    stop(first, 7, account(2))
    assert third.accounts(ACTOR) == {0: account(2)} and not third.some_rank_failed(ACTOR)  # rank 0 may go on soon
    first.go_on(ACTOR)
    first.post_waiting(ACTOR, account(0))
    assert third.accounts(ACTOR) == {0: account(0)}
    # A rank that is lost in an engine does not go on there, whatever it reports later.
    first.lose(ACTOR, account(2))
    assert third.accounts(ACTOR) == {0: account(2)} and third.some_rank_failed(ACTOR)
    first.go_on(ACTOR)
    assert third.accounts(ACTOR) == {0: account(2)} and third.some_rank_failed(ACTOR)
    second.lose(ACTOR, RankStatus("stepping", failure="no space left"))
    assert third.some_rank_failed(ACTOR) and third.accounts(ACTOR)[1].failure == "no space left"


FAILED = RankStatus("in a forward", failure="ValueError: no")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that replaces the time module of the status board."""
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    return made


def stop(board: StatusBoard, place: int = 7, account: RankStatus = FAILED, engine: str = ACTOR) -> None:
    """Stop a rank in an engine, and write the stop to the store."""
    board.stop(engine, place, account, at_once=False)
    board.write_status()


def long_after(board: StatusBoard, engine: str, clock: Clock) -> bool:
    """Return the answer to a rank that asks if another rank has failed, and asks again ten seconds later."""
    board.some_rank_failed(engine)
    clock.sleep(10)
    return board.some_rank_failed(engine)


def test_a_rank_that_stops_in_one_engine_does_not_come_to_another(store: CountingStore, clock: Clock) -> None:
    first, second, third = boards_of(3)
    stop(first)
    stop(second)
    assert not long_after(second, CRITIC, clock)  # rank 1 has stopped at the same place
    assert long_after(third, CRITIC, clock)
    assert str(third.accounts(CRITIC)[0]) == "using another model, in a forward"
    # The next stop is of rank 0 only.
    for board in (first, second):
        board.go_on(ACTOR)
    assert not long_after(third, CRITIC, clock)
    stop(first)
    assert long_after(second, ACTOR, clock) and long_after(third, CRITIC, clock)


def test_a_rank_that_stops_in_one_engine_may_go_on_in_another(store: CountingStore, clock: Clock) -> None:
    """Ranks that wait in the first engine still see the stop."""
    first, second = boards_of(2)
    stop(first)
    first.go_on(CRITIC)
    assert not long_after(second, CRITIC, clock) and second.accounts(CRITIC) == {}
    assert long_after(second, ACTOR, clock) and second.accounts(ACTOR) == {0: FAILED}


def test_a_rank_that_has_lost_or_closed_one_engine_may_go_on_in_another(store: CountingStore, clock: Clock) -> None:
    first, second = boards_of(2)
    first.lose(ACTOR, RankStatus("waiting", failure="OutOfMemoryError: 2 GiB"))
    assert second.some_rank_failed(ACTOR) and long_after(second, CRITIC, clock)
    assert second.accounts(CRITIC)[0].failure and second.accounts(CRITIC)[0].other_model
    first.go_on(CRITIC)
    assert second.some_rank_failed(ACTOR) and not long_after(second, CRITIC, clock)
    assert second.accounts(CRITIC) == {}
    first.lose(CRITIC, RankStatus("closing", failure="it closed"), closed=True)
    assert second.some_rank_failed(CRITIC) and not long_after(second, code_of("the reference"), clock)


def test_ranks_that_have_lost_the_same_engine_use_others(store: CountingStore, clock: Clock) -> None:
    first, second = boards_of(2)
    for board in (first, second):
        board.lose(ACTOR, account(0))
    assert not long_after(first, CRITIC, clock)


def test_closing_after_an_exception_tells_the_exception(store: CountingStore, clock: Clock) -> None:
    first, second = boards_of(2)
    first.stop(ACTOR, 7, FAILED, at_once=False)
    first.lose(CRITIC, RankStatus("closing", failure="it closed"), closed=True)
    first.lose(ACTOR, RankStatus("closing", failure="it closed"), closed=True)
    for engine in (CRITIC, ACTOR):
        assert second.some_rank_failed(engine) and second.accounts(engine)[0].failure == FAILED.failure
    assert long_after(second, code_of("the reference"), clock)


def test_an_exception_of_all_is_nobodys_fault(store: CountingStore, clock: Clock) -> None:
    """A rank that stopped at the same place does not report the exception of another rank as a failure.

    This holds while both ranks have stopped, and when one of them is lost later. A rank that did not stop reports it.
    """
    first, second, third = boards_of(3)
    for board in (first, second):
        stop(board)
    assert second.accounts(ACTOR) == {} and third.accounts(ACTOR)[0].failure == FAILED.failure
    first.lose(ACTOR, account(0))
    assert second.accounts(ACTOR) == {0: account(0)} and third.accounts(ACTOR)[0].failure == FAILED.failure


def test_ranks_may_be_far_apart_in_exceptions(store: CountingStore, clock: Clock) -> None:
    """If passes send nothing, ranks may stop different numbers of times, in several engines and modes by turns."""
    first, second = boards_of(2)
    for count, board in ((100, first), (3, second)):
        for _ in range(count):
            for engine, place in ((ACTOR, 1), (ACTOR, 2), (CRITIC, 1)):
                stop(board, place, engine=engine)
                board.go_on(engine)
        stop(board, 1)
    assert not long_after(first, ACTOR, clock)
    assert long_after(second, ACTOR, clock)  # rank 0 has stopped more often than rank 1


def test_a_delayed_write_of_a_stop_does_not_count_as_a_stop(store: CountingStore, clock: Clock) -> None:
    """A rank goes on while the write of its stop is still pending. The late write must not count as a stop."""
    first, second = boards_of(2)
    until, begun = threading.Event(), threading.Event()
    append = store._store.append

    def slow(key: str, value: str) -> None:
        begun.set()
        until.wait(10)
        append(key, value)

    store.append = slow  # type: ignore[attr-defined]
    with mock.patch.object(watch, "_ANSWER", 0.05):
        stop(first)
        assert begun.wait(10)
        first.go_on(ACTOR)
    until.set()
    for thread in [each for each in threading.enumerate() if each.name == "zeropp limited"]:
        thread.join(timeout=5)
    assert second.accounts(ACTOR) == {} and not long_after(second, ACTOR, clock)


def test_a_line_that_is_added_while_another_rank_reads_is_read_later(store: CountingStore, clock: Clock) -> None:
    first, second = boards_of(2)
    append = store._store.append

    def read_first(key: str, value: str) -> None:
        second.some_rank_failed(ACTOR)
        append(key, value)

    store.append = read_first  # type: ignore[attr-defined]
    stop(first)
    assert long_after(second, ACTOR, clock)


def test_a_line_that_comes_late_says_nothing(store: CountingStore, clock: Clock) -> None:
    first, second = boards_of(2)
    stop(first)
    key = f"{first._said_ends._name}/0"
    line = store.get(key)
    first.go_on(ACTOR)
    store.append(key, line)
    assert second.accounts(ACTOR) == {} and not long_after(second, ACTOR, clock)


def test_a_stop_is_told_at_once_or_after_a_while(store: CountingStore, clock: Clock) -> None:
    first, second = boards_of(2)
    first.stop(ACTOR, 7, RankStatus("in a forward"), at_once=False)
    first.stop(ACTOR, 7, account(0), at_once=False)
    first.tell_stop()
    assert second.accounts(ACTOR) == {}
    clock.sleep(2)
    first.tell_stop()
    assert second.accounts(ACTOR) == {0: account(0)} and long_after(second, ACTOR, clock)
    first.go_on(ACTOR)
    first.stop(ACTOR, 8, account(0), at_once=True)
    assert second.accounts(ACTOR) == {0: account(0)}


def test_exceptions_by_the_thousand_leave_little_in_the_store(store: CountingStore, clock: Clock) -> None:
    """A program may end each forward by an exception, for example once it has the activations that it needs."""
    board = boards_of(2)[0]
    before = store.requests
    for number in range(1000):
        board.stop(ACTOR, number, RankStatus("in a forward", failure=f"KeyError: {number}"), at_once=True)
        board.go_on(ACTOR)
        clock.sleep(0.1)
    assert store.requests - before < 100
    for number in range(100):
        stop(board, number, RankStatus("in a forward", failure=f"KeyError: {number}"))
        board.go_on(ACTOR)
    assert store.num_keys() < 10 and len(board._places) < 100


def test_a_status_is_repeated_after_its_list_is_deleted(store: CountingStore, clock: Clock) -> None:
    """Old lists in the store are deleted, but a rank that asks from time to time repeats its line in newer lists."""
    first, second = boards_of(2)
    first.lose(ACTOR, account(0))
    for number in range(50):
        stop(second, number)
        second.go_on(ACTOR)
        first.some_rank_failed(CRITIC)
    assert second.some_rank_failed(ACTOR) and store.num_keys() < 10


def test_another_store_begins_anew(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Statuses of an old store do not count after torch.distributed starts again, even if the store is kept."""
    stores = [CountingStore(), CountingStore()]
    monkeypatch.setattr(watch, "default_store", lambda: stores[0])
    first, second = boards_of(2)
    stop(first)
    stores.reverse()
    for board in (first, second):
        board.join()
    assert not long_after(second, ACTOR, clock) and second.accounts(ACTOR) == {}
    stop(first)
    assert long_after(second, ACTOR, clock)
    stores.reverse()
    _, another = boards_of(2)
    assert not long_after(another, ACTOR, clock) and another.accounts(ACTOR) == {}


def test_asking_whether_a_rank_has_failed_is_one_small_request(store: CountingStore) -> None:
    boards = boards_of(64)
    for number, board in enumerate(boards):
        board.post_waiting(ACTOR, account(number))
    asks = rank_of(boards[0], 0, 64)
    asks.comm.backend = "gloo"
    store.nbytes = store.requests = 0
    assert not asks._others_failed()
    assert store.requests == 1 and store.nbytes < 100
