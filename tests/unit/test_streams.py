"""Streams: order of work, errors, time limits, and the end of threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from zeropp.comm.streams import InlineStream, Stream, ThreadStream, make_stream


@pytest.fixture
def stream() -> Iterator[ThreadStream]:
    made = ThreadStream("test")
    yield made
    made.close()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("zeropp")}


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


def explode() -> None:
    raise ValueError("the work failed")


# ThreadStream.


def test_work_runs_in_order_on_one_other_thread(stream: ThreadStream) -> None:
    seen: list[int] = []
    where: set[int] = set()

    def work(index: int) -> None:
        where.add(threading.get_ident())
        time.sleep(0.002 * (index % 3))
        seen.append(index)

    events = [stream.run(lambda i=i: work(i)) for i in range(20)]
    assert events[7].wait(5) and len(seen) >= 8
    assert events[19].wait(5)
    assert seen == list(range(20))
    assert len(where) == 1 and where != {threading.get_ident()}
    assert all(event.wait(0) for event in events), "an event must stay done"


def test_run_does_not_wait(stream: ThreadStream) -> None:
    gate = threading.Event()
    event = stream.run(lambda: gate.wait(5) and None)
    assert not event.wait(0.01), "a wait that times out must return False"
    assert not event.wait(0.0)
    gate.set()
    assert event.wait(5)


def test_many_may_wait_for_one_event(stream: ThreadStream) -> None:
    gate = threading.Event()
    event = stream.run(lambda: gate.wait(5) and None)
    results: list[bool] = []
    waiters = [threading.Thread(target=lambda: results.append(event.wait(5))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    gate.set()
    for waiter in waiters:
        waiter.join()
    assert results == [True] * 4


def test_an_error_reaches_every_wait_and_all_later_work(stream: ThreadStream) -> None:
    ran: list[str] = []
    before = stream.run(lambda: ran.append("before"))
    failed = stream.run(explode)
    after = stream.run(lambda: ran.append("after"))
    for event in (failed, after, failed):
        with pytest.raises(ValueError, match="the work failed"):
            event.wait(5)
    assert before.wait(5) and ran == ["before"], "work behind a failure must not run on half of its input"
    with pytest.raises(ValueError, match="the work failed"):
        stream.run(lambda: ran.append("much later")).wait(5)
    assert ran == ["before"]


def test_a_failure_that_is_no_exception_is_handed_over_too(stream: ThreadStream) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        stream.run(leave).wait(5)


def test_grad_mode_is_off_inside(stream: ThreadStream) -> None:
    modes: list[bool] = []
    with torch.enable_grad():
        assert stream.run(lambda: modes.append(torch.is_grad_enabled())).wait(5)
        assert InlineStream().run(lambda: modes.append(torch.is_grad_enabled())).wait(5)
        assert torch.is_grad_enabled()
    assert modes == [False, False]


def test_close_ends_the_thread_after_queued_work() -> None:
    before = threads()
    stream = ThreadStream("closing")
    (thread,) = threads() - before
    assert thread.daemon and thread.name == "zeropp closing"
    seen: list[int] = []
    stream.run(lambda: time.sleep(0.05))
    last = stream.run(lambda: seen.append(1))
    stream.close()
    assert not thread.is_alive() and seen == [1] and last.wait(0)
    stream.close()  # a second close does nothing


def test_close_does_not_hang_with_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeropp.comm.threads._CLOSING", 0.05)
    before = threads()
    stream = ThreadStream("hanging")
    (thread,) = threads() - before
    gate = threading.Event()
    stream.run(lambda: gate.wait(5) and None)
    stream.close()
    assert thread.is_alive()
    gate.set()
    thread.join(5)
    assert not thread.is_alive()


def test_close_ends_a_failed_thread() -> None:
    before = threads()
    stream = ThreadStream("failing")
    (thread,) = threads() - before
    stream.run(explode)
    stream.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_dropped_stream_ends_its_thread() -> None:
    before = threads()
    stream: ThreadStream | None = ThreadStream("dropped")
    (thread,) = threads() - before
    assert stream is not None and stream.run(lambda: None).wait(5)
    del stream
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_an_idle_thread_keeps_nothing_alive(stream: ThreadStream) -> None:
    class Work:
        def __call__(self) -> None:
            pass

    work = Work()
    gone = weakref.ref(work)
    event = stream.run(work)
    assert event.wait(5)
    del work, event
    gc.collect()
    assert wait_until(lambda: gone() is None)


def test_free_is_at_once(stream: ThreadStream) -> None:
    """On CPU all readers are done when the caller frees, so ``free`` does not wait for queued work."""
    gate, seen = threading.Event(), []
    event = stream.run(lambda: gate.wait(5) and None)
    stream.free(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    gate.set()
    assert event.wait(5)


# InlineStream.


def test_inline_runs_at_once() -> None:
    stream, seen = InlineStream(), []
    event = stream.run(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()] and event.wait(0)
    stream.free(lambda: seen.append(0))
    assert seen[-1] == 0
    stream.close()


def test_inline_errors_are_the_caller_s() -> None:
    with pytest.raises(ValueError, match="the work failed"):
        InlineStream().run(explode)
    assert torch.is_grad_enabled(), "grad mode must be restored"


# The choice of stream.


@pytest.mark.parametrize(
    ("sends", "overlap", "kind"),
    [
        (True, True, ThreadStream),
        (True, False, InlineStream),
        (False, True, InlineStream),
        (False, False, InlineStream),
    ],
)
def test_make_stream_on_cpu(sends: bool, overlap: bool, kind: type[Stream]) -> None:
    made = make_stream("made", torch.device("cpu"), sends=sends, overlap=overlap)
    assert type(made) is kind
    made.close()


@pytest.mark.gpu
def test_cuda_work_is_ordered_behind_the_caller_s_and_before_the_waiter_s() -> None:
    made = make_stream("made", torch.device("cuda"), sends=True, overlap=True)
    source = torch.zeros(1 << 22, device="cuda")
    copy = torch.empty_like(source)
    for _ in range(20):
        source.add_(1)

    def work() -> None:
        assert torch.cuda.current_stream() != torch.cuda.default_stream() and not torch.is_grad_enabled()
        copy.copy_(source)

    event = made.run(work)
    assert event.wait(1.0)
    assert copy.add(1).eq(21).all()
    made.free(lambda: copy.untyped_storage().resize_(0))
    made.close()
    assert copy.untyped_storage().nbytes() == 0


def test_a_failed_stream_ends_when_it_is_dropped() -> None:
    """The error's traceback frames refer to the stream, as those of an engine's work refer to the engine."""
    before = threads()
    stream = ThreadStream("test")

    def fail(own: ThreadStream) -> None:
        raise ValueError("the work failed")

    event = stream.run(partial(fail, stream))
    with pytest.raises(ValueError, match="the work failed") as caught:
        event.wait(5)
    assert "fail" in [entry.name for entry in caught.traceback]
    del stream, event, caught
    gc.collect()
    assert wait_until(lambda: threads() == before)
