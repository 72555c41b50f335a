"""Threads that step chunks of weights on the host's cores.

Each thread of a :class:`CpuStepPool` calls torch's fused kernel on chunks, with one intra-op thread. A kernel call on a
whole tensor would use the intra-op threads of the process, which training needs.
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

__all__ = ["CHUNK_NUMEL", "CpuStepPool", "spare_cores", "step_slices"]

CHUNK_NUMEL = 2048 * CUT
"""Number of elements of a chunk, 512 Ki. With fast memory, AdamW takes 0.25 ms for a chunk, so the 9 us of a kernel
call cost little: 2.08e9 elements per second, against 2.24e9 in one call. A few million elements still give several
threads enough chunks to stay busy until the end."""
_ALIKE = 1.25  # timings are trusted if the second fastest of four runs takes at most this multiple of the fastest
_NEARLY = 1.15  # fewer threads are preferred if they take at most this multiple of the fastest time


class CpuStepPool:
    """Threads that run closures together with the calling thread, each with one intra-op thread and without gradients.

    The threads are daemons. They end when this object is closed or garbage-collected, and before the interpreter exits.

    Attributes:
        count: number of threads, including the calling thread.
    """

    def __init__(self, count: int) -> None:
        """Start ``count - 1`` threads.

        Args:
            count: number of threads, including the calling thread.

        Raises:
            ValueError: ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"CpuStepPool({count}): expected at least 1, the caller's thread")
        self.count = count
        self._streams = [ThreadStream(f"core {number}") for number in range(1, count)]

    def run_chunks(self, chunks: Sequence[Callable[[], object]]) -> None:
        """Run all chunks in parallel and in any order, and return when all have ended, even if some failed.

        Args:
            chunks: closures without arguments, which must not call this method.

        Raises:
            BaseException: the first error that a chunk raised.
        """
        waiting = deque(chunks)
        errors = list[BaseException]()
        ended = SimpleQueue[None]()
        work = partial(_work, waiting, errors, ended)
        # The caller runs chunks too, so wake at most one thread fewer than there are chunks.
        for stream in self._streams[: max(len(chunks) - 1, 0)]:
            stream.run(work)
        work()
        # Wait for each chunk instead of each thread, because a closed thread runs no chunk and would never report.
        for _ in chunks:
            ended.get()
        if errors:
            first = errors[0]
            # Clear the list, because the errors' tracebacks refer to this frame, and thus to the list: a reference
            # cycle.
            errors.clear()
            try:
                raise first
            finally:
                del first

    def close(self) -> None:
        """End the threads. Chunks that are run afterwards run in the calling thread only."""
        streams = self._streams
        self._streams = []
        for stream in streams:
            stream.close()


def _work(waiting: deque[Callable[[], object]], errors: list[BaseException], ended: SimpleQueue[None]) -> None:
    # Enter these contexts for each run, because one of the threads is the caller's, which also runs other code.
    with one_intra_op_thread(), torch.no_grad():
        while True:
            try:
                chunk = waiting.popleft()
            except IndexError:  # another thread took the last chunk
                return
            _attempt(chunk, errors)
            # Drop the chunk before reporting its end, because the caller may then need its tensors' memory.
            del chunk
            ended.put(None)


def _attempt(chunk: Callable[[], object], errors: list[BaseException]) -> None:
    try:
        chunk()
    except BaseException as error:
        errors.append(error)


def step_slices(
    cores: CpuStepPool, rule: Rule, steps: Sequence[SliceStep], copies: Sequence[tuple[Tensor, Tensor]] = ()
) -> None:
    """Step all given slices in place. The result has the same bits for any number of threads.

    Args:
        cores: threads that run the step.
        rule: rule of the wrapped optimizer.
        steps: slices to step.
        copies: pairs of target and source to copy beside the steps, in the same threads.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device that `SliceStep` requires; nothing is stepped.
    """
    # Check all slices before the first step, because a later refusal would leave some weights new and others old.
    for one in steps:
        _check_settings(rule, one)
    chunks: list[Callable[[], object]] = []
    for one in steps:
        chunks += [partial(_step_chunk, rule, part) for part in one.split(CHUNK_NUMEL, rule.states(one.settings))]
    for target, source in copies:
        parts = zip(target.split(CHUNK_NUMEL), source.split(CHUNK_NUMEL), strict=True)
        chunks += [partial(into.copy_, values) for into, values in parts]
    cores.run_chunks(chunks)


