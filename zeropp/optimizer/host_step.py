"""Optimizer steps on the host's cores, which run beside the next forward.

:class:`HostStep` decides a step and queues it, unit by unit.

:class:`CpuStepPool` holds the threads that run a step. Each thread calls torch's fused kernel on chunks, with one
intra-op thread. A kernel call on a whole tensor would use the intra-op threads of the process, which training needs.

:class:`SubGroupSteps` steps shards whose numbers are not all in host memory, or whose new weights must be copied
elsewhere. A sub-group's numbers in files are read into staging buffers, stepped there and written back. Meanwhile the
next sub-group may be read and the previous one written. The staging buffers limit the size of a sub-group: each kind of
number that is in a file needs a part of a buffer for each sub-group in flight. A chunk's new weights are rounded right
after its step, while they are in the cache. Those for the device go through staging buffers of their own, and a second
stream copies them while the next sub-group is stepped (:class:`~zeropp.params.wire_copy.Upload`).

[Note: steps on the host] If optimizer states are offloaded, ``step()`` first decides everything: if the step is
skipped, the factor that clips gradients, the set of gradients, and a copy of the settings and step counts. Then
``step()`` queues one piece of work per unit, in the order of the next forward, and returns. Nothing is speculative, so
nothing is ever undone, and the results equal those of a step that ``step()`` waits for. From then on the weights'
versions count as new (`Engine.weights_changed`). Each use of a unit waits for that unit's step: gathers and refreshes
wait on their comm streams, and a model that computes with main weights waits on the host. All other calls wait in
`Engine.require_idle`, except calls that are allowed beside a step. A backward also waits, because its gradients
overwrite those that the step reads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import itemgetter
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from zeropp._compat import one_intra_op_thread
from zeropp.comm.streams import Event, ThreadStream, make_stream
from zeropp.config import Config
from zeropp.engine.engine import Engine
from zeropp.offload import storage_tiers
from zeropp.offload.read_ahead import Ring
from zeropp.offload.swap import ALIGNED
from zeropp.offload.tier_choice import ALL, upload_staging
from zeropp.optimizer.fused import CUT, Rule, SettingsSnapshot, SliceStep, rule_of
from zeropp.optimizer.sharded_params import ShardedParams, Slice
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient
from zeropp.params.wire_copy import Upload
from zeropp.setup.choices import choose_tier_options

__all__ = [
    "CHUNK_NUMEL",
    "BufferStep",
    "CpuStepPool",
    "HostStep",
    "SubGroupSteps",
    "spare_cores",
    "step_slices",
    "waits_for_weights",
]


class HostStep:
    """Steps the slices of one engine's weights on the host; see [Note: steps on the host].

    Attributes:
        lazy: True if ``step()`` returns before the host has stepped the weights.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, slices: ShardedParams, config: Config) -> None:
        block = config.zero.offload_optimizer
        assert block is not None  # HostStep is created only if offload_optimizer is configured
        self.lazy = config.zeropp.lazy_step
        self._read_ahead, self._write_behind = block.pipeline_read, block.pipeline_write
        self._engine = engine
        self._optimizer = optimizer
        self._slices = slices
        self._pool = CpuStepPool(spare_cores(_ranks_on_the_same_cores(engine)))
        # One thread runs all steps, so units are stepped in order and the next forward's first units are ready first.
        # The step's copies use a stream of their own. On the model's stream they would wait behind the forward that
        # should hide them.
        self._stream, self._uploads = (
            make_stream(name, engine.device, sends=False, overlap=True, hosted=True) for name in ("step", "upload")
        )
        # Staging buffers for new weights on their way to the device; None until some go there.
        self._upload_ring: Ring | None = None
        self._stepped = choose_tier_options(config).stepped
        self._make_upload_ring(engine.trainable_buffers)
        self._states: dict[FlatBuffer, dict[str, storage_tiers.StoredTensor]] = {}
        for stream in (self._stream, self._uploads):
            engine.agreement.on_loss(stream.abandon)
        # Users may call state_dict() or load_state_dict() of the wrapped optimizer itself, which must wait for the
        # step.
        waits = partial(_wait, weakref.ref(engine), Engine.wait_for_step)
        optimizer.register_state_dict_pre_hook(waits)
        optimizer.register_load_state_dict_pre_hook(waits)
        # Register methods of the pool and the stream. A method of this object would create a cycle, since it holds the
        # engine.
        engine.on_close(self._pool.close)
        engine.on_close(self._stream.close)
        engine.on_close(self._uploads.close)

    def _make_upload_ring(self, buffers: Iterable[FlatBuffer]) -> None:
        """Make the staging buffers for new weights, if there are none and some of the flat buffers need them."""
        sizes = [
            (buffer.main.tensor.numel(), source.dtype.itemsize)
            for buffer in buffers
            if (source := buffer.wire_copy) is not None and source.follows and source.uploads
        ]
        assert self._stepped is not None  # HostStep is created only if offload_optimizer is configured
        if self._upload_ring is None and (staging := upload_staging(self._stepped, self._engine.device, sizes)):
            self._upload_ring = staging.make_ring()
            self._engine.on_close(self._upload_ring.close)

    def can_step(self) -> bool:
        """Return True if a fused CPU kernel exists for the optimizer with its current settings."""
        return rule_of(self._optimizer) is not None

    def take_settings(self, slices: Sequence[Slice]) -> list[SettingsSnapshot]:
        """Return a copy of each group's settings after checking that the given slices can be stepped with them.

        Args:
            slices: slices that the host steps.

        Raises:
            RuntimeError: a slice lacks a state that a setting needs; no step has been counted or taken.
        """
        rule = rule_of(self._optimizer)
        assert rule is not None  # the caller has checked can_step()
        chosen = {id(part.parameter) for part in slices if part.parameter.grad is not None}
        taken = [rule.snapshot(group) for group in self._optimizer.param_groups]
        for settings, group in zip(taken, self._optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                if id(parameter) in chosen:
                    # Call dict's own methods here and below. Those of SliceStates also look up parameters of the model.
                    rule.check_state(settings, dict.get(self._optimizer.state, parameter, {}))
        return taken

    @torch.no_grad()
    def start_step(
        self, slices: Sequence[Slice], taken: Sequence[SettingsSnapshot], divisor: Tensor | None, *, waits: bool
    ) -> None:
        """Queue a step of each given slice that shows a gradient.

        Args:
            slices: slices that the host steps.
            taken: settings of each parameter group, from :meth:`take_settings`.
            divisor: float32 scalar on the CPU to divide gradients by; None to use them unchanged.
            waits: True to return only after all slices are stepped, even if steps are lazy.
        """
        rule = rule_of(self._optimizer)
        engine = self._engine
        assert rule is not None  # the caller has checked can_step()
        # New states may fail to fit into memory or disk. `watching` turns that failure into the common error of all
        # ranks.
        with engine.agreement.watching("making room for optimizer states", call="step()"):
            jobs = self._decide(rule, slices, taken, divisor)
            self._make_upload_ring(jobs)
            events = []
        # Use the forward's order, because the next forward waits for the first units and computes while later ones are
        # stepped.
        ring = self._upload_ring
        for unit in engine.units_in_forward_order():
            own = [jobs[buffer] for buffer in unit.trainable_buffers if buffer in jobs]
            if not own:
                continue
            # All units use both streams or all use one, so that after an error the later work of both streams fails.
            upload = None if ring is None else Upload(ring)
            event = self._stream.run(partial(self._step, rule, own, upload))
            if upload is not None:
                event = self._uploads.run(upload.run)
            events.append(event)
            unit.note_step(event)
        engine.agreement.step_under_way(events)
        if divisor is not None:
            # The step divides gradients in place without raising their versions, so their norms must count as outdated.
            for gradient in engine.gradients:
                gradient.mark_stale()
        if waits or not self.lazy:
            engine.wait_for_step()

    def _step(self, rule: Rule, jobs: list[BufferStep], upload: Upload | None) -> None:
        """Step the buffers of one unit, and send new weights to the device. Runs on the step thread."""
        try:
            self._step_all(rule, jobs, upload)
        except BaseException as error:
            if upload is not None:
                upload.end(error)
            raise
        if upload is not None:
            upload.end()

    def _step_all(self, rule: Rule, jobs: list[BufferStep], upload: Upload | None) -> None:
        # Step all slices in one call, so that small slices together keep all threads busy.
        in_place = [each for job in jobs if job.in_place for _, each in job.slices]
        if in_place:
            step_slices(self._pool, rule, in_place)
        others = [job for job in jobs if not job.in_place]
        if others:
            ring = self._engine.maker.tiers.ring
            sub_groups = SubGroupSteps(
                ring, self._pool, rule, read_ahead=self._read_ahead, write_behind=self._write_behind
            )
            sub_groups.step_buffers(others, upload)

    def _decide(
        self, rule: Rule, slices: Sequence[Slice], taken: Sequence[SettingsSnapshot], divisor: Tensor | None
    ) -> dict[FlatBuffer, BufferStep]:
        """Create missing states, count the step, and return the work of each buffer with copies of its settings."""
        chosen = {id(part.parameter): part for part in slices}
        jobs: dict[FlatBuffer, BufferStep] = {}
        for settings, group in zip(taken, self._optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                part = chosen.get(id(parameter))
                if part is None or part.buffer is None or parameter.grad is None:
                    continue
                # Step through ``.data``, which does not raise the parameter's version: versions must show only the
                # user's edits.
                param = parameter.data
                state = dict.get(self._optimizer.state, parameter, {})
                # The states of slices that the host steps are created in host memory, even if their weights are in GPU
                # memory or in a file.
                like = param if part.buffer.main.at_hand else torch.empty(param.shape, dtype=param.dtype, device="cpu")
                number = rule.begin_step(settings, like, state)
                # SGD without momentum has no state, and an empty entry would show in the optimizer's state_dict().
                if state:
                    dict.__setitem__(self._optimizer.state, parameter, state)
                job = jobs.setdefault(part.buffer, BufferStep(part.buffer))
                job.states = self._move_to_tier(part, part.buffer, state)
                states = {name: state[name] for name in rule.states(settings)}
                job.slices.append((part.offset, SliceStep(param, part.gradient, states, settings, number, divisor)))
        return jobs

    def keep_states(self, buffers: Sequence[FlatBuffer]) -> None:
        """Move states that the optimizer's own step created to their storage tier, where later steps find them.

        Args:
            buffers: flat buffers that the optimizer's own step has updated.
        """
        # Use a set, because every slice is looked up in it, and a large model has hundreds of slices and buffers.
        elsewhere = {buffer for buffer in buffers if not buffer.main.in_memory}
        for part in self._slices.stepped if elsewhere else ():
            state = dict.get(self._optimizer.state, part.parameter)
            if part.buffer is not None and part.buffer in elsewhere and state:
                self._move_to_tier(part, part.buffer, state)

    def _move_to_tier(
        self, part: Slice, buffer: FlatBuffer, state: dict[str, object]
    ) -> dict[str, storage_tiers.StoredTensor]:
        """Move a slice's elementwise states to their storage tier; return the buffer's stored tensors by state key.

        The result is empty if the states stay where the step creates them.
        """
        first = buffer.tiers.device_numel
        if buffer.main.in_memory and (not first or buffer.tiers.states.serves(buffer.device)):
            return {}
        rows = self._states.setdefault(buffer, {})
        for key, value in state.items():
            # A step count may have the shape of a parameter with one element, so exclude it by its key.
            if not isinstance(value, Tensor) or value.shape != part.parameter.shape or key == "step":
                continue
            if key not in rows:
                rows[key] = buffer.tiers.states.allocate_tensor(buffer.main.tensor.numel() - first, value.dtype)
            own = rows[key].tensor[part.offset - first : part.offset - first + value.numel()]
            # Copy a state that was created or loaded since the last step. Compare addresses, because each view is a new
            # object.
            if value.data_ptr() != own.data_ptr():
                # New stored tensors are zero already. Skip writing zeros, which would take as long as a step.
                if value.any() or own.any():
                    own.copy_(value)
                state[key] = own
        return rows


def waits_for_weights(engine: Engine) -> Callable[[], None] | None:
    """Return a function that waits until the caller may access the main weights; None if no wait is ever needed.

    The function waits for steps on the host. It also waits for refreshes whose message size depends on the weights,
    because the weights must not change between counting and sending. Other refreshes may read a weight while the caller
    edits it. The refreshed value is then mixed, but it is not kept: an edit of a whole group starts a new refresh, and
    after an edit of some tensors the next step is refused.

    Args:
        engine: engine of the main weights; the function holds it weakly.
    """
    counted = any(buffer.counts_escapes for unit in engine.units for buffer in unit.buffers)
    wait = Engine.wait_for_refresh if counted else Engine.wait_for_step if engine.maker.tiers.steps_on_host else None
    return wait and partial(_wait, weakref.ref(engine), wait)


def _wait(ref: weakref.ref[Engine], wait: Callable[[Engine], None], *_: object) -> None:
    if (engine := ref()) is not None and not engine.closed:
        wait(engine)


def _ranks_on_the_same_cores(engine: Engine) -> int:
    """Return the number of ranks on this node that may run on the same set of cores as this rank. Collective."""
    comm = engine.comm
    own = sorted(os.sched_getaffinity(0))
    # A launcher may bind each rank to its own cores. Such ranks do not share cores with this rank.
    told = engine.agreement.exchange_objects(own, "counting cores")
    node = comm.rank // comm.local
    return sum(cores == own for rank, cores in enumerate(told) if rank // comm.local == node)


# The pool of threads that step chunks.

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


# Steps of shards that are not all in host memory, one sub-group after another.

_MAIN = "main weights"
_GRADIENT = "gradients"
_Range = tuple[int, int]


@dataclass
class BufferStep:
    """Work of one optimizer step on one flat buffer.

    Attributes:
        buffer: flat buffer whose main weights are stepped.
        slices: pairs of a slice's first element in the shard and the slice's step.
        states: stored tensors of the elementwise states, by state key. They cover only the part of the shard that the
            host steps.
    """

    buffer: FlatBuffer
    slices: list[tuple[int, SliceStep]] = field(default_factory=list)
    states: dict[str, storage_tiers.StoredTensor] = field(default_factory=dict)

    @property
    def gradient(self) -> Gradient:
        """The gradient of the buffer."""
        assert self.buffer.gradient is not None  # only trainable buffers are stepped
        return self.buffer.gradient

    @property
    def clips(self) -> bool:
        """True if the step divides gradients before using them."""
        return any(each.grad_scale is not None for _, each in self.slices)

    @property
    def rows(self) -> dict[str, storage_tiers.StoredTensor]:
        """Stored tensors that the step reads, by kind: main weights, gradients and states."""
        return {_MAIN: self.buffer.main, _GRADIENT: self.gradient.row, **self.states}

    def place(self, kind: str, start: int) -> int:
        """Return the index, in a kind's stored tensor, of an element of the shard.

        States cover only the part of the shard that the host steps, so their stored tensors begin at that part.

        Args:
            kind: key in ``rows``.
            start: element of the shard.
        """
        return start - self.buffer.tiers.device_numel if kind in self.states else start

    @property
    def in_place(self) -> bool:
        """True if the host computes with all stored tensors in place and no other copy of the weights follows."""
        source = self.buffer.wire_copy
        return all(row.at_hand for row in self.rows.values()) and (source is None or not source.follows)

    @property
    def staged(self) -> list[str]:
        """Kinds of numbers that need staging buffers because they are in files, new weights for another copy included.

        New weights for the device have staging buffers of their own.
        """
        source = self.buffer.wire_copy
        in_file = source is not None and source.follows and not source.uploads and source.new_in_place(0, 0) is None
        return [kind for kind, row in self.rows.items() if not row.at_hand] + ["new weights"] * in_file

    def upload_room(self, upload: Upload | None) -> int:
        """Return the number of elements that a staging buffer for new weights holds; unlimited if none go there."""
        source = self.buffer.wire_copy
        if upload is None or source is None or not (source.follows and source.uploads):
            return ALL
        return upload.nbytes // source.dtype.itemsize

    def left_over(self, start: int, stop: int) -> Iterator[slice]:
        """Yield the parts of a sub-group that no slice steps: padding, and weights without a gradient.

        Args:
            start: first element of the sub-group in the shard.
            stop: last element + 1.
        """
        at = start
        for first, each in sorted(self.slices, key=itemgetter(0)):
            begin = min(max(first, at), stop)
            if begin > at:
                yield slice(at - start, begin - start)
            at = max(at, min(first + each.param.numel(), stop))
        if at < stop:
            yield slice(at - start, stop - start)

    def in_tile(self, start: int, values: dict[str, Tensor], rounded: Tensor | None = None) -> list[SliceStep]:
        """Return the steps of the slice parts that lie in one sub-group, on the sub-group's staged tensors.

        Args:
            start: first element of the sub-group in the shard.
            values: the sub-group's numbers, by kind.
            rounded: output for all new weights of the sub-group in the dtype of their copy; None if there is none.
        """
        stop = start + values[_MAIN].numel()
        found = []
        for first, each in self.slices:
            begin = max(first, start)
            end = min(first + each.param.numel(), stop)
            # A slice may cross a sub-group's border. Stepping its parts separately is correct, because steps are
            # elementwise.
            if begin < end:
                cut = slice(begin - start, end - start)
                own = slice(begin - first, end - first)
                # A state that stays in memory has no stored tensor: each slice has its own tensor instead.
                states = {k: values[k][cut] if k in values else state[own] for k, state in each.states.items()}
                found.append(
                    replace(
                        each, param=values[_MAIN][cut], grad=values[_GRADIENT][cut], states=states,
                        rounded=None if rounded is None else rounded[cut],
                    )
                )  # fmt: skip
        return found


class SubGroupSteps:
    """Steps many buffers once, sub-group by sub-group. The step has exclusive use of the ring of staging buffers."""

    def __init__(
        self, ring: Ring | None, cores: CpuStepPool, rule: Rule, *, read_ahead: bool, write_behind: bool
    ) -> None:
        """Configure the step.

        Args:
            ring: staging buffers for numbers in files, all of which the step takes; None if there are no files.
            cores: threads that step.
            rule: rule of the wrapped optimizer.
            read_ahead: True to read the next sub-group while the current one is stepped.
            write_behind: True to write a sub-group while the next one is stepped.
        """
        self._ring = ring
        self._pool = cores
        self._rule = rule
        self._count = 1 + read_ahead + write_behind
        self._read_ahead = read_ahead

    def step_buffers(self, jobs: Sequence[BufferStep], upload: Upload | None = None) -> None:
        """Step buffers one after another, and return when all results in files are written.

        Args:
            jobs: work of each buffer.
            upload: the way of new weights to the device; needed if any go there.
        """
        nothing = contextlib.nullcontext(list[Tensor]())
        with nothing if self._ring is None else self._ring.all_taken() as buffers:
            # Divide for the buffer with the most staged kinds. Small buffers stay in memory and stage fewer kinds.
            kinds = max(len(job.staged) for job in jobs)
            parts = _divide(buffers, kinds * self._count)
            slots = [_Staging(parts[index * kinds : (index + 1) * kinds]) for index in range(self._count)]
            itemsize = max(job.buffer.main_dtype.itemsize for job in jobs)
            most = _room(parts, itemsize)
            sub_groups = [
                (job, *sub_group) for job in jobs for sub_group in _cut(job.buffer, min(most, job.upload_room(upload)))
            ]
            try:
                for number, (job, start, stop) in enumerate(sub_groups):
                    own = slots[number % self._count]
                    if number == 0 or not self._read_ahead:
                        _begin_read(own, job, start, stop)
                    if self._read_ahead and number + 1 < len(sub_groups):
                        _begin_read(slots[(number + 1) % self._count], *sub_groups[number + 1])
                    # Wait for the reads of this sub-group.
                    own.wait_for_copies()
                    self._step(own, job, start, stop, upload)
                    if self._count == 1:
                        own.wait_for_copies()
            finally:
                # After an error, too, wait for all copies: the ring must not hand out memory that is still read or
                # written.
                with contextlib.ExitStack() as ending:
                    for each in slots:
                        ending.callback(each.wait_for_copies)

    def _step(self, own: _Staging, job: BufferStep, start: int, stop: int, upload: Upload | None) -> None:
        """Step one sub-group, and start writing the numbers that changed."""
        source = job.buffer.wire_copy
        new, copies = own.values[_MAIN], list[tuple[Tensor, Tensor]]()
        rounded = buffer = None
        if source is not None and source.follows:
            # Written by the step's own threads, in the dtype of the copy. A copy to a GPU that also converts would use
            # one core and pageable memory.
            rounded = source.new_in_place(start, stop)
            if rounded is None:
                if source.uploads:
                    assert upload is not None  # given if any new weights go to the device
                    buffer = upload.take_buffer()
                room = own.parts[len(job.staged) - 1] if buffer is None else buffer
                rounded = room[: new.numel() * source.dtype.itemsize].view(source.dtype)
            copies = [(rounded[part], new[part]) for part in job.left_over(start, stop)]
        step_slices(self._pool, self._rule, job.in_tile(start, own.values, rounded), copies)
        for kind, row in job.rows.items():
            # Only clipping changes gradients. Write clipped gradients back, unless zero_grad() has discarded them
            # meanwhile.
            if not row.at_hand and (kind != _GRADIENT or (job.clips and job.gradient.arrived)):
                own.events.append(row.write(job.place(kind, start), own.values[kind]))
        if source is None or rounded is None:
            return
        last = stop == job.buffer.main.tensor.numel()
        if buffer is not None and upload is not None:
            upload.send(source, start, rounded, buffer, last=last)
        elif source.new_in_place(start, stop) is None:
            own.events.append(source.take_new_weights(start, rounded))


class _Staging:
    """Staging memory for one sub-group, and the copies in flight that use it."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.events: list[Event] = []
        self.values: dict[str, Tensor] = {}

    def wait_for_copies(self) -> None:
        """Wait until all reads into this memory and all writes from it have ended; raise the first error."""
        try:
            while self.events:
                self.events.pop().wait(threading.TIMEOUT_MAX)
        finally:
            # After an error, wait for the other copies, too: the memory is free only when the last one has ended.
            while self.events:
                with contextlib.suppress(Exception):
                    self.events.pop().wait(threading.TIMEOUT_MAX)


def _begin_read(own: _Staging, job: BufferStep, start: int, stop: int) -> None:
    """Start reading a sub-group's numbers into staging memory, after earlier copies of that memory have ended."""
    own.wait_for_copies()
    parts = iter(own.parts)
    own.values = {}
    for kind, row in job.rows.items():
        at = job.place(kind, start)
        if row.at_hand:
            own.values[kind] = row.tensor[at : at + stop - start]
        else:
            dtype = row.tensor.dtype
            own.values[kind] = next(parts)[: (stop - start) * dtype.itemsize].view(dtype)
            own.events.append(row.read(at, own.values[kind]))


def _divide(buffers: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return at least ``count`` equal parts of the buffers, each a whole number of pages; an empty list for count 0."""
    # Without staged kinds, all numbers are in host memory.
    if not count:
        return []
    # Use equal parts: a sub-group has the same number of elements of each kind, so the largest dtype limits all kinds.
    each = -(-count // len(buffers))
    nbytes = buffers[0].numel() // each // ALIGNED * ALIGNED
    return [buffer[index * nbytes : (index + 1) * nbytes] for buffer in buffers for index in range(each)]


def _room(parts: Sequence[Tensor], itemsize: int) -> int:
    """Return the largest number of elements of a sub-group; practically unlimited if nothing is staged."""
    return parts[0].numel() // itemsize if parts else ALL


def _cut(buffer: FlatBuffer, most: int) -> list[_Range]:
    """Return (start, stop) of sub-groups of at most ``most`` elements that cover the part that the host steps."""
    numel = buffer.main.tensor.numel()
    return [(start, min(start + most, numel)) for start in range(buffer.tiers.device_numel, numel, most)]
