"""Accounts that ranks give through the job's store, and how many bytes the process that keeps it gives and takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeropp.comm import agreement, watch
from zeropp.comm.accounts import Account
from zeropp.comm.agreement import Agreement

WORLD = 1024


class CountingStore:
    """A store in this process that counts what requests and answers hold."""

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
    """Time that passes where somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """In place of the job's."""
    made = CountingStore()
    monkeypatch.setattr(watch, "default_store", lambda: made)
    monkeypatch.setattr(agreement, "time", Clock())
    return made


def rank_of(number: int, world: int) -> Agreement:
    comm: Any = SimpleNamespace(rank=number, world=world, job="a job", backend="fake", hang_up=lambda: None)
    comm.ledger, comm.on_lost_elsewhere = SimpleNamespace(add_wait=lambda *args: None), lambda action: None
    return Agreement(comm, 600.0, None, torch.device("cpu"), [], at_once=False)


def account(number: int) -> Account:
    return Account(f"waiting for the gather of unit 'blocks.{number % 4}'", where="a forward")


def test_after_a_loss_the_store_is_asked_for_less_than_100_megabytes(store: CountingStore) -> None:
    """By 1024 ranks, of which one says nothing; all have been waiting for long before."""
    ranks = [rank_of(number, WORLD) for number in range(WORLD)]
    for number, each in enumerate(ranks):
        each.watch._note(store, account(number))  # type: ignore[arg-type]
    ranks[-1].watch._note(store, None)  # type: ignore[arg-type]
    for number, each in enumerate(ranks[:-1]):
        each.watch.publish(account(number))
    before = store.nbytes
    for number in range(0, WORLD - 1, 16):
        found = ranks[number]._ask_around(account(number))
        assert found == {other: account(other) for other in range(WORLD - 1)}
    assert before + 16 * (store.nbytes - before) < 100e6


def test_the_last_word_of_each_rank_counts(store: CountingStore) -> None:
    """Through many waits, whose lines are deleted."""
    first, second, third = (rank_of(number, 3).watch for number in range(3))
    for _ in range(50):
        first._note(store, account(0))  # type: ignore[arg-type]
        second._note(store, account(1))  # type: ignore[arg-type]
        assert third.heard() == {0: account(0), 1: account(1)}
        first._note(store, None)  # type: ignore[arg-type]
        assert third.heard() == {1: account(1)}
        second._note(store, None)  # type: ignore[arg-type]
        assert third.heard() == {}
    assert store.num_keys() < 10
    assert not third.some_rank_failed()
    # A rank that has stopped and goes on, and then waits.
    first.stop(account(2), 7)
    assert third.heard() == {0: account(2)} and not third.some_rank_failed()  # it may yet go on
    first.go_on()
    first._note(store, account(0))  # type: ignore[arg-type]
    assert third.heard() == {0: account(0)}
    # One that is lost, for whatever reason, does not come any more.
    first.publish(account(2))
    assert third.heard() == {0: account(2)} and third.some_rank_failed()
    first.go_on()
    assert third.heard() == {0: account(2)} and third.some_rank_failed()
    second.publish(Account("stepping", failure="no space left"))
    assert third.some_rank_failed() and third.heard()[1].failure == "no space left"


def test_asking_whether_a_rank_has_failed_is_one_small_request(store: CountingStore) -> None:
    ranks = [rank_of(number, 64) for number in range(64)]
    for number, each in enumerate(ranks):
        each.watch._note(store, account(number))  # type: ignore[arg-type]
    ranks[0].comm.backend = "gloo"
    store.nbytes = store.requests = 0
    assert not ranks[0]._others_failed()
    assert store.requests == 1 and store.nbytes < 100
