"""Steps on the host's cores, beside the next forward.

:class:`HostStep` decides and queues a step, unit by unit. :class:`CpuStepPool` are the threads that take it: torch
would divide each kernel among intra-op threads, whose number is the process's, and training would have to give up its
own; a few threads that each call the kernel on chunks leave that number alone. :class:`SubGroupSteps` steps shards
whose numbers are not all in memory, or whose new weights go on elsewhere: a sub-group's numbers are read into staging
buffers, stepped there, and written back, while the next sub-group's may be read and the last one's written. A sub-group
is as large as the staging buffers allow: each kind of number that is not in memory has a buffer, or a part of one, for
each sub-group under way.

[Note: steps on the host] Where states are offloaded, ``step()`` decides all that there is to decide: whether the step
is skipped, by what gradients are clipped, which of them there are, and with which settings and counts they are stepped,
which are copied here. Then it queues one piece of work for each unit, in the order in which the next forward is going
to want them, and returns. Nothing is guessed, so nothing is ever undone, and the results are those of a step that is
waited for. From there on versions say that weights are new (`Engine.weights_changed`), and whoever uses a unit waits
for its step: gathers and refreshes on their comm streams, the model on the host where it computes with main weights
themselves, and everything else in `Engine.require_idle`, unless it says that it goes on beside a step. A backward does
not: its gradients take the place of those that are being stepped with.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
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
from zeropp.optimizer.fused import CUT, Rule, SettingsSnapshot, SliceStep, rule_of
from zeropp.optimizer.sharded_params import ShardedParams, Slice
from zeropp.params.gradient import Gradient
from zeropp.params.unit import FlatBuffer

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
    """Steps slices of one engine's weights; see [Note: steps on the host].

    Attributes:
        lazy: ``step()`` returns before the host has stepped.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer, slices: ShardedParams, config: Config) -> None:
        block = config.zero.offload_optimizer
        assert block is not None  # or the host would not step
        self.lazy = config.zeropp.lazy_step
        self._read_ahead, self._write_behind = block.pipeline_read, block.pipeline_write
        self._engine = engine
        self._optimizer = optimizer
        self._slices = slices
        self._pool = CpuStepPool(spare_cores(_ranks_on_the_same_cores(engine)))
        # A thread for all of it, so that units are stepped one after another: the first ones are wanted first. Copies
        # have a stream of their own: on the model's they would wait for the forward that they are to be hidden behind.
        self._stream = make_stream("step", engine.device, sends=False, overlap=True, hosted=True)
        self._states: dict[FlatBuffer, dict[str, storage_tiers.StoredTensor]] = {}
        engine.agreement.on_loss(self._stream.abandon)
        # Somebody may ask the wrapped optimizer itself for its states.
        waits = partial(_wait, weakref.ref(engine), Engine.wait_for_step)
        optimizer.register_state_dict_pre_hook(waits)
        optimizer.register_load_state_dict_pre_hook(waits)
        # Not methods of this object, by which the engine would hold itself.
        engine.on_close(self._pool.close)
        engine.on_close(self._stream.close)

    def can_step(self) -> bool:
        """Tell whether the host has a step of its own for this optimizer; a change of its settings may change that."""
        return rule_of(self._optimizer) is not None

    def take_settings(self, slices: Sequence[Slice]) -> list[SettingsSnapshot]:
        """Settings of each group as they are now, by which all of the host's part can be stepped.

        Raises:
            RuntimeError: it cannot; nothing has been counted yet, nor stepped.
        """
        rule = rule_of(self._optimizer)
        assert rule is not None  # asked before
        chosen = {id(part.parameter) for part in slices if part.parameter.grad is not None}
        taken = [rule.snapshot(group) for group in self._optimizer.param_groups]
        for settings, group in zip(taken, self._optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                if id(parameter) in chosen:
                    # By dict's own method here and below: the one of these states looks for the model's parameters.
                    rule.check_state(settings, dict.get(self._optimizer.state, parameter, {}))
        return taken

    @torch.no_grad()
    def start_step(
        self, slices: Sequence[Slice], taken: Sequence[SettingsSnapshot], divisor: Tensor | None, *, waits: bool
    ) -> None:
        """Queue a step of every slice that shows a gradient.

        Args:
            slices: of the host's part.
            taken: settings of each group.
            divisor: of gradients, a float32 scalar on the CPU; None to take them as they are.
            waits: until all of them have been stepped.
        """
        rule = rule_of(self._optimizer)
        engine = self._engine
        assert rule is not None  # asked before
        # New states take space, which may not be there.
        with engine.agreement.watching("making room for optimizer states", call="step()"):
            jobs = self._decide(rule, slices, taken, divisor)
            events = []
        # The model waits for the first of them soonest, and while it computes with one the next are stepped.
        for unit in engine.units_in_forward_order():
            own = [jobs[buffer] for buffer in unit.trainable_buffers if buffer in jobs]
            if own:
                events.append(self._stream.run(partial(self._step, rule, own)))
                unit.note_step(events[-1])
        engine.agreement.step_under_way(events)
        if divisor is not None:
            # They are going to be divided, and their versions will not say so.
            for gradient in engine.gradients:
                gradient.doubt()
        if waits or not self.lazy:
            engine.wait_for_step()

    def _step(self, rule: Rule, jobs: list[BufferStep]) -> None:
        """Step one unit's buffers; on the thread."""
        # In one call, so that small slices fill the threads together.
        in_place = [each for job in jobs if job.in_place for _, each in job.slices]
        if in_place:
            step_slices(self._pool, rule, in_place)
        others = [job for job in jobs if not job.in_place]
        if others:
            ring = self._engine.maker.tiers.ring
            assert ring is not None  # or nothing would be anywhere else
            sub_groups = SubGroupSteps(
                ring, self._pool, rule, read_ahead=self._read_ahead, write_behind=self._write_behind
            )
            sub_groups.step_buffers(others)

    def _decide(
        self, rule: Rule, slices: Sequence[Slice], taken: Sequence[SettingsSnapshot], divisor: Tensor | None
    ) -> dict[FlatBuffer, BufferStep]:
        """The parts of each buffer that are to be stepped, with everything as it is now."""
        chosen = {id(part.parameter): part for part in slices}
        jobs: dict[FlatBuffer, BufferStep] = {}
        for settings, group in zip(taken, self._optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                part = chosen.get(id(parameter))
                if part is None or part.buffer is None or parameter.grad is None:
                    continue
                # By ``.data``, which raises no version: only the user's edits are to show in it.
                param = parameter.data
                state = dict.get(self._optimizer.state, parameter, {})
                # Of weights on a card, too, the host's part of the states is made on the host.
                like = param if part.buffer.main.at_hand else torch.empty(param.shape, dtype=param.dtype, device="cpu")
                number = rule.begin_step(settings, like, state)
                # SGD without momentum has none, and an entry would show in its state dict.
                if state:
                    dict.__setitem__(self._optimizer.state, parameter, state)
                job = jobs.setdefault(part.buffer, BufferStep(part.buffer))
                job.states = self._bring_home(part, part.buffer, state)
                states = {name: state[name] for name in rule.states(settings)}
                job.slices.append((part.offset, SliceStep(param, part.gradient, states, settings, number, divisor)))
        return jobs

    def keep_states(self, buffers: Sequence[FlatBuffer]) -> None:
        """Bring states that the optimizer's own code has made to where they stay; it finds them there afterwards."""
        # A set, since every slice asks: a large model has hundreds of both.
        elsewhere = {buffer for buffer in buffers if not buffer.main.in_memory}
        for part in self._slices.stepped if elsewhere else ():
            state = dict.get(self._optimizer.state, part.parameter)
            if part.buffer is not None and part.buffer in elsewhere and state:
                self._bring_home(part, part.buffer, state)

    def _bring_home(
        self, part: Slice, buffer: FlatBuffer, state: dict[str, object]
    ) -> dict[str, storage_tiers.StoredTensor]:
        """Keep states of one value an element in their tier, unless they are made there; their rows."""
        first = buffer.tiers.device_numel
        if buffer.main.in_memory and (not first or buffer.tiers.states.serves(buffer.device)):
            return {}
        rows = self._states.setdefault(buffer, {})
        for key, value in state.items():
            # Of a scalar parameter the count of steps has its shape, too.
            if not isinstance(value, Tensor) or value.shape != part.parameter.shape or key == "step":
                continue
            if key not in rows:
                rows[key] = buffer.tiers.states.allocate_tensor(buffer.main.tensor.numel() - first, value.dtype)
            own = rows[key].tensor[part.offset - first : part.offset - first + value.numel()]
            # Made anew, or loaded since the last step. By address, since a view is another object each time.
            if value.data_ptr() != own.data_ptr():
                # Zeros are there already, and writing them would take as long as a step.
                if value.any() or own.any():
                    own.copy_(value)
                state[key] = own
        return rows


def waits_for_weights(engine: Engine) -> Callable[[], None] | None:
    """A function that waits until nothing under way keeps the caller from main weights; None where nothing ever does.

    These are steps of the host, and refreshes by messages whose size depends on the weights: those that are counted
    must be those that are sent. Other refreshes may read a weight while the caller edits it. Nobody sees the result,
    since an edit that is noticed makes another refresh, and one that is not is refused.
    """
    counted = any(buffer.counts_escapes for unit in engine.units for buffer in unit.buffers)
    wait = Engine.wait_for_refresh if counted else Engine.wait_for_step if engine.maker.tiers.steps_on_host else None
    return wait and partial(_wait, weakref.ref(engine), wait)


def _wait(ref: weakref.ref[Engine], wait: Callable[[Engine], None], *_: object) -> None:
    if (engine := ref()) is not None and not engine.closed:
        wait(engine)


def _ranks_on_the_same_cores(engine: Engine) -> int:
    """The number of ranks of this node that may run on the cores that this one may."""
    comm = engine.comm
    own = sorted(os.sched_getaffinity(0))
    # A launcher may have given each rank cores of its own.
    told = engine.agreement.exchange_objects(own, "counting cores")
    node = comm.rank // comm.local
    return sum(cores == own for rank, cores in enumerate(told) if rank // comm.local == node)


# Threads that step, chunk by chunk.

CHUNK_NUMEL = 2048 * CUT
"""Elements of a chunk, 512 Ki: AdamW takes a quarter of a millisecond where memory is fast, of which a call's 9 us are
little (2.08e9 elements a second against 2.24e9 in one call), and yet a few million elements keep several threads busy
until the end."""
_ALIKE = 1.25  # the second fastest of four runs to the fastest, where figures can be believed
_NEARLY = 1.15  # what fewer threads may take, where more would take 1


class CpuStepPool:
    """Threads that run small closures, the caller among them; each with one intra-op thread, and no gradients.

    The threads are daemons. They end when this object is closed or dropped, and before the interpreter does.
    """

    def __init__(self, count: int) -> None:
        """Start ``count - 1`` threads.

        Raises:
            ValueError: ``count`` is less than 1.
        """
        if count < 1:
            raise ValueError(f"CpuStepPool({count}): expected at least 1, the caller's thread")
        self.count = count
        self._streams = [ThreadStream(f"core {number}") for number in range(1, count)]

    def run_chunks(self, chunks: Sequence[Callable[[], object]]) -> None:
        """Run all of ``chunks``, in any order and at once; returns when all have ended, those that fail as well.

        Args:
            chunks: closures that do not call this.

        Raises:
            BaseException: the first error of one of them.
        """
        waiting = deque(chunks)
        errors = list[BaseException]()
        ended = SimpleQueue[None]()
        work = partial(_work, waiting, errors, ended)
        # The caller takes one of them, and no thread is woken for nothing.
        for stream in self._streams[: max(len(chunks) - 1, 0)]:
            stream.run(work)
        work()
        # One answer for each chunk, not for each thread: a thread that has ended takes no chunk.
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
        streams = self._streams
        self._streams = []
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


def step_slices(cores: CpuStepPool, rule: Rule, steps: Sequence[SliceStep]) -> None:
    """Step all of ``steps`` in place; the bits are those of whole tensors, however many cores there are.

    Raises:
        ValueError: a tensor of a slice is not as `SliceStep` says; nothing has been stepped.
    """
    # All of them first: a step that is refused half-way would leave some weights new and others old.
    for one in steps:
        _check_settings(rule, one)
    cores.run_chunks(
        [partial(_step_chunk, rule, one, start) for one in steps for start in range(0, one.param.numel(), CHUNK_NUMEL)]
    )


def _step_chunk(rule: Rule, one: SliceStep, start: int) -> None:
    # Cut here, and not for all chunks before the first one runs: the threads share this work, too.
    part = slice(start, start + CHUNK_NUMEL)
    states = {name: one.states[name][part] for name in rule.states(one.settings)}
    rule.step_slice(SliceStep(one.param[part], one.grad[part], states, one.settings, one.step, one.grad_scale))


def _check_settings(rule: Rule, one: SliceStep) -> None:
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
        cores = CpuStepPool(count)
        fastest, second = sorted(_seconds(step, cores) for _ in range(4))[:2]
        cores.close()
        if second > _ALIKE * fastest:
            # Others use the machine, so that figures say little. What every rank has by count is the answer then.
            return limit
        times[count] = fastest
    return next(count for count, seconds in times.items() if seconds <= _NEARLY * min(times.values()))


def _trial(numel: int) -> Callable[[CpuStepPool], None]:
    """A step of AdamW over ``numel`` elements."""
    param = torch.ones(numel, device="cpu")
    optimizer = AdamW([param])
    rule = rule_of(optimizer)
    state = dict[str, Tensor]()
    assert rule is not None  # it has one
    settings = rule.snapshot(optimizer.param_groups[0])
    step = rule.begin_step(settings, param, state)
    one = SliceStep(param, torch.full_like(param, 1e-3), state, settings, step)
    return partial(step_slices, rule=rule, steps=[one])


def _seconds(step: Callable[[CpuStepPool], None], cores: CpuStepPool) -> float:
    begin = time.perf_counter()
    step(cores)
    return time.perf_counter() - begin


# Steps of shards that are not in memory, sub-group by sub-group.

_MAIN = "main weights"
_GRADIENT = "gradients"
_Range = tuple[int, int]


@dataclass
class BufferStep:
    """One buffer's step.

    Attributes:
        buffer: whose weights are stepped.
        slices: (first element in the shard, step) of each slice that is stepped.
        states: rows of the optimizer's states of one value an element of the host's part, by their keys.
    """

    buffer: FlatBuffer
    slices: list[tuple[int, SliceStep]] = field(default_factory=list)
    states: dict[str, storage_tiers.StoredTensor] = field(default_factory=dict)

    @property
    def gradient(self) -> Gradient:
        """The gradient that the weights are stepped with."""
        assert self.buffer.gradient is not None  # what is stepped has one
        return self.buffer.gradient

    @property
    def clips(self) -> bool:
        """True if gradients are divided as they are read."""
        return any(each.grad_scale is not None for _, each in self.slices)

    @property
    def rows(self) -> dict[str, storage_tiers.StoredTensor]:
        """All that a step reads."""
        return {_MAIN: self.buffer.main, _GRADIENT: self.gradient.row, **self.states}

    def place(self, kind: str, start: int) -> int:
        """The place in a row of an element of the shard: rows of states begin where the host's part does."""
        return start - self.buffer.tiers.device_numel if kind in self.states else start

    @property
    def in_place(self) -> bool:
        """True if the host can step all rows where they lie, and no other copy of the weights has to follow."""
        source = self.buffer.wire_copy
        return all(row.at_hand for row in self.rows.values()) and (source is None or not source.follows)

    @property
    def staged(self) -> list[str]:
        """Kinds of numbers that go through staging buffers."""
        source = self.buffer.wire_copy
        follows = source is not None and source.follows
        return [kind for kind, row in self.rows.items() if not row.at_hand] + ["new weights"] * follows

    def in_tile(self, start: int, values: dict[str, Tensor]) -> list[SliceStep]:
        """Steps of what lies in a sub-group, on the sub-group's own numbers."""
        stop = start + values[_MAIN].numel()
        found = []
        for first, each in self.slices:
            begin = max(first, start)
            end = min(first + each.param.numel(), stop)
            # A slice may begin in one sub-group and end in another: these steps are element by element.
            if begin < end:
                cut = slice(begin - start, end - start)
                own = slice(begin - first, end - first)
                # Those in memory have no row: each slice has a tensor of its own.
                states = {k: values[k][cut] if k in values else state[own] for k, state in each.states.items()}
                found.append(replace(each, param=values[_MAIN][cut], grad=values[_GRADIENT][cut], states=states))
        return found


class SubGroupSteps:
    """One step of many buffers, through a ring that nobody else uses meanwhile."""

    def __init__(self, ring: Ring, cores: CpuStepPool, rule: Rule, *, read_ahead: bool, write_behind: bool) -> None:
        """Use the whole ring.

        Args:
            ring: of staging buffers.
            cores: that step.
            rule: of the optimizer.
            read_ahead: read the next sub-group while one is stepped.
            write_behind: write a sub-group while the next one is stepped.
        """
        self._ring = ring
        self._pool = cores
        self._rule = rule
        self._count = 1 + read_ahead + write_behind
        self._read_ahead = read_ahead

    def step_buffers(self, jobs: Sequence[BufferStep]) -> None:
        """Step buffers, one after another."""
        with self._ring.all_taken() as buffers:
            # For the buffer with most kinds: small ones, which stay in memory, have fewer.
            kinds = max(len(job.staged) for job in jobs)
            parts = _divide(buffers, kinds * self._count)
            slots = [_Staging(parts[index * kinds : (index + 1) * kinds]) for index in range(self._count)]
            itemsize = max(job.buffer.main_dtype.itemsize for job in jobs)
            sub_groups = [(job, *sub_group) for job in jobs for sub_group in _cut(job.buffer, _room(parts, itemsize))]
            try:
                for number, (job, start, stop) in enumerate(sub_groups):
                    own = slots[number % self._count]
                    if number == 0 or not self._read_ahead:
                        _begin_read(own, job, start, stop)
                    if self._read_ahead and number + 1 < len(sub_groups):
                        _begin_read(slots[(number + 1) % self._count], *sub_groups[number + 1])
                    # Also for what was written from this memory before, if no reading has waited for it.
                    own.wait_for_copies()
                    self._step(own, job, start, stop)
                    if self._count == 1:
                        own.wait_for_copies()
            finally:
                # Memory that is still read into or written from must not be used for something else.
                with contextlib.ExitStack() as ending:
                    for each in slots:
                        ending.callback(each.wait_for_copies)

    def _step(self, own: _Staging, job: BufferStep, start: int, stop: int) -> None:
        """Step one sub-group, and begin to write what is new."""
        step_slices(self._pool, self._rule, job.in_tile(start, own.values))
        for kind, row in job.rows.items():
            # Gradients are changed by clipping alone, which nobody sees once they have been forgotten.
            if not row.at_hand and (kind != _GRADIENT or (job.clips and job.gradient.arrived)):
                own.events.append(row.write(job.place(kind, start), own.values[kind]))
        source = job.buffer.wire_copy
        if source is None or not source.follows:
            return
        new = own.values[_MAIN]
        # By these cores, and into memory that may be page-locked: a file takes bytes as they are, and a copy to a card
        # that also rounds is made by one core, from memory that the card cannot read by itself.
        rounded = own.parts[len(job.staged) - 1][: new.numel() * source.dtype.itemsize].view(source.dtype)
        self._pool.run_chunks(
            [
                partial(rounded[at : at + CHUNK_NUMEL].copy_, new[at : at + CHUNK_NUMEL])
                for at in range(0, new.numel(), CHUNK_NUMEL)
            ]
        )
        own.events.append(source.take_new_weights(start, rounded))
        if stop == job.buffer.main.tensor.numel():
            source.finish_taking()


class _Staging:
    """Staging memory for one sub-group under way."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.events: list[Event] = []
        self.values: dict[str, Tensor] = {}

    def wait_for_copies(self) -> None:
        """Wait until reads have arrived, and writes have ended."""
        try:
            while self.events:
                self.events.pop().wait(threading.TIMEOUT_MAX)
        finally:
            # After an error, too: the memory is free when the last of them has ended, well or not.
            while self.events:
                with contextlib.suppress(Exception):
                    self.events.pop().wait(threading.TIMEOUT_MAX)


def _begin_read(own: _Staging, job: BufferStep, start: int, stop: int) -> None:
    """Begin to read a sub-group's numbers, where what the memory held before has been written."""
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
    """At least ``count`` equal parts of buffers, each of whole pages."""
    # Everything is in memory, and only new weights go elsewhere.
    if not count:
        return []
    # Equal ones: a sub-group has as many elements of each kind, and the largest kind decides how many.
    each = -(-count // len(buffers))
    nbytes = buffers[0].numel() // each // ALIGNED * ALIGNED
    return [buffer[index * nbytes : (index + 1) * nbytes] for buffer in buffers for index in range(each)]


def _room(parts: Sequence[Tensor], itemsize: int) -> int:
    """Elements of a sub-group."""
    return parts[0].numel() // itemsize if parts else 1 << 62


def _cut(buffer: FlatBuffer, most: int) -> list[_Range]:
    """The host's part of a shard in sub-groups of at most ``most`` elements."""
    numel = buffer.main.tensor.numel()
    return [(start, min(start + most, numel)) for start in range(buffer.tiers.device_numel, numel, most)]
