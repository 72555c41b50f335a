"""The engine of one model: its phases, the uses of its units, and its windows of micro-batches.

A hook (`hooks`) says that a module is about to run; the engine asks the schedule (`zeropp.order.schedule`), which has
usually issued the gather already; a comm stream (`zeropp.comm.streams`) runs the unit's path (`zeropp.wire.paths`).

[Note: backwards that accumulate nothing] ``torch.autograd.grad`` and ``backward(inputs=...)`` may run through the model
without bringing a gradient to any trained parameter, as for a gradient penalty or an attack on inputs. Such a backward
is a kind of pass of its own. It is no micro-batch, it does not end the forwards before it, and it sends nothing, so
gradients that earlier backwards hold stay held.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zeropp._compat import current_graph_task, goes_on, queue_end_of_backward, uncompiled
from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import CommStreams, make_comm_streams
from zeropp.engine.accumulation import GradAccumulation, Listener, PendingGradients
from zeropp.engine.backward import TOLD_APART, BackwardUses, OutOfModuleUses, PinnedUnits
from zeropp.engine.engine_state import EngineOptions, EngineState
from zeropp.engine.hooks import BackwardCall, BackwardReach, HookedModule, ModuleHooks, cast_inputs
from zeropp.engine.preconditions import (
    EVERYTHING,
    NOTHING,
    TRAINING,
    GatherContexts,
    Parking,
    check_idle,
    of_a_forward,
    refuse_compiled_autograd,
    refuse_retired,
)
from zeropp.order.known_orders import IssueHash, Phase, PhaseKey
from zeropp.order.reductions import Reductions
from zeropp.order.refresh import Refresh
from zeropp.order.schedule import Schedule
from zeropp.params.buffer_maker import BufferMaker
from zeropp.params.gradient import Gradient, LossScale
from zeropp.params.guard import GuardHandler, handler_of
from zeropp.params.unit import FlatBuffer, Unit, UnitState, layout_id

__all__ = ["Engine", "engine_of"]

T = TypeVar("T")


class Engine(GuardHandler):
    """Gathers before use, releases after, reduces in backward.

    Args:
        agreement: between the ranks, over their process groups.
        maker: makes flat buffers for parameters that move.
        units: the model's, indexed in order.
        device: where the model lives.
        accumulation: counts micro-batches.
        listener: to tell what becomes of gradients, for as long as it lives.
        loss_scale: and with it the factor on summed gradients.
        options: see :class:`EngineOptions`.

    Rooms above use the public attributes and methods, and set none. Hooks, schedule, reductions and refresh are
    private: this class says what can be asked of them.

    Attributes:
        accumulation, pending: micro-batches and gradients since the last step.
        comm_streams: of each kind of traffic: "gather", "refresh", "reduce".
        gather_contexts: open uses of GatheredParameters.
        loss_scale, options: as given.
        mode: levels of units that are not persistent.
        notes_calls: see :class:`zeropp.engine.hooks.HookHandler`.
        parking: memory that is off the device.
        phase: the running pass.
        state: see :class:`EngineState`.
        unit_of: the unit of each parameter, by the parameter's id.
    """

    state = EngineState.READY
    notes_calls = False
    _trained_set = 0  # sets of parameters that were trained before; each has backwards of its own
    _backwards = 0
    _root_ran = False  # the model was called as a whole, with a graph
    _graphs_outdated = False  # weights have changed since the last pass
    # False in a backward that brings no parameter a gradient: see [Note: backwards that accumulate nothing].
    _trains = True

    def __init__(
        self,
        agreement: Agreement,
        maker: BufferMaker,
        units: Sequence[Unit],
        device: torch.device,
        accumulation: GradAccumulation,
        listener: Listener,
        loss_scale: LossScale,
        options: EngineOptions,
    ) -> None:
        self.agreement = agreement
        self.comm = agreement.comm
        self.maker = maker
        self.mode = maker.mode
        self.units = tuple(units)
        self.persistent = [unit for unit in self.units if unit.persistent]
        self.device = device
        self.accumulation = accumulation
        self.options = options
        self.loss_scale = loss_scale
        self._issue_hash = IssueHash(self.comm.history)
        self._hooks = ModuleHooks(self)
        self._listener = weakref.ref(listener)  # it owns this engine, as the model's modules do
        self.comm_streams = {kind: self._make_comm_streams(kind) for kind in ("gather", "refresh", "reduce")}
        self._reductions = Reductions(self.units, self.comm_streams["reduce"], agreement, self._issue_hash, loss_scale)
        self._schedule = self._make_schedule()
        self._refresh = self._make_refresh(self.comm_streams["refresh"])
        self.note_storages()
        self.phase = Phase.IDLE
        self.pending = PendingGradients(self.units, self._listener)
        # Ids of parameters whose requires_grad is another than graphs were made with.
        self._flipped: set[int] = set()
        self._ending: Callable[[], object] = lambda: None  # gives the last backward's callback while autograd has it
        # Forwards with a graph since the last backward but those of ``_since``, which have come after all of them.
        self._outstanding: list[PhaseKey] = []
        self._since = 0
        self._backward = BackwardUses(self.units, self._schedule, self._reductions)
        self._touched = OutOfModuleUses(self.units, self._schedule)
        self._pinned_units = PinnedUnits(self._schedule)
        self._closing: list[Callable[[], None]] = []
        self.parking = Parking()
        self.gather_contexts = GatherContexts()
        # Last: an engine that is dropped lets go of its attributes in this order, and units must outlive the comm
        # streams that still write to their memory.
        self.unit_of = {id(parameter): unit for unit in self.units for parameter in unit.parameters}

    def _make_comm_streams(self, kind: str) -> CommStreams:
        comm, options = self.comm, self.options
        sends = comm.world > 1 and comm.backend != "fake"
        comm_streams = make_comm_streams(
            kind, device=self.device, sends=sends, overlap=options.overlap, hosted=options.offloads
        )
        self.agreement.on_loss(comm_streams.abandon)
        return comm_streams

    def _make_schedule(self) -> Schedule:
        return Schedule(
            self.units,
            self.comm_streams["gather"],
            self._reductions,
            self.agreement,
            self._issue_hash,
            self.options.limits,
            self._hooks.reach,
            static=self.options.static_graph,
            log_relearning=self.options.log_relearning,
        )

    def _make_refresh(self, comm_streams: CommStreams) -> Refresh:
        return Refresh(
            self.units,
            comm_streams,
            self._schedule,
            self.agreement,
            self._issue_hash,
            partial(self.comm.largest, kind="refresh"),
            self.comm.ledger.count_event,
        )

    # Forward.

    def enter(
        self, hooked: HookedModule, training: bool, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A hooked module's forward begins: fetch its units. See :class:`zeropp.engine.hooks.HookHandler`."""
        changed = None
        self.notice_failed_backward()
        if self.phase is not Phase.BACKWARD and self._hooks.was_interrupted(hooked):
            self.recover(known=False)
        running = self.running
        if not (running or self.gather_contexts.computing):
            self._hooks.reset()  # of a forward inside GatheredParameters that Ctrl-C has ended
        outermost = self._hooks.depth == 0
        if self.gather_contexts and self.gather_contexts.serve(self.units, outermost=outermost):
            return cast_inputs(args, kwargs, self.options.input_dtype) if outermost else None
        try:
            if not running:
                self.require_idle("the model", averaged=True, beside_step=True, needs=of_a_forward())
                self.finish_load()
                self._forget_outdated_graphs()
                if (listener := self.listener) is not None:
                    listener.forward_begins()
                self._refresh.start_put_off()
                self._begin_forward(hooked, training)
            if not running or (outermost and hooked.path == ""):  # run once more by checkpointing around it, too
                changed = cast_inputs(args, kwargs, self.options.input_dtype)
            if self._backward.complete:
                self._backward.come_to(hooked.path, hooked.run_by)  # checkpointing runs it once more
            for unit in hooked.units:
                unit.users += 1
                unit.entered += 1
                if not self._pinned_units.has(unit):
                    self._schedule.use(unit, hooked.path if unit.entered == 1 else None)
        except BaseException as error:
            if not running and self.phase is Phase.IDLE:
                self.agreement.stopped(error, "the beginning of a forward")
            if outermost:
                self.recover()  # further in, the hooks after the modules around do that
            raise
        return changed

    def leave(self, hooked: HookedModule, *, returns: BackwardReach, failed: bool) -> None:
        """A hooked module's forward is over: release its units, unless they are planned to stay."""
        if self.gather_contexts.computing:
            return None
        # A model may catch an inner module's error and go on; in backward, checkpointing ends a recomputation by one.
        if failed and (self.agreement.lost is not None or (self.phase is Phase.FORWARD and self._hooks.depth == 0)):
            return self.recover()
        try:
            if returns is not BackwardReach.NEVER and self.phase is Phase.FORWARD:
                self._backward.expect_in_backward(hooked.units, whole=returns is BackwardReach.UNHOOKED)
                if returns is BackwardReach.AGAIN:
                    self._schedule.note_unrecorded(hooked.path, hooked.units)
            elif returns is not BackwardReach.NEVER:
                self._schedule.expect_again(hooked.units)  # checkpointing has run it again, and its backward follows
            for unit in hooked.units:
                unit.users -= not self._pinned_units.keeps(unit)
                unit.entered -= 1
                self._schedule.live_units.release_if_unused(unit)
            if self.phase is Phase.FORWARD and self._hooks.depth == 0:
                self._end_forward()
        except BaseException:
            if self._hooks.depth == 0:
                self.recover()
            raise

    def _begin_forward(self, hooked: HookedModule, training: bool) -> None:
        grad = torch.is_grad_enabled()
        key: PhaseKey = ("forward", hooked.path, training, grad)
        if grad:  # without a graph no backward follows, and gradients stay as they are
            refuse_compiled_autograd()
            if (listener := self.listener) is not None:
                listener.graph_begins()
            self.accumulation.note_forward(hooked.path)
            self._expect_boundary()
            outstanding = [*([] if self._since else self._outstanding), key]
            self._root_ran |= hooked.path == ""
            if self._root_ran:
                # One rank alone may run a part that gathers nothing: to save a prompt's embeddings, for one.
                outstanding = [each for each in outstanding if not (each[1] and self._schedule.known.note_silent(each))]
            self._schedule.repeats |= len(outstanding) > 1
            if self._since:
                self._schedule.unrecorded.clear()
            self._since = 0
            self._outstanding = outstanding[-TOLD_APART:]
        self._schedule.begin_phase(key, self._backward_key(self._outstanding) if grad else None)
        self.phase = Phase.FORWARD
        self.notes_calls = self._schedule.repeats or self._schedule.learning
        for unit in self.persistent:
            if not unit.hooked:
                self._schedule.use(unit)

    def _end_forward(self) -> None:
        if torch.is_grad_enabled():
            self._backward.expect_in_backward(self._touched.expected(), whole=True)
            self._backward.forward_ended(first=len(self._outstanding) == 1)
        self._touched.let_go()
        if self._backward.give_up():  # gradients were computed inside forward; a backward to come is another one
            self._backwards += 1
        self._schedule.end_phase()
        self._guard_all()
        self.phase = Phase.IDLE

    # Backward.

    def backward_reached(self, call: BackwardCall) -> None:
        """Backward arrives at a hooked module's outputs: fetch its units."""
        if call.reached == self._backwards:
            return  # by another of its outputs
        self._begin_backward(by_output=True)
        if (self.phase is Phase.FORWARD or not self._trains) and not goes_on():
            return  # the gradient of this output is all that is asked for
        call.reached = self._backwards
        # First: what it lets go, this call may be the last to keep.
        self._backward.come_to(call.hooked.path, call.hooked.run_by)
        if call.expected or self._backward.fresh:
            self._backward.note_reached(call)
        for unit in call.hooked.units:
            self._backward.use(unit, call.hooked.path, call.hooked.run_by, lasting=unit.has_frozen)

    def call_made(self, call: BackwardCall, outputs: list[Tensor]) -> None:
        """A call has hooked outputs; see :class:`zeropp.engine.hooks.HookHandler`."""
        if self.phase is Phase.BACKWARD:
            self._backward.expect_fresh_call(call)
        else:
            self._backward.expect_call(call, outputs)

    def backward_left(self, call: BackwardCall) -> None:
        """A call's backward is over."""
        for unit in call.hooked.with_frozen if call.reached == self._backwards else ():
            self._backward.call_ended(unit)

    def gradient_ready(self, index: int, position: int) -> None:
        """A parameter has its gradient; the last one of a unit lets it be sent and released."""
        # First: a backward that begins here may forget gradients of before, and flags with them.
        self._begin_backward()
        self.pending.used[index][position] = self.pending.looks
        self._backward.last_gradient = index, position
        if self._reductions.count_gradient(index, position):
            self._reductions.send_complete()
            self._backward.complete.append(self.units[index])

    def _begin_backward(self, *, by_output: bool = False) -> None:
        self.notice_failed_backward()
        if self.running:
            return
        self.require_idle("backward", needs=TRAINING)
        self._forget_outdated_graphs()
        self._trains = not by_output or self._backward.accumulates()
        if self._trains and (listener := self.listener) is not None:
            listener.backward_begins()
        self._expect_boundary()
        self._refresh.start_put_off()
        self.phase = Phase.BACKWARD
        # Once: a backward inside this one, as reentrant checkpointing runs it, finds the phase begun.
        self._ending = queue_end_of_backward(self._end_backward, self._backward_dropped)
        self._schedule.begin_phase(self._backward_key(self._outstanding), None)
        self.pending.backward_ran |= self._trains
        self.notes_calls = True
        for unit in self.persistent:
            self._schedule.use(unit)
        self._backward.fetch_known_uses()

    @uncompiled
    def _end_backward(self) -> None:
        self._backwards += 1
        self._touched.let_go()
        self._backward.give_up()
        self._schedule.end_phase()
        self._guard_all()
        self.phase = Phase.IDLE
        trains, self._trains = self._trains, True
        if not trains:
            return
        self._since += 1
        self.accumulation.note_backward()
        if (listener := self.listener) is not None:
            listener.backward_ended()

    def _backward_dropped(self) -> None:
        """Autograd has ended a backward; one that failed would tell nobody before the next call of the engine."""
        if self.phase is Phase.BACKWARD and current_graph_task() == -1:
            self.agreement.found_stopped("its backward failed")

    def _expect_boundary(self) -> None:
        """Say whether the running or next backward is the last before a step, as far as one can know."""
        self._reductions.last = self._trains and (self.accumulation.closing or not self.mode.sums)

    def _backward_key(self, outstanding: list[PhaseKey]) -> PhaseKey:
        # Which units a backward comes to follows from the forwards that it may go back through, and from how many
        # backwards have gone over them before.
        holding = self._reductions.holding if self._trains else None
        later = (min(self._since, TOLD_APART),) if self._since else ()
        return ("backward", holding, self._trained_set, *outstanding, *later)

    # What others ask of hooks, schedule, reductions and refresh.

    @property
    def closed(self) -> bool:
        """True if it was taken off its model."""
        return EngineState.CLOSED in self.state

    @property
    def retired(self) -> bool:
        """True if the engine was destroyed, or its model is being wrapped again."""
        return EngineState.RETIRED in self.state

    @property
    def root(self) -> nn.Module | None:
        """The wrapped model, unless it is gone."""
        return self._hooks.root

    def cached_values(self, parameter: nn.Parameter) -> Tensor | None:
        """Whole values to read between passes; see :class:`zeropp.params.guard.GuardHandler`. Local."""
        if self.closed or self.gather_contexts or not (self.mode.stays_whole or self.readable_weights):
            return None
        self._refresh.wait_for_all()  # the step has queued it on every rank, so it ends without a call of anyone else
        return self.unit_of[id(parameter)].cached_values(parameter)

    def keep_handle(self, handle: RemovableHandle) -> None:
        """Remove a hook of the model together with the engine's own."""
        self._hooks.keep(handle)

    def install_hooks(self, module: nn.Module, path: str, units: tuple[Unit, ...]) -> None:
        """Gather units for the forwards of a module; ``path`` is its name in the model."""
        self._hooks.install(module, HookedModule(path, units))

    def watch_gradients(self, unit: Unit, first: int = 0) -> None:
        """Take the gradients of a unit's trainable parameters, from position ``first`` on."""
        self._hooks.watch_gradients(unit, first)

    def run_as(self, module: nn.Module, function: Callable[..., object], *args: object) -> object:
        """Call ``function`` in place of a hooked module's forward."""
        return self._hooks.run_as(module, function, *args)

    def call_model(self, model: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the model, whose forward may call it again; if Ctrl-C ends the call, the pass is over at once."""
        # From outside of the model: a forward that is still open was ended by Ctrl-C.
        if self.phase is Phase.FORWARD and not self._hooks.open_calls:
            self.recover(known=False)
        self._hooks.open_calls += 1
        try:
            return model(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            if self.running:
                self.recover()
            raise
        finally:
            self._hooks.open_calls -= 1

    def pin_units(self) -> contextlib.AbstractContextManager[None]:
        """Inside, units that modules have used stay gathered; see :class:`zeropp.engine.backward.PinnedUnits`."""
        return self._pinned_units.until_left()

    def layout_id(self) -> str:
        """Fingerprint of this rank's slices of the model; equal exactly when they are the same."""
        return layout_id(self.units, self.mode, self.comm.rank)

    def release_prefetched(self) -> None:
        """Release units that are kept or fetched for a pass to come; the same on every rank."""
        self._schedule.live_units.release_planned()

    def wait_for_step(self) -> None:
        """Wait until the host has stepped all units."""
        self._refresh.wait_for_step()

    def wait_for_refresh(self) -> None:
        """Wait until no step writes and no refresh reads the main weights any more."""
        self._refresh.wait_for_all()

    def start_refresh(self) -> None:
        """Start renewing all that is cached of older weights."""
        self._refresh.start_refresh()

    @property
    def refresh_is_delayed(self) -> bool:
        """True if something cached is of older weights, and its renewal waits for the next step or forward."""
        return self._refresh.is_put_off

    def start_delayed_refresh(self) -> None:
        """Start such a renewal now."""
        self._refresh.start_put_off()

    # The step.

    def begin_step(self) -> int:
        """Begin a step; returns a number for its place in the sequence of passes, the same on every rank."""
        return self._schedule.begin_step()

    def units_in_forward_order(self) -> list[Unit]:
        """All units as the next forward will want them."""
        return self._schedule.in_forward_order()

    @property
    def holds_gradients(self) -> bool:
        """True if the sums of the last backward wait on this rank for further ones."""
        return self._reductions.holding

    def set_no_sync(self, on: bool) -> bool:
        """Hold the gradients of the backwards to come, or hold them no longer; returns the setting of before."""
        before, self._reductions.no_sync = self._reductions.no_sync, on
        return before

    def send_unsent(self, index: int) -> None:
        """Reduce the gradients of a unit that this rank or another one still holds. Collective."""
        self._reductions.send_unsent(index)

    @property
    def sequence_hash(self) -> int:
        """A hash of all collectives that were issued, 24 bits."""
        return self._issue_hash.value

    def note_issued(self, kind: int, unit: int, version: int) -> None:
        """Take something into that hash that every rank has to do alike."""
        self._issue_hash.add(kind, unit, version)

    @property
    def passed_over(self) -> bool:
        """True if this rank has passed over units since the last step sync: all ranks are to know."""
        return self._schedule.passed_over

    def note_step_sync(self, *, passed_over: bool) -> None:
        """Ranks have heard of each other; ``passed_over`` if any has passed over units."""
        self._schedule.note_passed_over(passed_over)

    def note_edited_gradients(self) -> None:
        """Some rank has edited gradients before its step: such gradients must all be reduced by then."""
        self._schedule.edits = True

    def postpone_reductions(self, units: list[int], *, held: bool) -> None:
        """Gradients of these units came after they had been sent, or were all ``held`` until the step."""
        self._schedule.postpone(units, held=held)

    def renew_caches(self) -> None:
        """Renew what is cached from main weights alone: ranks have different bits of it."""
        self._refresh.invalidate()

    # Parameters that are trained.

    @property
    def requires_grad_changed(self) -> bool:
        """True if the model has other trained parameters than the engine knows of."""
        return bool(self._flipped)

    def note_trained(self, number: int, units: Iterable[Unit], *, split: bool) -> None:
        """Other parameters are trained from here on.

        Args:
            number: of the set of trained parameters.
            units: those whose parameters have changed.
            split: some have other buffers now.
        """
        self._flipped.clear()
        self._trained_set = number
        for unit in units:
            unit.update_trained()
        self._reductions.update_trained()
        # New buffers have never been gathered, and plans know the sizes of old ones.
        if split:
            self.note_storages()
            self._schedule.note_sizes()
            self.pending.make_room()

    def forget_learned(self, *, backwards: bool = False, forwards: bool = False) -> None:
        """Learn the orders of passes anew: other parameters are trained."""
        if backwards:
            self._schedule.known.forget_backwards()
        if forwards:
            self._schedule.known.forget_forwards()

    # Parameters touched elsewhere, persistent ones, failures.

    def fetch_touched(self, parameter: nn.Parameter) -> bool:
        """A released parameter is used outside its module; see :class:`zeropp.params.guard.GuardHandler`."""
        if self.closed:
            self.require_idle("the model", averaged=True, beside_step=True)
        self.notice_failed_backward()
        if not self.running and current_graph_task() == -1:
            return False
        self._begin_backward(by_output=True)  # by a hook that comes before the model's own
        self._touched.use(self.unit_of[id(parameter)])
        return True

    def fetched_by(self, parameter: nn.Parameter) -> list[str]:
        """The modules to call for a parameter; see :class:`zeropp.params.guard.GuardHandler`."""
        return self._hooks.fetching(parameter, self.unit_of[id(parameter)])

    def _guard_all(self) -> None:
        """Between passes nothing may be read or edited, not even what the plan keeps gathered for the next one."""
        for unit in self.units:
            if unit.state is UnitState.UNSHARDED:
                unit.guard_values()

    @property
    def running(self) -> bool:
        """True while a pass is running. One that has failed, or was interrupted, may not have been noticed yet."""
        return self.phase is not Phase.IDLE

    def notice_failed_backward(self, *, known: bool = False) -> None:
        """Recover from a backward that has failed; nothing otherwise. An exception is being handled if ``known``.

        Autograd calls nothing then that was queued for the end of a backward. So whoever begins something asks.
        """
        if self.phase is Phase.BACKWARD and (current_graph_task() == -1 or self._ending() is None):
            self.recover(known=known)

    def require_idle(
        self,
        what: str,
        *,
        inside_gather: bool = False,
        averaged: bool = False,
        beside_step: bool = False,
        trains: bool = False,
        needs: Collection[str] = EVERYTHING,
    ) -> None:
        """Refuse a call in the middle of a pass; unless ``inside_gather``, inside GatheredParameters. Wait for the
        host's step.

        If it ``trains``, refuse it also of an engine that is retired.

        And unless ``averaged`` while an average is applied, which may be used, but neither trained nor saved to resume;
        and while anything that it ``needs`` is off the device: see [Note: states off the device].

        Raises:
            RuntimeError: a pass is running, parameters are gathered, averages applied, or the engine was closed.
        """
        self.notice_failed_backward()
        # Nearly always none of it is so, and this is asked several times a step.
        if self.state or self.running or self.gather_contexts.open or self.parking.kinds:
            if trains:
                refuse_retired(self, what)
            check_idle(self, what, inside_gather=inside_gather, averaged=averaged, needs=needs)
        if not beside_step:
            self._refresh.wait_for_step()
            loading = EngineState.LOADING in self.state
            if what != "backward" and not loading and (listener := self.listener) is not None:
                listener.weights_wanted()

    def recover(self, *, known: bool = True) -> None:
        """End a pass that an error has ended, being handled if ``known``, and release its units.

        A forward that Ctrl-C has ended stays open until the model's next one, or this call, which tells the ranks that
        wait. Weights, optimizer states and the gradients of earlier backwards stay.
        """
        if self.phase is not Phase.IDLE and self._schedule.needs_others:
            error = sys.exc_info()[1] if known else None
            if error is not None:
                self.agreement.stopped(error)
            elif self.phase is Phase.FORWARD:
                self.agreement.found_stopped("its forward was interrupted, as by Ctrl-C or sys.exit()")
            else:
                self.agreement.found_stopped("an exception")
        self._hooks.reset()
        self._hooks.forget_graphs()
        self._backwards += 1
        self._backward.drop_uses()
        self._touched.drop_uses()
        self._outstanding = []
        self._since = 0
        failed, self.phase = self.phase, Phase.IDLE
        self._trains = True
        if failed is Phase.BACKWARD:
            self.accumulation.note_failure()
        if self.agreement.lost is not None:
            return  # there is no next step, and nothing to wait for
        self._schedule.abort(running=failed is not Phase.IDLE)  # first: nothing of it may be issued any more
        self._reductions.drop_reductions()
        self._guard_all()
        if failed is Phase.BACKWARD:  # after a forward, those there are whole, of a backward before it
            self.pending.forget_stray()

    def note_requires_grad(self, parameter: nn.Parameter, trained: bool) -> None:
        """``requires_grad`` is about to change; see :class:`zeropp.params.guard.GuardHandler`."""
        self.require_idle("requires_grad_", inside_gather=True, needs=NOTHING)
        self._flipped ^= {id(parameter)}
        for buffer in self.unit_of[id(parameter)].buffers:
            buffer.note_unfrozen(parameter, trained)

    def note_storages(self) -> None:
        """Look which storages gathered weights lie in."""
        self.storages = frozenset(buffer.storage_id for buffer in self.buffers)
        self.released_storages = self.storages.difference(
            b.storage_id for unit in self.persistent for b in unit.buffers
        )

    def weights_changed(self, buffers: Iterable[FlatBuffer], *, stepped: bool = False, for_now: bool = False) -> None:
        """Main weights are new: what is gathered of them is out of date, what is cached is renewed.

        Args:
            buffers: those with new weights.
            stepped: by an optimizer step; what is cached then serves as a base for differences.
            for_now: others may still change them before the next forward.
        """
        self.finish_load()
        for buffer in buffers:
            buffer.note_change(stepped=stepped)
        # Of older weights: see [Note: cached weights]. The next pass forgets them.
        self._graphs_outdated = True
        self._schedule.live_units.release_planned()
        with self.agreement.sending_weights(stepped=stepped):
            (self._refresh.put_off if for_now else self._refresh.start_refresh)()

    def _forget_outdated_graphs(self) -> None:
        if self._graphs_outdated:
            self._graphs_outdated = False
            self._backward.forget_graphs()
            self._hooks.forget_graphs()

    def begin_load(self) -> None:
        """A state dict is about to be copied in: what torch copies into a parameter are new main weights."""
        self.state |= EngineState.LOADING

    def finish_load(self) -> None:
        """Main weights are new, if a load has begun; one that failed half-way has changed some, too."""
        if EngineState.LOADING in self.state:
            self.state &= ~EngineState.LOADING
            self.weights_changed(self.buffers)

    def set_state(self, state: EngineState, *, on: bool = True) -> None:
        """Main weights hold an average, or the engine is retired; or, unless ``on``, no longer."""
        self.state = self.state | state if on else self.state & ~state

    def use_in(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Fetch a parameter's unit for the forwards of a module, too."""
        if (unit := self.unit_of[id(parameter)]).hooked:
            self._hooks.extend(module, unit)

    def take_loaded(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """Take this rank's piece of a parameter's new values; see :class:`zeropp.params.guard.GuardHandler`."""
        if EngineState.LOADING not in self.state:
            return False
        for buffer in self.unit_of[id(parameter)].buffers:
            buffer.load(parameter, values, keep_rounded=True)
        return True

    def on_close(self, action: Callable[[], None]) -> None:
        """Do something when the engine is taken off its model."""
        self._closing.append(action)

    def close(self) -> None:
        """Take every hook off the model and end streams and groups. Parameters stay partitioned and guarded."""
        if self.closed:
            return
        self.state |= EngineState.CLOSED
        self._hooks.remove()
        for action in reversed(self._closing):
            action()
        unused = None
        try:
            for comm_streams in self.comm_streams.values():
                comm_streams.close()
            # Before the watching ends: what never ends on a card is given up there.
            unused = self.agreement.meet_to_close()
        finally:
            self.agreement.close()
            self.comm.close(unused)

    @property
    def listener(self) -> Listener | None:
        """The wrapper of the optimizer, unless it is gone."""
        return self._listener()

    @property
    def buffers(self) -> list[FlatBuffer]:
        """Every flat buffer."""
        return [buffer for unit in self.units for buffer in unit.buffers]

    @property
    def trainable_buffers(self) -> list[FlatBuffer]:
        """Flat buffers with a gradient and optimizer states."""
        return [buffer for buffer in self.buffers if buffer.trainable]

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of trainable flat buffers."""
        return [gradient for unit in self.units for gradient in unit.gradients]

    def zero_grad(self, *, set_to_none: bool = True, now: bool = False) -> None:
        """Forget gradients or set them to zero; unless ``now``, not in a window whose ``step()`` did nothing."""
        if now or not self.accumulation.ignores_zero_grad:
            if not set_to_none:  # the host may be stepping with them, and they may be off the device
                self.require_idle("zero_grad(set_to_none=False)", averaged=True, needs=["lp_grads"])
                if (listener := self.listener) is not None:
                    listener.gradients_wanted()
            self.pending.forget_all(set_to_none=set_to_none)

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """``parameter.grad = None``; see :class:`zeropp.params.guard.GuardHandler`."""
        unit = self.unit_of[id(parameter)]
        self.notice_failed_backward()
        if self.running:
            return
        if self.pending.backward_ran or any(gradient.arrived for gradient in unit.gradients):
            self.parking.require("setting .grad to None", TRAINING)
            self._refresh.wait_for_step()  # what the host is stepping with stays
            self.pending.forget_one(unit, parameter)
        if (listener := self.listener) is not None:
            listener.gradient_forgotten(parameter)

    def has_pending_gradients(self) -> bool:
        """Tell whether gradients wait for the optimizer, outside of any pass."""
        return self.pending.backward_ran and not self.running


def engine_of(model: nn.Module | Optimizer) -> Engine:
    """The engine that manages a model, or that of a ZeroOptimizer.

    Raises:
        ValueError: none does.
    """
    if isinstance(model, Optimizer):
        engine = getattr(model, "engine", None)
        if isinstance(engine, Engine):
            return engine
        raise ValueError(f"{type(model).__name__} is a plain optimizer; give the ZeroOptimizer around it, or the model")
    for parameter in model.parameters():
        handler = handler_of(parameter)
        if isinstance(handler, Engine):
            return handler
    raise ValueError(
        f"{type(model).__name__} is not managed by zeropp, or was until close(); wrap it first: "
        "zeropp.ZeroOptimizer(optimizer, model, config)"
    )
