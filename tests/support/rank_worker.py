"""The process of one rank of the pool, which waits for a call, runs the call in its own process group, and reports.

Messages are pickles on one duplex pipe. The parent sends a `Call`. The rank sends `begun` when it has imported all
modules for the call, and then `ok` or `fail`. The parent sends `release` when all ranks have answered, or at once to a
rank that failed. The rank then destroys its process group and sends `idle` with its number of threads. So a successful
rank keeps its sockets open until all ranks have finished. A failed rank closes its sockets at once, which wakes peers
that wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

_CACHED = type(functools.cache(len))


@dataclass(frozen=True)
class Call:
    """One call as each rank receives it; `payload` is the pickled (fn, args, kwargs)."""

    rank: int
    world: int
    local_world_size: int
    store_port: int
    timeout: float
    init: bool
    env: dict[str, str]
    payload: bytes


@dataclass
class RankFailure:
    """The exception of one rank.

    Attributes:
        rank: number of the rank.
        type_name: name of the exception's class.
        message: the exception's message.
        text: the traceback.
        bases: full names of the exception's class and its base classes.
        exception: the exception object; None if it cannot be pickled.
    """

    rank: int
    type_name: str
    message: str
    text: str
    bases: list[str] = field(default_factory=list, repr=False)
    exception: BaseException | None = field(default=None, repr=False)

    def is_a(self, kind: type[BaseException]) -> bool:
        """Return True if the exception was an instance of `kind`, also for exceptions that cannot be pickled."""
        return _full_name(kind) in self.bases


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(value: object, limit: int = 300) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "..."


def describe(error: BaseException, rank: int) -> RankFailure:
    """Return a caught exception as a RankFailure, which can be pickled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError) and trace is not None:
        # pytest does not rewrite asserts in this process, so take the values from the frame.
        last = trace
        while last.tb_next is not None:
            last = last.tb_next
        values = "".join(f"    {name} = {_short(value)}\n" for name, value in last.tb_frame.f_locals.items())
        text += "  locals of the last frame:\n" + values
    kept: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kept = None
    bases = [_full_name(kind) for kind in type(error).__mro__]
    message = str(error)
    traceback.clear_frames(error.__traceback__)  # the frames keep tensors, modules and process groups alive
    return RankFailure(rank, type(error).__qualname__, message, text, bases, kept)


@contextlib.contextmanager
def _environment(call: Call) -> Iterator[None]:
    """Set the variables that torchrun would set. `env://` finds the store that the parent created for this call."""
    before = dict(os.environ)
    local_rank = call.rank % call.local_world_size
    os.environ.update(
        RANK=str(call.rank),
        WORLD_SIZE=str(call.world),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(call.local_world_size),
        GROUP_RANK=str(call.rank // call.local_world_size),
        GROUP_WORLD_SIZE=str(call.world // call.local_world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.update(call.env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start_clean() -> None:
    """Reset the global state, so that each call starts from the same state."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _let_streams_end() -> None:
    """Wait up to 0.3 seconds for the threads of dropped engines to finish their collectives, mostly refreshes.

    Their collectives need the other ranks, which keep their process groups only until all ranks have answered.
    """
    until = time.monotonic() + 0.3
    for thread in threading.enumerate():
        if thread.name.startswith("zeropp") and thread.name != "zeropp watch":
            thread.join(max(until - time.monotonic(), 0.0))


def _forget_meshes() -> None:
    """Clear torch's caches for DTensor. Their keys keep device meshes alive, with process groups and threads."""
    tensors = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.tensor")]
    classes = [value for module in tensors for value in vars(module).values() if isinstance(value, type)]
    for values in map(vars, (*tensors, *classes)):
        for value in list(values.values()):
            if isinstance(value, _CACHED):
                value.cache_clear()
    if tensors:
        from torch.distributed.tensor import _redistribute, debug

        # Some versions of torch have only one of these functions.
        for owner, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
            getattr(owner, name, lambda: None)()


def _threads() -> int:
    """Return the number of threads of this process, including gloo's; 0 on systems other than Linux."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def _run(call: Call, pipe: Connection) -> None:
    with _environment(call):
        try:
            _start_clean()
            if call.init:
                # The parent detects hangs by its own clock, so the group's timeout is later.
                dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=call.timeout + 30))
            fn, args, kwargs = pickle.loads(call.payload)
            if call.init:
                # A new rank imports the test's modules above. The barrier keeps the imports out of the test's time
                # limit.
                dist.barrier()
            pipe.send_bytes(pickle.dumps(("begun", None)))
            result = fn(*args, **kwargs)
            try:
                # Plain pickle copies tensor bytes; torch's own pipes would pass file descriptors.
                answer = pickle.dumps(("ok", result))
            except Exception as error:
                raise TypeError(f"the result of {fn.__qualname__} cannot be pickled: {error}") from error
            result = fn = args = kwargs = None
            _forget_meshes()
            gc.collect()
            _let_streams_end()
        except BaseException as error:
            answer = pickle.dumps(("fail", describe(error, call.rank)))
            result = fn = args = kwargs = None
            gc.collect()
        pipe.send_bytes(answer)
        if pickle.loads(pipe.recv_bytes()) != "release":
            os._exit(3)
        if dist.is_initialized():
            dist.destroy_process_group()
    # Exempt surviving objects, mostly imported modules, from garbage collection, because scanning them costs 50 ms per
    # call. Do not freeze while a comm stream of a dropped engine still runs: the objects that hold its process groups
    # would never be freed, and each of their threads wakes a hundred times per second.
    if threading.active_count() == 1:
        gc.freeze()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pipe.send_bytes(pickle.dumps(("idle", _threads())))


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the parent sends `exit` or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: this process ends when the parent is killed
    if os.getppid() != parent:
        os._exit(4)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    pipe = Connection(descriptor)
    _start_clean()  # imports the rest of torch
    gc.collect()
    gc.freeze()
    pipe.send_bytes(pickle.dumps(("idle", _threads())))
    while True:
        try:
            order = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        if order == "exit":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # skip the destructors of objects that tests have left
        _run(order, pipe)
