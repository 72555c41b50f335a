"""Steps on the host's cores, beside the next forward.

[Note: steps on the host] Where states are offloaded, ``step()`` decides all that there is to decide: whether the step
is skipped, by what gradients are clipped, which of them there are, and with which settings and counts they are stepped,
which are copied here. Then it queues one piece of work for each unit, in the order in which the next forward is going
to want them, and returns. Nothing is guessed, so nothing is ever undone, and the results are those of a step that is
waited for. From there on versions say that weights are new (`Engine.weights_changed`), and whoever uses a unit waits
for its step: gathers and refreshes on their lanes, the model on the host where it computes with main weights
themselves, and everything else in `Engine.require_idle`, unless it says that it goes on beside a step. A backward does
not: its gradients take the place of those that are being stepped with.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.comm.streams import make_stream
from zeropp.engine.engine import Engine
from zeropp.offload import home
from zeropp.optimizer.cores import Cores, spare_cores, step_slices
from zeropp.optimizer.fused import Rule, Settings, SliceStep, rule_of
from zeropp.optimizer.slices import Slice, Slices
from zeropp.optimizer.tiles import BufferStep, Tiles
from zeropp.order.refresh import Refresh
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["HostStep", "waits_for_main_weights"]


class HostStep:
    """Steps slices of one engine's weights; see [Note: steps on the host]."""

    def __init__(self, engine: Engine, optimizer: Optimizer, slices: Slices) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._slices = slices
        self._cores = Cores(spare_cores(_ranks_on_the_same_cores(engine)))
        # A thread for all of it, so that units are stepped one after another: the first ones are wanted first. Copies
        # have a stream of their own: on the model's they would wait for the forward that they are to be hidden behind.
        self._stream = make_stream("step", engine.device, sends=False, overlap=True, hosted=True)
        self._states: dict[FlatBuffer, dict[str, home.Row]] = {}
        engine.agreement.on_loss(self._stream.abandon)
        # Somebody may ask the wrapped optimizer itself for its states.
        waits = partial(_wait, weakref.ref(engine), Refresh.wait_stepped)
        optimizer.register_state_dict_pre_hook(waits)
        optimizer.register_load_state_dict_pre_hook(waits)
        # Not methods of this object, by which the engine would hold itself.
        engine.on_close(self._cores.close)
        engine.on_close(self._stream.close)

    def can_step(self) -> bool:
        """Tell whether the host has a step of its own for this optimizer; a change of its settings may change that."""
        return rule_of(self._optimizer) is not None

    def take_settings(self, slices: Sequence[Slice]) -> list[Settings]:
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
                    rule.check(settings, dict.get(self._optimizer.state, parameter, {}))
        return taken

    @torch.no_grad()
    def start(self, slices: Sequence[Slice], taken: Sequence[Settings], divisor: Tensor | None, *, waits: bool) -> None:
        """Queue a step of every slice that shows a gradient.

        Args:
            slices: of the host's part.
            taken: settings of each group.
            divisor: of gradients, a float32 scalar on the CPU; None to take them as they are.
            waits: until all of them have been stepped.
        """
        rule, engine = rule_of(self._optimizer), self._engine
        assert rule is not None  # asked before
        # New states take space, which may not be there.
        with engine.agreement.watching("making room for optimizer states", call="step()"):
            jobs, events = self._decide(rule, slices, taken, divisor), []
        # The model waits for the first of them soonest, and while it computes with one the next are stepped.
        for unit in engine.schedule.in_forward_order():
            own = [jobs[buffer] for buffer in unit.trainable_buffers if buffer in jobs]
            if own:
                events.append(self._stream.run(partial(self._step, rule, own)))
                unit.note_step(events[-1])
        engine.agreement.step_under_way(events)
        if divisor is not None:
            # They are going to be divided, and their versions will not say so.
            for gradient in engine.gradients:
                gradient.doubt()
        if waits or not engine.maker.config.zeropp.lazy_step:
            engine.refresh.wait_stepped()

    def _step(self, rule: Rule, jobs: list[BufferStep]) -> None:
        """Step one unit's buffers; on the thread."""
        # In one call, so that small slices fill the threads together.
        in_place = [each for job in jobs if job.in_place for _, each in job.slices]
        if in_place:
            step_slices(self._cores, rule, in_place)
        others = [job for job in jobs if not job.in_place]
        if others:
            block, homes = self._engine.maker.config.zero.offload_optimizer, self._engine.maker.homes
            assert block is not None and homes.ring is not None  # or nothing would be anywhere else
            tiles = Tiles(
                homes.ring, self._cores, rule, read_ahead=block.pipeline_read, write_behind=block.pipeline_write
            )
            tiles.run(others)

    def _decide(
        self, rule: Rule, slices: Sequence[Slice], taken: Sequence[Settings], divisor: Tensor | None
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
                param, state = parameter.data, dict.get(self._optimizer.state, parameter, {})
                # Of weights on a card, too, the host's part of the states is made on the host.
                like = param if part.buffer.main.at_hand else torch.empty(param.shape, dtype=param.dtype, device="cpu")
                number = rule.begin(settings, like, state)
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

    def _bring_home(self, part: Slice, buffer: FlatBuffer, state: dict[str, object]) -> dict[str, home.Row]:
        """Keep states of one value an element in their home, unless they are made there; their rows."""
        first = buffer.homes.device_numel
        if buffer.main.in_memory and (not first or buffer.homes.states.serves(buffer.device)):
            return {}
        rows = self._states.setdefault(buffer, {})
        for key, value in state.items():
            # Of a scalar parameter the count of steps has its shape, too.
            if not isinstance(value, Tensor) or value.shape != part.parameter.shape or key == "step":
                continue
            if key not in rows:
                rows[key] = buffer.homes.states.allocate(buffer.main.tensor.numel() - first, value.dtype)
            own = rows[key].tensor[part.offset - first : part.offset - first + value.numel()]
            # Made anew, or loaded since the last step. By address, since a view is another object each time.
            if value.data_ptr() != own.data_ptr():
                # Zeros are there already, and writing them would take as long as a step.
                if value.any() or own.any():
                    own.copy_(value)
                state[key] = own
        return rows


def waits_for_main_weights(engine: Engine) -> Callable[[], None] | None:
    """Waits until nothing is under way that keeps the caller from main weights; None where nothing ever does.

    These are steps of the host, and refreshes by messages whose size depends on the weights: those that are counted
    must be those that are sent. Other refreshes may read a weight while the caller edits it. Nobody sees the result,
    since an edit that is noticed makes another refresh, and one that is not is refused.
    """
    counted = any(buffer.counts_escapes for unit in engine.units for buffer in unit.buffers)
    wait = Refresh.wait if counted else Refresh.wait_stepped if engine.maker.config.steps_on_host else None
    return wait and partial(_wait, weakref.ref(engine), wait)


def _wait(ref: weakref.ref[Engine], wait: Callable[[Refresh], None], *_: object) -> None:
    if (engine := ref()) is not None and not engine.closed:
        wait(engine.refresh)


def _ranks_on_the_same_cores(engine: Engine) -> int:
    """The number of ranks of this node that may run on the cores that this one may."""
    comm, own = engine.comm, sorted(os.sched_getaffinity(0))
    # A launcher may have given each rank cores of its own.
    told = engine.agreement.exchange_objects(own, "counting cores")
    node = comm.rank // comm.local
    return sum(cores == own for rank, cores in enumerate(told) if rank // comm.local == node)
