"""Optimizer steps on the host's cores, which run beside the next forward.

The threads that step are those of :mod:`zeropp.optimizer.cpu_pool`; :mod:`zeropp.optimizer.sub_groups` has the steps of
shards that are not in host memory.

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

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.comm.streams import Event, make_stream
from zeropp.config import Config
from zeropp.engine.engine import Engine
from zeropp.offload import storage_tiers
from zeropp.offload.read_ahead import Ring
from zeropp.offload.tier_choice import upload_staging
from zeropp.optimizer.cpu_pool import CpuStepPool, spare_cores, step_slices
from zeropp.optimizer.fused import Rule, SettingsSnapshot, SliceStep, rule_of
from zeropp.optimizer.sharded_params import ShardedParams, Slice
from zeropp.optimizer.sub_groups import BufferStep, SubGroupSteps
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.wire_copy import Upload

__all__ = ["HostStep", "waits_for_weights"]


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
        stepped = self._engine.maker.tiers.stepped
        assert stepped is not None  # HostStep is created only if offload_optimizer is configured
        if self._upload_ring is None and (staging := upload_staging(stepped, self._engine.device, sizes)):
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
        units = [
            (unit, own)
            for unit in engine.units_in_forward_order()
            if (own := [jobs[buffer] for buffer in unit.trainable_buffers if buffer in jobs])
        ]
        others = [[job for job in own if not job.in_place] for _, own in units]
        sub_groups = None
        if any(others):
            sub_groups = SubGroupSteps(
                engine.maker.tiers.ring, self._upload_ring, self._pool, rule, others,
                read_ahead=self._read_ahead, write_behind=self._write_behind,
            )  # fmt: skip
        try:
            for unit, own in units:
                # All units use both streams or all use one, so that after an error the later work of both fails.
                upload = None if sub_groups is None else Upload(self._upload_ring)
                step = partial(self._step, rule, own, sub_groups, upload)
                events.append(self._stream.run(step) if upload is None else self._queue_both(upload, step))
                unit.note_step(events[-1])
        except BaseException:
            # Such as a KeyboardInterrupt: the last unit, which returns the staging buffers, is not queued.
            if sub_groups is not None:
                self._stream.run(sub_groups.close)
            raise
        engine.agreement.step_under_way(events)
        if divisor is not None:
            # The step divides gradients in place without raising their versions, so their norms must count as outdated.
            for gradient in engine.gradients:
                gradient.mark_stale()
        if waits or not self.lazy:
            engine.wait_for_step()

    def _queue_both(self, upload: Upload, step: Callable[[], None]) -> Event:
        """Queue a unit's step and the copies that end it; return the event of the end of the copies."""
        try:
            end = self._uploads.run(upload.run)
            self._stream.run(step)
        except BaseException:
            # Such as a KeyboardInterrupt. The copies would wait for ever for a step that may not be queued.
            if self._upload_ring is not None:
                self._upload_ring.close()  # or the step might wait for ever for a buffer
            upload.fail(
                RuntimeError("step() was interrupted when only some units were queued; go on from a checkpoint")
            )
            raise
        return end

    def _step(
        self, rule: Rule, jobs: Sequence[BufferStep], sub_groups: SubGroupSteps | None, upload: Upload | None
    ) -> None:
        """Step the buffers of one unit, and send new weights to the device. Runs on the step thread."""
        try:
            # Step all slices in one call, so that small slices together keep all threads busy.
            in_place = [each for job in jobs if job.in_place for _, each in job.slices]
            if in_place:
                step_slices(self._pool, rule, in_place)
            if sub_groups is not None and upload is not None:
                upload.end(sub_groups.step_unit(upload))
        except BaseException as error:
            if sub_groups is not None and upload is not None:
                upload.fail(error)
                sub_groups.close()
            raise

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