def _step_chunk(rule: Rule, one: SliceStep) -> None:
    rule.step_slice(one)
    if one.rounded is not None:
        # The new weights are still in the cache. A pass of its own over all weights would read them from memory again.
        one.rounded.copy_(one.param)


def _check_settings(rule: Rule, one: SliceStep) -> None:
    """Raise if a slice's tensors do not fit the kernels, which read raw addresses and check nothing themselves."""
    missing = [name for name in rule.states(one.settings) if name not in one.states]
    if missing:
        found = f"a slice has states {sorted(one.states)} and no {', '.join(missing)}"
        raise ValueError(f"{found}; call the rule's begin_step first")
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
    """Return the number of threads for steps on the host.

    The limit is the number of cores that the process may run on, divided by ``local_ranks``, minus one core for the
    training thread. Within the limit, the first call measures the number of threads beyond which steps do not get
    faster. Later calls with the same limit return the measured number.

    Args:
        local_ranks: number of ranks that share these cores; 1 if the launcher binds each rank to its own cores.

    Raises:
        ValueError: ``local_ranks`` is less than 1.
    """
    if local_ranks < 1:
        raise ValueError(f"spare_cores({local_ranks}): expected the number of ranks on this host, at least 1")
    # Read the process's own cores instead of os.cpu_count(), because containers and launchers may restrict them.
    return _useful(max(len(os.sched_getaffinity(0)) // local_ranks - 1, 1))


@cache
def _useful(limit: int) -> int:
    """Return the smallest of the numbers of threads 1, 2, 4, ... and ``limit`` that steps nearly as fast as the best.

    A single core may already saturate the memory bus. On 2 cores of an EPYC, AdamW on 16 Mi elements took 8.0 ms with
    one thread and 6.7 ms with two; on 4 Mi elements it took 1.8 ms with either. More threads than needed take cores
    from data loading.
    """
    if limit == 1:
        return 1
    times: dict[int, float] = {}
    # Use two chunks per thread, but 8 to 32 in all: 64 to 256 MiB, more than most caches hold. The first touch of this
    # memory takes most of the measurement's time.
    step = _trial(min(max(2 * limit, 8), 32) * CHUNK_NUMEL)
    for count in [*(1 << power for power in range((limit - 1).bit_length())), limit]:
        cores = CpuStepPool(count)
        fastest, second = sorted(_seconds(step, cores) for _ in range(4))[:2]
        cores.close()
        if second > _ALIKE * fastest:
            # Other processes use the machine, so timings are unreliable. Fall back to the limit, which follows from
            # counts alone.
            return limit
        times[count] = fastest
    return next(count for count, seconds in times.items() if seconds <= _NEARLY * min(times.values()))


def _trial(numel: int) -> Callable[[CpuStepPool], None]:
    """Return a function that takes a trial step of AdamW over ``numel`` elements with a given pool."""
    param = torch.ones(numel, device="cpu")
    optimizer = AdamW([param])
    rule = rule_of(optimizer)
    state = dict[str, Tensor]()
    assert rule is not None  # AdamW has a rule
    settings = rule.snapshot(optimizer.param_groups[0])
    step = rule.begin_step(settings, param, state)
    one = SliceStep(param, torch.full_like(param, 1e-3), state, settings, step)
    return partial(step_slices, rule=rule, steps=[one])


def _seconds(step: Callable[[CpuStepPool], None], cores: CpuStepPool) -> float:
    """Return the duration of a trial step in seconds."""
    begin = time.perf_counter()
    step(cores)
    return time.perf_counter() - begin
