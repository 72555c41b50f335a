"""Cores: the threads that step on the CPU, and steps of slices cut into chunks for them.

torch's own way is to divide each kernel among intra-op threads, whose number is the process's: training would have to
give up its own. Here a few threads each call the kernel on chunks, and leave that number alone.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.optim import AdamW

from zeropp._compat import one_intra_op_thread
from zeropp.comm.streams import ThreadStream
from zeropp.optimizer.fused import CUT, Rule, SliceStep, rule_of

__all__ = ["CHUNK_NUMEL", "Cores", "spare_cores", "step_slices"]

CHUNK_NUMEL = 2048 * CUT
"""Elements of a chunk, 512 Ki: AdamW takes a quarter of a millisecond where memory is fast, of which a call's 9 us are
little (2.08e9 elements a second against 2.24e9 in one call), and yet a few million elements keep several threads busy
until the end."""

_ALIKE = 1.25  # the second fastest of four runs to the fastest, where figures can be believed
_NEARLY = 1.15  # what fewer threads may take, where more would take 1


class Cores:
    """Threads that run small closures, the caller among them; each with one intra-op thread, and no gradients.

    The threads are daemons. They end when this object is closed or dropped, and before the interpreter does.
    """

    def __init__(self, count: int) -> None:
        """Start ``count - 1`` threads.

        Raises:
            ValueError: ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"Cores({count}): expected at least 1, the caller's thread")
        self.count = count
        self._streams = [ThreadStream(f"core {number}") for number in range(1, count)]

    def run(self, chunks: Sequence[Callable[[], object]]) -> None:
        """Run all of ``chunks``, in any order and at once; returns when all have ended, those that fail as well.

        Args:
            chunks: closures that do not call this.

        Raises:
            BaseException: the first error of one of them.
        """
        waiting, errors, ended = deque(chunks), list[BaseException](), SimpleQueue[None]()
        work = partial(_work, waiting, errors, ended)
        # The caller takes one of them, and no thread is woken for nothing.
        for stream in self._streams[: max(len(chunks) - 1, 0)]:
            stream.run(work)
        work()
        # A word for each chunk, and none for each thread: one that has ended, or was lost in a fork, has no chunk.
        for _ in chunks:
            ended.get()
        if errors:
            first = errors[0]
            # Or the errors, whose tracebacks have frames with this list and this name, would hold themselves.
            errors.clear()
            try:
                raise first
            finally:
                del first

    def close(self) -> None:
        """End the threads; what is run afterwards runs in the caller alone."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()


def _work(waiting: deque[Callable[[], object]], errors: list[BaseException], ended: SimpleQueue[None]) -> None:
    # At each run and in every thread: whoever else uses a thread, the caller's above all, finds it as it was.
    with one_intra_op_thread(), torch.no_grad():
        while True:
            try:
                chunk = waiting.popleft()
            except IndexError:  # another thread took the last
                return
            _attempt(chunk, errors)
            # Before the caller hears of it, which may then want the tensors' memory back.
            del chunk
            ended.put(None)


def _attempt(chunk: Callable[[], object], errors: list[BaseException]) -> None:
    try:
        chunk()
    except BaseException as error:
        errors.append(error)


def step_slices(cores: Cores, rule: Rule, steps: Sequence[SliceStep]) -> None:
    """Step all of ``steps`` in place; the bits are those of whole tensors, however many cores there are.

    Raises:
        ValueError: a tensor of a slice is not as `SliceStep` says; nothing has been stepped.
    """
    # All of them first: a step that is refused half-way would leave some weights new and others old.
    for one in steps:
        _check(rule, one)
    cores.run(
        [partial(_step_chunk, rule, one, start) for one in steps for start in range(0, one.param.numel(), CHUNK_NUMEL)]
    )


def _step_chunk(rule: Rule, one: SliceStep, start: int) -> None:
    # Cut here, and not for all chunks before the first one runs: the threads share this work, too.
    part = slice(start, start + CHUNK_NUMEL)
    states = {name: one.states[name][part] for name in rule.states(one.settings)}
    rule.run(SliceStep(one.param[part], one.grad[part], states, one.settings, one.step, one.grad_scale))


def _check(rule: Rule, one: SliceStep) -> None:
    """Kernels take the addresses of tensors and the length of the parameter, and ask no further."""
    missing = [name for name in rule.states(one.settings) if name not in one.states]
    if missing:
        found = f"a slice has states {sorted(one.states)} and no {', '.join(missing)}"
        raise ValueError(f"{found}; let the rule begin its step")
    tensors = {"param": one.param, "grad": one.grad} | {name: one.states[name] for name in rule.states(one.settings)}
    for name, tensor in tensors.items():
        if (
            tensor.shape != (one.param.numel(),)
            or tensor.dtype != one.param.dtype
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} of a slice is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} with strides "
                f"{tensor.stride()}; expected a contiguous ({one.param.numel()},) {one.param.dtype} on cpu"
            )
    scale = one.grad_scale
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device.type != "cpu"):
        raise ValueError(
            f"grad_scale of a slice is {tuple(scale.shape)} {scale.dtype} on {scale.device}; "
            "expected a float32 scalar on cpu"
        )


def spare_cores(local_ranks: int) -> int:
    """Threads to step with: as many as make it faster, of those that the training thread leaves to this rank.

    Those are the cores that the process may run on, divided among the ranks, less one. The first call measures.

    Args:
        local_ranks: that share these cores: the ranks of this host, or 1 where the launcher binds each to its own.

    Raises:
        ValueError: ``local_ranks`` is less than 1.
    """
    if local_ranks < 1:
        raise ValueError(f"spare_cores({local_ranks}): expected the number of ranks on this host, at least 1")
    # Not os.cpu_count: containers and launchers give a process some of the cores.
    return _useful(max(len(os.sched_getaffinity(0)) // local_ranks - 1, 1))


@cache
def _useful(limit: int) -> int:
    """The fewest threads, of 1, 2, 4, ... and ``limit``, that step nearly as fast as any of them.

    One core's loads and stores may already fill the memory bus: on 2 cores of an EPYC, 16 Mi elements of AdamW took 8.0
    ms by one thread and 6.7 by two, and 4 Mi 1.8 by either. Threads beyond that only take cores from who loads data.
    """
    if limit == 1:
        return 1
    times: dict[int, float] = {}
    # Two chunks a thread, and more than most caches hold: 64 to 256 MiB, whose first touch takes most of the time.
    step = _trial(min(max(2 * limit, 8), 32) * CHUNK_NUMEL)
    for count in [*(1 << power for power in range((limit - 1).bit_length())), limit]:
        cores = Cores(count)
        fastest, second = sorted(_seconds(step, cores) for _ in range(4))[:2]
        cores.close()
        if second > _ALIKE * fastest:
            # Others use the machine, so that figures say little. What every rank has by count is the answer then.
            return limit
        times[count] = fastest
    return next(count for count, seconds in times.items() if seconds <= _NEARLY * min(times.values()))


def _trial(numel: int) -> Callable[[Cores], None]:
    """A step of AdamW over ``numel`` elements."""
    param = torch.ones(numel, device="cpu")
    optimizer = AdamW([param])
    rule, state = rule_of(optimizer), dict[str, Tensor]()
    assert rule is not None  # it has one
    settings = rule.snapshot(optimizer.param_groups[0])
    step = rule.begin(settings, param, state)
    one = SliceStep(param, torch.full_like(param, 1e-3), state, settings, step)
    return partial(step_slices, rule=rule, steps=[one])


def _seconds(step: Callable[[Cores], None], cores: Cores) -> float:
    begin = time.perf_counter()
    step(cores)
    return time.perf_counter() - begin
