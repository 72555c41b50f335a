"""A host that is blocked in a launch, where Python cannot interrupt it: the monitor aborts the collective and raises.

The test simulates a GPU. Work is queued, the host waits for no event, and the queue is short. A collective that misses
a rank never ends by itself.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench.common import staged
from tests.support.branch_routes import ALL
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair
from zeropp.comm import streams, watch
from zeropp.comm.streams import Event, Stream

HANG_TIMEOUT = 2.0
GRACE = 5.0
ERRORS: list[str] = []  # messages that were logged as errors
LOGGED_FIRST: list[bool] = []  # for each abort, True if the error was logged before it
# References to gloo's groups: a destructor would wait for work in flight until the other rank's process ends.
KEPT: list[object] = []


class DeviceEvent:
    """An event whose wait on the simulated GPU has no time limit, as on a real GPU."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self, timeout: float) -> bool:
        self.over.wait()
        return True

    def done(self) -> bool:
        return self.over.is_set()


class DeviceStream(streams.InlineStream):
    """A queue of two entries. The host is blocked in the launch while the queue is full."""

    def __init__(self) -> None:
        self.tasks: queue.Queue[tuple[tuple[Callable[[], object], ...], Event | None, DeviceEvent]]
        self.tasks = queue.Queue(2)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            works, after, event = self.tasks.get()
            if after is not None:
                after.wait(0.0)
            for work in works:
                # Ignore errors of aborted work: after an abort a GPU continues with the present contents of its memory.
                with contextlib.suppress(RuntimeError):
                    work()
            event.over.set()

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        event = DeviceEvent()
        self.tasks.put((works, after, event))
        return event


class Endless:
    """A gloo group without a timeout, like NCCL's kernels. Only an abort ends its work in flight."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(hours=1))
        self.aborted = False
        KEPT.append(self.gloo)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.gloo, name)
        return lambda *arguments: Pending(self, call(*arguments))

    def abort(self) -> None:
        LOGGED_FIRST.append(bool(ERRORS))
        self.aborted = True


class Pending:
    def __init__(self, group: Endless, work: dist.Work) -> None:
        self.group, self.work = group, work

    def wait(self) -> None:
        while not self.work.is_completed():
            if self.group.aborted:
                raise RuntimeError("aborted")
            time.sleep(0.001)


def make_stream(name: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool) -> Stream:
    return DeviceStream()


class Noting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        ERRORS.append(record.getMessage())


def stuck() -> tuple[str, float, bool, list[str], list[bool]]:
    """Let rank 1 stay away from a step, so that rank 0 is blocked in a launch.

    Returns:
        The error, seconds until it, True if the next step raises the same error at once, logged errors, and for each
        aborted group True if the error was logged first.
    """
    staged.register()
    noting = Noting(logging.ERROR)
    logging.getLogger("zeropp").addHandler(noting)
    with (
        mock.patch.object(streams, "make_stream", make_stream),
        mock.patch.object(watch, "BLIND", {"cpu"}),
        mock.patch.object(staged, "GLOO", Endless),
    ):
        dist.init_process_group(staged.NAME)
        pair = Pair(Routed(8), make_config(hang_timeout=HANG_TIMEOUT, warn_after=None, prefetch=0, reuse=0))
        for _ in range(3):
            pair.train(ALL)
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        if pair.rank == 1:
            store.wait(["told"], timedelta(seconds=30))
            return "", 0.0, True, [], []
        start, said = time.monotonic(), ""
        try:
            pair.train(ALL)
        except RuntimeError as error:
            said = str(error)
        seconds = time.monotonic() - start
        again = ""
        try:
            pair.train(ALL)
        except RuntimeError as error:
            again = str(error)
        store.set("told", "")
        pair.optimizer.close()
    logging.getLogger("zeropp").removeHandler(noting)
    return said, seconds, again == said, ERRORS, LOGGED_FIRST


def test_a_host_that_is_stuck_in_a_launch() -> None:
    said, seconds, again, errors, logged_first = run_ranks(2, stuck, init=False, timeout=60)[0]
    assert "rank 0 was waiting for the gather of unit " in said and "no longer in step" in said
    assert f"hang_timeout, {HANG_TIMEOUT:g} s, was reached" in said and "No weight was changed" in said
    assert HANG_TIMEOUT <= seconds < HANG_TIMEOUT + GRACE and again
    # The error must be logged before an abort, because an abort may end the process.
    assert errors == [f"rank 0: {said}"] and logged_first and all(logged_first)
