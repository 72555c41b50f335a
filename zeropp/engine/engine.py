"""The engine of one model: it begins and ends passes, gathers units for modules and reduces their gradients.

A hook (`hooks`) calls the engine when a module is about to run. The engine calls the schedule
(`zeropp.order.schedule`), which has usually issued the gather before. A comm stream (`zeropp.comm.streams`) runs the
hops of the unit's path (`zeropp.wire.paths`).
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
from zeropp.engine.accumulation import NO_LISTENER, GradAccumulation, Listener, PendingGradients
from zeropp.engine.backward import MAX_FORWARDS_IN_KEY, BackwardUses, OutOfModuleUses, PinnedUnits
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
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient
from zeropp.params.guard import GuardHandler, handler_of
from zeropp.params.loss_scale import LossScale
from zeropp.params.unit import Unit, UnitState, layout_id

__all__ = ["Engine", "engine_of"]

T = TypeVar("T")


class Engine(GuardHandler):
    """Gathers units before modules use them, releases them afterwards, and reduces gradients in backward.

    Other rooms use the public attributes and methods only. Hooks, schedule, reductions and refresh are private.

    Args:
        agreement: exchanges between the ranks, and their process groups.
        maker: makes flat buffers for parameters that are unfrozen.
        units: all units of the model, by index.
        device: device of the model.
        accumulation: counter of micro-batches.
        listener: wrapper of the optimizer, which is notified of passes and gradients; held weakly.
        loss_scale: loss scale, with the factor for summed gradients.
        options: settings.

    Attributes:
        accumulation: micro-batches since the last step.
        pending: gradients since the last step.
        comm_streams: comm streams by kind of traffic: "gather", "refresh", "reduce".
        gather_contexts: open uses of GatheredParameters.
        mode: levels of units that are not persistent.
        notes_calls: True if hooks report calls whose outputs they hooked.
        parking: memory that is off the device.
        phase: the running pass.
        state: state between passes.
        unit_of: id of a parameter -> its unit.
    """

    state = EngineState.READY
    notes_calls = False
    _trained_set = 0  # number of the current set of trained parameters; a part of the kinds of backwards
    _backwards = 0  # number of the running or next backward; a call stores the number of the backward that reached it
    _root_ran = False  # True once the model itself was called with a graph, and not only a module inside it
    _graphs_outdated = False  # True if weights have changed since the last pass
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
        self._listener = weakref.ref(listener)  # weak, because the listener owns this engine
        self.comm_streams = {kind: self._make_comm_streams(kind) for kind in ("gather", "refresh", "reduce")}
        self._reductions = Reductions(self.units, self.comm_streams["reduce"], agreement, self._issue_hash, loss_scale)
        self._schedule = self._make_schedule()
        self._refresh = self._make_refresh(self.comm_streams["refresh"])
        self.note_storages()
        self.phase = Phase.IDLE
        self.pending = PendingGradients(self.units, self._listener)
        # Ids of parameters whose requires_grad has changed since the engine last took it over.
        self._flipped: set[int] = set()
        self._ending: Callable[[], object] = lambda: None  # weak reference; returns None once autograd has dropped it
        # Kinds of the forwards with a graph that the next backward may go through, and the number of backwards since
        # the last of these forwards.
        self._outstanding: list[PhaseKey] = []
        self._since = 0
        self._backward = BackwardUses(self.units, self._schedule, self._reductions)
        self._touched = OutOfModuleUses(self.units, self._schedule)
        self._pinned_units = PinnedUnits(self._schedule)
        self._closing: list[Callable[[], None]] = []
        self.parking = Parking()
        self.gather_contexts = GatherContexts()
        # Assigned last: when an engine is deleted, Python drops its attributes in this order, and the units must
        # outlive the comm streams that still write to their memory.
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
        largest, note = partial(self.comm.largest, kind="refresh"), self.comm.ledger.count_event
        return Refresh(self.units, comm_streams, self._schedule, self.agreement, self._issue_hash, largest, note)

    # Forward.

    def enter(
        self, hooked: HookedModule, training: bool, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Begin a hooked module's forward: gather its units. See :class:`zeropp.engine.hooks.HookHandler`."""
        changed = None
        self.notice_failed_backward()
        if self.phase is not Phase.BACKWARD and self._hooks.was_interrupted(hooked):
            self.recover(known=False)
        running = self.phase is not Phase.IDLE
        if not (running or self.gather_contexts.computing):
            self._hooks.reset()  # drops the stack of a forward inside GatheredParameters that Ctrl-C ended
        outermost = not self._hooks.stack
        if self.gather_contexts.open and self.gather_contexts.serve(self.units, outermost=outermost):
            return cast_inputs(args, kwargs, self.options.input_dtype) if outermost else None
        try:
            if not running:
                self.require_idle("the model", averaged=True, beside_step=True, needs=of_a_forward())
                self.finish_load()
                self._forget_outdated_graphs()
                self._notified.forward_begins()
                self._refresh.start_put_off()
                self._begin_forward(hooked, training)
            if not running or (outermost and hooked.path == ""):  # the second: checkpointing runs the model again
                changed = cast_inputs(args, kwargs, self.options.input_dtype)
            if self._backward.complete:
                self._backward.come_to(hooked.path, hooked.run_by)  # checkpointing runs this module again in backward
            for unit in hooked.units:
                unit.users += 1
                unit.entered += 1
                if not (self._pinned_units.open and self._pinned_units.has(unit)):
                    self._schedule.use(unit, hooked.path if unit.entered == 1 else None)
        except BaseException as error:
            if not running and self.phase is Phase.IDLE:
                self.agreement.stopped(error, "the beginning of a forward")
            if outermost:
                self.recover()  # for an inner module, the post-hook of the outermost one does it
            raise
        return changed

    def leave(self, hooked: HookedModule, *, returns: BackwardReach, failed: bool) -> None:
        """End a hooked module's forward: release its units, unless something else keeps them."""
        if self.gather_contexts.open and self.gather_contexts.computing:
            return None
        # A model may catch the error of an inner module. In backward, checkpointing raises to end a recomputation.
        if failed and (self.agreement.lost is not None or (self.phase is Phase.FORWARD and not self._hooks.stack)):
            return self.recover()
        try:
            if returns is not BackwardReach.NEVER and self.phase is Phase.FORWARD:
                self._backward.expect_in_backward(hooked.units, whole=returns is BackwardReach.UNHOOKED)
                if returns is BackwardReach.AGAIN:
                    self._schedule.note_unrecorded(hooked.path, hooked.units)
            elif returns is not BackwardReach.NEVER:
                self._schedule.expect_again(hooked.units)  # run again by checkpointing; its backward comes next
            for unit in hooked.units:
                unit.users -= not (self._pinned_units.open and self._pinned_units.keeps(unit))
                unit.entered -= 1
                self._schedule.live_units.release_if_unused(unit)
            if self.phase is Phase.FORWARD and not self._hooks.stack:
                self._end_forward()
        except BaseException:
            if not self._hooks.stack:
                self.recover()
            raise

    def _begin_forward(self, hooked: HookedModule, training: bool) -> None:
        grad = torch.is_grad_enabled()
        key: PhaseKey = ("forward", hooked.path, training, grad)
        if grad:  # otherwise no backward follows, and gradients stay as they are
            refuse_compiled_autograd()
            self._notified.graph_begins()
            self.accumulation.note_forward(hooked.path)
            self._expect_boundary()
            outstanding = [*([] if self._since else self._outstanding), key]
            self._root_ran |= hooked.path == ""
            if self._root_ran:
                # Drop parts that gather nothing: if one rank alone ran them, kinds would differ between ranks.
                outstanding = [each for each in outstanding if not (each[1] and self._schedule.known.note_local(each))]
            self._schedule.repeats |= len(outstanding) > 1
            if self._since:
                self._schedule.unrecorded.clear()
            self._since = 0
            self._outstanding = outstanding[-MAX_FORWARDS_IN_KEY:]
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
        if self._backward.give_up():  # a backward ran inside this forward; later ones have a new number
            self.pending.note_used(self._reductions.end_arrivals())
            self._backwards += 1
        self._schedule.end_phase()
        self._guard_all()
        self.phase = Phase.IDLE

    # Backward.

    def backward_reached(self, call: BackwardCall) -> None:
        """Gather the units of a call because backward has reached one of its outputs."""
        if call.reached == self._backwards:
            return  # backward has reached another output of the call before
        self._begin_backward(by_output=True)
        if (self.phase is Phase.FORWARD or not self._trains) and not goes_on():
            return  # only the gradient of this output is wanted: backward does not enter the module
        call.reached = self._backwards
        # Before note_reached: as long as this call counts as one to come, a unit released here stays gathered for it.
        self._backward.come_to(call.hooked.path, call.hooked.run_by)
        if call.expected or self._backward.fresh:
            self._backward.note_reached(call)
        for unit in call.hooked.units:
            self._backward.use(unit, call.hooked.path, call.hooked.run_by, lasting=unit.has_frozen)

    def call_made(self, call: BackwardCall, outputs: list[Tensor]) -> None:
        """Note that a call has hooked outputs; see :class:`zeropp.engine.hooks.HookHandler`."""
        if self.phase is Phase.BACKWARD:
            self._backward.expect_fresh_call(call)
        else:
            self._backward.expect_call(call, outputs)

    def backward_left(self, call: BackwardCall) -> None:
        """Note that backward has all input gradients of a call; release units with frozen parameters if possible."""
        for unit in call.hooked.units if call.reached == self._backwards else ():
            if unit.has_frozen:
                self._backward.call_ended(unit)

    def gradient_ready(self, index: int, position: int, *, alone: bool) -> None:
        """Count a parameter's gradient. The unit's last one allows its reduction and its release."""
        # First, because a backward that begins here may forget earlier gradients.
        self._begin_backward()
        if self._reductions.count_gradient(index, position):
            self._backward.last_gradient = index, position
            if alone or self._reductions.arrivals.runs_last(index, position):
                self._reductions.send_complete()
            self._backward.complete.append(self.units[index])

    def _begin_backward(self, *, by_output: bool = False) -> None:
        if self.phase is Phase.BACKWARD and self._ending() is not None:
            return  # a hook of the running backward
        self.notice_failed_backward()
        if self.running:
            return
        self.require_idle("backward", needs=TRAINING)
        self._forget_outdated_graphs()
        self._trains = not by_output or self._backward.accumulates()
        if self._trains:
            self._notified.backward_begins()
        self._expect_boundary()
        self._refresh.start_put_off()
        self.phase = Phase.BACKWARD
        # Queued once for each backward: for one inside it, as of reentrant checkpointing, this method returns above.
        self._ending = queue_end_of_backward(self._end_backward, self._backward_dropped)
        self._schedule.begin_phase(self._backward_key(self._outstanding), None)
        self._reductions.arrivals.run_last()
        self.pending.backward_ran |= self._trains
        self.notes_calls = True
        for unit in self.persistent:
            self._schedule.use(unit)
        self._backward.fetch_known_uses()

    @uncompiled
    def _end_backward(self) -> None:
        self.pending.note_used(self._reductions.end_arrivals())
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
        self._notified.backward_ended()

    def _backward_dropped(self) -> None:
        """Report a failed backward to waiting ranks at once. The next call of this engine may come much later."""
        if self.phase is Phase.BACKWARD and current_graph_task() == -1:
            self.agreement.found_stopped("its backward failed")

    def _expect_boundary(self) -> None:
        """Set ``Reductions.last``: True if the running or next backward is expected to be the last before a step."""
        self._reductions.last = self._trains and (self.accumulation.closing or not self.mode.sums)

    def _backward_key(self, outstanding: list[PhaseKey]) -> PhaseKey:
        # Which units a backward uses depends on the forwards that it may go through, and on the number of backwards
        # that have gone through them before.
        holding = self._reductions.holding if self._trains else None
        later = (min(self._since, MAX_FORWARDS_IN_KEY),) if self._since else ()
        return ("backward", holding, self._trained_set, *outstanding, *later)

    # Access for other rooms to hooks, schedule, reductions and refresh.

    @property
    def closed(self) -> bool:
        """True if the engine was taken off its model."""
        return EngineState.CLOSED in self.state

    @property
    def retired(self) -> bool:
        """True if the engine was destroyed, or its model is being wrapped again."""
        return EngineState.RETIRED in self.state

    @property
    def root(self) -> nn.Module | None:
        """The wrapped model; None if it was deleted."""
        return self._hooks.root

    def cached_values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return whole values to read between passes; see :class:`zeropp.params.guard.GuardHandler`. Not collective."""
        if self.closed or self.gather_contexts or not (self.mode.stays_whole or self.readable_weights):
            return None
        self._refresh.wait_for_all()  # every rank has queued the refresh in its step, so it ends without further calls
        return self.unit_of[id(parameter)].cached_values(parameter)

    def keep_handle(self, handle: RemovableHandle) -> None:
        """Remove this hook when the engine's own hooks are removed."""
        self._hooks.keep(handle)

    def install_hooks(self, module: nn.Module, path: str, units: tuple[Unit, ...]) -> None:
        """Hook a module, so that its forwards gather the units; ``path`` is the module's name in the model."""
        self._hooks.install(module, HookedModule(path, units))

    def watch_gradients(self, unit: Unit) -> None:
        """Hook a unit's trainable parameters, those that have no hook yet, to collect their gradients."""
        self._hooks.watch_gradients(unit, self._reductions.arrivals)

    def run_as(self, module: nn.Module, function: Callable[..., object], *args: object) -> object:
        """Run a hooked module's hooks around ``function``, which replaces the module's forward."""
        return self._hooks.run_as(module, function, *args)

    def call_model(self, model: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the model, which may call itself inside its forward. If Ctrl-C ends the call, the pass is given up."""
        # No call is open, so Ctrl-C has ended the forward that is still marked as running.
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
        """Keep units gathered, once used, until the context ends; see :class:`zeropp.engine.backward.PinnedUnits`."""
        return self._pinned_units.until_left()

    def layout_id(self) -> str:
        """Return a fingerprint of this rank's slices of the model. Equal slices have equal fingerprints."""
        return layout_id(self.units, self.mode, self.comm.rank)

    def release_prefetched(self) -> None:
        """Release the units that the plan keeps gathered for a later pass; the same units on every rank."""
        self._schedule.live_units.release_planned()

    def wait_for_step(self) -> None:
        """Wait until no step on the host is in flight."""
        self._refresh.wait_for_step()

    def wait_for_refresh(self) -> None:
        """Wait until no step writes and no refresh reads the main weights."""
        self._refresh.wait_for_all()

    def start_refresh(self) -> None:
        """Queue the refreshes of all cached weights that are older than the main weights."""
        self._refresh.start_refresh()

    @property
    def refresh_is_delayed(self) -> bool:
        """True if cached weights are old and their refresh waits for the next step or forward."""
        return self._refresh.is_put_off

    def start_delayed_refresh(self) -> None:
        """Queue the refreshes that were delayed to the next step or forward, if there are any."""
        self._refresh.start_put_off()

    # The step.

    def begin_step(self) -> int:
        """Begin a step; return its code in messages, equal on all ranks and different from that of any pass."""
        return self._schedule.begin_step()

    def units_in_forward_order(self) -> list[Unit]:
        """Return all units by first use in the next forward; units without hooks, which any module may use, first."""
        return self._schedule.in_forward_order()

    @property
    def holds_gradients(self) -> bool:
        """True if gradients of the last backward are held, to be reduced with later ones or in the step sync."""
        return self._reductions.holding

    def set_no_sync(self, on: bool) -> bool:
        """Hold the gradients of the following backwards (``no_sync``) if ``on``; return the previous setting."""
        before, self._reductions.no_sync = self._reductions.no_sync, on
        return before

    def send_unsent(self, index: int) -> None:
        """Reduce the gradients of a unit that are held or stray on any rank. Collective."""
        self._reductions.send_unsent(index)

    @property
    def sequence_hash(self) -> int:
        """The 24-bit hash of all issued collectives. The step sync compares it between ranks."""
        return self._issue_hash.value

    def note_issued(self, kind: int, unit: int, version: int) -> None:
        """Add an event to the hash of issued collectives. Every rank must add the same event."""
        self._issue_hash.add(kind, unit, version)

    @property
    def passed_over(self) -> bool:
        """True if this rank has skipped uses of an order, or made unknown calls, since the last step sync."""
        return self._schedule.passed_over

    def note_step_sync(self, *, passed_over: bool) -> None:
        """Take the result of a step sync; ``passed_over`` is True if any rank has passed over units since the last."""
        self._schedule.note_passed_over(passed_over)

    def note_edited_gradients(self) -> None:
        """Note that a rank edited gradients before a step. From now on backwards must find their late gradients."""
        self._schedule.edits = True

    def postpone_reductions(self, units: list[int], *, held: bool) -> None:
        """Expect gradients of these units at the end of backwards, because they came late or were ``held``."""
        self._schedule.postpone(units, held=held)

    def renew_caches(self) -> None:
        """Refresh all cached weights from main weights alone, because ranks have different bits of them."""
        self._refresh.invalidate()

    # Changes of the set of trained parameters.

    @property
    def requires_grad_changed(self) -> bool:
        """True if ``requires_grad`` of a parameter has changed and the engine has not taken it over."""
        return bool(self._flipped)

    def note_trained(self, number: int, units: Iterable[Unit], *, split: bool) -> None:
        """Take over a change of the set of trained parameters.

        Args:
            number: number of the new set; a part of the kinds of backwards.
            units: units whose parameters have changed.
            split: True if some of these units have new flat buffers.
        """
        self._flipped.clear()
        self._trained_set = number
        for unit in units:
            unit.update_trained()
        self._reductions.update_trained()
        # New buffers have never been gathered, and prefetch plans were made for the sizes of the old ones.
        if split:
            self.note_storages()
            self._schedule.note_sizes()
            self.pending.make_room()

    def forget_learned(self, *, backwards: bool = False, forwards: bool = False) -> None:
        """Forget the learned orders of backwards or forwards, because other parameters are trained."""
        if backwards:
            self._schedule.known.forget_backwards()
        if forwards:
            self._schedule.known.forget_forwards()

    # Parameters touched outside of modules, the end of failed passes, changes of weights.

    def fetch_touched(self, parameter: nn.Parameter) -> bool:
        """Gather the unit of a parameter that is touched; see :class:`zeropp.params.guard.GuardHandler`."""
        if self.closed:
            self.require_idle("the model", averaged=True, beside_step=True)
        self.notice_failed_backward()
        if not self.running and current_graph_task() == -1:
            return False
        self._begin_backward(by_output=True)  # a user's hook may touch a weight before the first hook of the engine
        self._touched.use(self.unit_of[id(parameter)])
        return True

    def fetched_by(self, parameter: nn.Parameter) -> list[str]:
        """Return the modules to call for a parameter; see :class:`zeropp.params.guard.GuardHandler`."""
        return self._hooks.fetching(parameter, self.unit_of[id(parameter)])

    def _guard_all(self) -> None:
        """Guard all units: between passes no weight may be read or edited, even if its unit stays gathered."""
        for unit in self.units:
            if unit.state is UnitState.UNSHARDED:
                unit.guard_values()

    @property
    def running(self) -> bool:
        """True while a pass is running, or one that has failed or was interrupted and is not yet given up."""
        return self.phase is not Phase.IDLE

    def notice_failed_backward(self, *, known: bool = False) -> None:
        """Recover if the running backward has failed; ``known`` is True while its exception is being handled.

        Autograd calls no callback at the end of a failed backward, so methods that begin something call this first.
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
        """Raise if a call is not allowed now; otherwise wait for a step on the host.

        Args:
            what: description of the call, for the error.
            inside_gather: True to allow the call inside GatheredParameters.
            averaged: True to allow it while an average of the weights is applied.
            beside_step: True to return without waiting for a step on the host.
            trains: True to refuse the call if the engine is retired.
            needs: names of the memory that must be on the device: see [Note: states off the device].

        Raises:
            RuntimeError: a pass is running, parameters are gathered, averages are applied, or the engine was closed.
        """
        self.notice_failed_backward()
        # One test for the usual case, because this method runs several times in each step.
        if self.state or self.running or self.gather_contexts.open or self.parking.kinds:
            if trains:
                refuse_retired(self, what)
            check_idle(self, what, inside_gather=inside_gather, averaged=averaged, needs=needs)
        if not beside_step:
            self._refresh.wait_for_step()
            if what != "backward" and EngineState.LOADING not in self.state:
                self._notified.weights_wanted()

    def recover(self, *, known: bool = True) -> None:
        """Give up a pass that an error has ended, release its units, and report the stop to waiting ranks.

        Weights, optimizer states and gradients of earlier backwards stay. A forward that Ctrl-C ended stays open until
        this call or the model's next forward. ``known`` is True while the exception is being handled.
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
        self.pending.note_used(self._reductions.end_arrivals())
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
            return  # no step follows, and waiting would be in vain
        self._schedule.abort(running=failed is not Phase.IDLE)  # first, so that no further collective is issued
        self._reductions.drop_reductions()
        self._guard_all()
        if failed is Phase.BACKWARD:  # after a failed forward, .grad has complete gradients of an earlier backward
            self.pending.forget_stray()

    def note_requires_grad(self, parameter: nn.Parameter, trained: bool) -> None:
        """Note that ``requires_grad`` changes to ``trained``; see :class:`zeropp.params.guard.GuardHandler`."""
        self.require_idle("requires_grad_", inside_gather=True, needs=NOTHING)
        self._flipped ^= {id(parameter)}
        for buffer in self.unit_of[id(parameter)].buffers:
            buffer.note_unfrozen(parameter, trained)

    def note_storages(self) -> None:
        """Read again in which storages the gathered weights are."""
        self.storages = frozenset(buffer.storage_id for buffer in self.buffers)
        kept = [buffer.storage_id for unit in self.persistent for buffer in unit.buffers]
        self.released_storages = self.storages.difference(kept)

    def weights_changed(
        self, buffers: Iterable[FlatBuffer], *, stepped: bool = False, delay_refresh: bool = False
    ) -> None:
        """Take over new main weights: release gathered units, and refresh cached weights.

        Args:
            buffers: flat buffers with new main weights.
            stepped: True after an optimizer step. Differences to the cached weights may then be sent.
            delay_refresh: True to delay the refreshes to the next forward, because weights may change again before it.
        """
        self.finish_load()
        for buffer in buffers:
            buffer.note_change(stepped=stepped)
        # Graphs made with older weights are forgotten when the next pass begins: see [Note: cached weights].
        self._graphs_outdated = True
        self._schedule.live_units.release_planned()
        with self.agreement.sending_weights(stepped=stepped):
            (self._refresh.put_off if delay_refresh else self._refresh.start_refresh)()

    def _forget_outdated_graphs(self) -> None:
        if self._graphs_outdated:
            self._graphs_outdated = False
            self._backward.forget_graphs()
            self._hooks.forget_graphs()

    def begin_load(self) -> None:
        """Take values that torch copies into parameters as new main weights, until :meth:`finish_load`."""
        self.state |= EngineState.LOADING

    def finish_load(self) -> None:
        """End a load that has begun, and take over new main weights. A load that failed has changed some, too."""
        if EngineState.LOADING in self.state:
            self.state &= ~EngineState.LOADING
            self.weights_changed(self.buffers)

    def set_state(self, state: EngineState, *, on: bool = True) -> None:
        """Set a flag of the engine's state, or clear it if ``on`` is False."""
        self.state = self.state | state if on else self.state & ~state

    def use_in(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather a parameter's unit for the forwards of one more module."""
        if (unit := self.unit_of[id(parameter)]).hooked:
            self._hooks.extend(module, unit)

    def take_loaded(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """Copy this rank's slice of loaded values; see :class:`zeropp.params.guard.GuardHandler`."""
        if EngineState.LOADING not in self.state:
            return False
        for buffer in self.unit_of[id(parameter)].buffers:
            buffer.load(parameter, values, keep_rounded=True)
        return True

    def on_close(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the engine is taken off its model."""
        self._closing.append(action)

    def close(self) -> None:
        """Remove all hooks, and end comm streams and process groups. Parameters stay sharded and guarded."""
        if self.closed:
            return
        self.state |= EngineState.CLOSED
        self._hooks.remove()
        self._reductions.arrivals.remove_hooks()
        for action in reversed(self._closing):
            action()
        unused = None
        try:
            for comm_streams in self.comm_streams.values():
                comm_streams.close()
            # While the monitor still runs: it aborts collectives on a GPU that never end.
            unused = self.agreement.meet_to_close()
        finally:
            self.agreement.close()
            self.comm.close(unused)

    @property
    def listener(self) -> Listener | None:
        """The wrapper of the optimizer; None if it was deleted."""
        return self._listener()

    @property
    def _notified(self) -> Listener:
        return self._listener() or NO_LISTENER

    @property
    def buffers(self) -> list[FlatBuffer]:
        """All flat buffers."""
        return [buffer for unit in self.units for buffer in unit.buffers]

    @property
    def trainable_buffers(self) -> list[FlatBuffer]:
        """The flat buffers with a gradient and optimizer states."""
        return [buffer for buffer in self.buffers if buffer.trainable]

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of trainable flat buffers."""
        return [gradient for unit in self.units for gradient in unit.gradients]

    def zero_grad(self, *, set_to_none: bool = True, now: bool = False) -> None:
        """Forget gradients or zero them. Does nothing after a ``step()`` that did nothing, unless ``now``."""
        if now or not self.accumulation.ignores_zero_grad:
            if not set_to_none:  # zeroing writes to gradients: a host step may read them, or they may be off the device
                self.require_idle("zero_grad(set_to_none=False)", averaged=True, needs=["lp_grads"])
                self._notified.gradients_wanted()
            self.pending.forget_all(set_to_none=set_to_none)

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """Forget one parameter's gradient; see :class:`zeropp.params.guard.GuardHandler`."""
        unit = self.unit_of[id(parameter)]
        self.notice_failed_backward()
        if self.running:
            return
        if self.pending.backward_ran or any(gradient.arrived for gradient in unit.gradients):
            self.parking.require("setting .grad to None", TRAINING)
            self._refresh.wait_for_step()  # a step on the host still reads the gradient
            self.pending.forget_one(unit, parameter)
        self._notified.gradient_forgotten(parameter)

    def has_pending_gradients(self) -> bool:
        """Return True if gradients wait for a step and no pass is running."""
        return self.pending.backward_ran and not self.running


def engine_of(model: nn.Module | Optimizer) -> Engine:
    """Return the engine of a wrapped model, of a module of such a model, or of a ZeroOptimizer.

    Raises:
        ValueError: the model is not managed by zeropp, or the optimizer is not a ZeroOptimizer.
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
