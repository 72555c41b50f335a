"""``ZeroOptimizer``: a torch optimizer over a model whose weights, gradients and states are partitioned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp._compat import uncompiled
from zeropp.access.refusals import explain_freed
from zeropp.access.requires_grad import Trainability
from zeropp.comm.collective import run_on_all_ranks
from zeropp.comm.process_groups import Group
from zeropp.config import ConfigSource, load_config, require_supported
from zeropp.config.base import warn_user
from zeropp.engine.accumulation import GradAccumulation
from zeropp.engine.engine import Engine
from zeropp.engine.preconditions import NOTHING, refuse_compiled_autograd, refuse_retired
from zeropp.optimizer.checks import (
    check_elementwise,
    check_optimizer,
    check_scale,
    count_states,
    describe_optimizer,
    refusal_of_early_unscale,
    refusal_of_scaler,
    refuse_inner_group,
    refuse_inner_step,
    refuse_unused,
    weakly,
    zero_grad_by,
)
from zeropp.optimizer.host_step import waits_for_weights
from zeropp.optimizer.offload_states import chosen_kinds, offload_states, reload_states
from zeropp.optimizer.optimizer_step import (
    ErrorFeedback,
    GradientNorms,
    GroupSettings,
    OptimizerStep,
    StepResult,
    from_step_result,
    gradient_norms,
    load_carried,
    load_optimizer,
    scale_gradients,
    unscale,
)
from zeropp.optimizer.param_groups import add_group, switch_mode
from zeropp.optimizer.rank_state import (
    check_state,
    describe_rank,
    load_main_weights,
    warn_if_alone,
)
from zeropp.optimizer.sharded_params import ShardedParams
from zeropp.optimizer.step_sync import StepStats, StepSync
from zeropp.params.unit import FlatBuffer, UnitState
from zeropp.plan.memory import plan_space
from zeropp.setup.build import build_engine

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(Optimizer):
    """Partitions a model in place and steps the wrapped optimizer on this rank's part of it.

    The user's parameter groups stay the user's objects: schedulers and edits of ``lr`` reach the wrapped optimizer.
    Their ``params`` become this rank's slices, 1-D float32 leaves.

    Attributes:
        grad_norm: gradient norm over the whole model at the last step, after averaging, before configured clipping.
        skipped_steps: steps not taken because a gradient was not finite.
        step_was_skipped: whether the last one was.
        step_was_taken: whether a step has changed weights since the last backward; schedulers follow it. Where the host
            does not wait for a step, it waits for it when one of these four is asked for.
        grad_scaler: torch's, if one scales the losses and errors are carried over (``zeropp_loco_param``): they follow
            its scale. Without it a change of the scale disturbs them for a step.
    """

    grad_norm: float | None = from_step_result("grad_norm")
    skipped_steps: int = from_step_result("skipped_steps")
    step_was_skipped: bool = from_step_result("step_was_skipped")
    step_was_taken: bool = from_step_result("step_was_taken")

    accumulation_type = GradAccumulation
    # See [Note: GradScaler]. The two attributes are there while GradScaler.step() runs.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    _steps = False  # the wrapped optimizer's step runs
    # Of torch's GradScaler: the groups show all gradients, and whether any rank's are not finite; and the groups were
    # read since the last backward, or before it, which is all that is seen of ``unscale_()``.
    _all_shown = True
    _groups_read = _read_between = False
    _zero_after: bool | None = None  # that has called zero_grad, with this set_to_none

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        config: ConfigSource = None,
        *,
        process_group: Group = None,
        gradient_scale: float | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Wrap ``optimizer`` and ``model``. Collective: every rank of the group calls it.

        Args:
            optimizer: elementwise, over parameters of ``model``; its state is cut like them, in main weights' dtype.
            model: rank 0's values become everyone's.
            config: DeepSpeed-style dict, path to JSON, or a loaded Config; None for stage 3 with defaults.
            process_group: ranks to partition over: a group, a one-dimensional DeviceMesh, or the world.
            gradient_scale: factor on gradients summed over ranks; None for the configured mean or sum.
            device: to train on; None for the model's. See docs/multinode.md, "A model larger than a GPU".

        Raises:
            ConfigError, TypeError, ValueError: configuration, optimizer, model or group cannot be used.
        """

        def prepare() -> Any:
            loaded = load_config(config)
            require_supported(loaded)
            check_optimizer(optimizer, model, loaded)
            check_elementwise(optimizer)
            check_scale(gradient_scale)
            return loaded

        def alike() -> list[str]:
            return [*describe_optimizer(optimizer, model), f"gradient_scale {gradient_scale}"]

        self.config = run_on_all_ranks(
            process_group, "preparing ZeroOptimizer", prepare, patience=lambda loaded: loaded.zeropp.hang_timeout
        )
        plan = partial(plan_space, settings=self.config, states=partial(count_states, optimizer))
        self.inner, self.defaults = optimizer, optimizer.defaults
        self.engine: Engine = build_engine(model, self.config, process_group, self, gradient_scale, device, alike, plan)
        groups = GroupSettings(lambda: optimizer.param_groups, self.engine.agreement)
        self.step_sync = StepSync(self.engine, groups, checks_overflow=self.config.checks_overflow)
        self.slices = ShardedParams(optimizer, self.engine.units, self.engine.device, waits_for_weights(self.engine))
        self._optimizer_step = OptimizerStep(self.engine, optimizer, self.slices, self.config)
        self._trainability = Trainability(self.engine, model)
        loco = self.config.zero.zeropp_loco_param
        self.carried = ErrorFeedback(self.engine, loco.reset_T if loco is not None else 1)
        # Hooks are shared with the wrapped optimizer and run here, once a step.
        for call, when in product(("step", "state_dict", "load_state_dict"), ("pre", "post")):
            name = f"_optimizer_{call}_{when}_hooks"
            setattr(self, name, getattr(optimizer, name))
        self._patch_step_function()  # Optimizer.__init__ would, and would make groups and states of its own, too
        optimizer.step = refuse_inner_step  # type: ignore[assignment, method-assign]
        optimizer.add_param_group = refuse_inner_group  # type: ignore[method-assign]
        optimizer.zero_grad = zero_grad_by(optimizer, weakly(self._zero_by_inner))  # type: ignore[method-assign]
        self.step_result = StepResult(self.step_sync, self.engine.loss_scale)
        self._norms = GradientNorms()
        self.grad_scaler: torch.amp.GradScaler | None = None

    # Losses.

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss gets in float16; 1 otherwise. See [Note: loss scale]."""
        # The last step may move it, and may not be known yet: on a card its sum is read late.
        self.step_result.wait_for_result()
        return self.engine.loss_scale.value

    @property
    def overflow(self) -> bool:
        """``step_was_skipped``, by the name that DeepSpeed's users and Accelerate ask for."""
        return self.step_was_skipped

    @uncompiled
    def scale(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor:
        """A micro-batch's loss as :meth:`backward` takes it: divided, and times :attr:`loss_scale`.

        Args:
            loss: scalar, and all of it: what is added afterwards is neither divided nor scaled.
            scale_wrt_gas: divide it by the configured gradient_accumulation_steps.

        Raises:
            TypeError: it is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}; expected the scalar tensor that the model's output gave")
        # Also in an unfinished window that step(now=True) ends: it is divided as if it were whole.
        steps = self.engine.accumulation.steps
        return self.engine.loss_scale.apply(loss / steps if scale_wrt_gas and steps > 1 else loss)

    @uncompiled
    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """Backward of ``loss`` divided by the configured gradient_accumulation_steps.

        Args:
            loss: scalar.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: False for a loss that has been divided already.
        """
        refuse_compiled_autograd()
        # Outside of the try: an error here is no error of the backward.
        scaled = self.scale(loss, scale_wrt_gas=scale_wrt_gas)
        self.engine.accumulation.divided |= scale_wrt_gas
        try:
            scaled.backward(retain_graph=retain_graph)
        except Exception as error:
            reason = ""
            # Autograd's word for memory that was freed with its unit: somebody has kept a view of a weight.
            if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
                reason = explain_freed(self.engine, str(error))
            # Now, so that other ranks are told of the exception.
            self.engine.notice_failed_backward(known=True)
            if reason:
                raise RuntimeError(reason) from error
            raise

    # The optimizer's own surface.

    @property
    @uncompiled
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        # Writes to gradients through ``.data`` raise no version, so whoever gets the groups may have edited some.
        self.step_sync.doubt()
        self._groups_read = True
        return self.inner.param_groups

    @property
    @uncompiled
    def state(self) -> Any:
        """The wrapped optimizer's state, for this rank's slices; not before a step that the host has begun is over."""
        self.engine.wait_for_step()
        self.engine.parking.require("optimizer.state", ["optim_states"])
        return self.inner.state

    @state.setter
    @uncompiled
    def state(self, value: Any) -> None:
        """Other states for this rank's slices, as ``optimizer.state = defaultdict(dict)`` for none."""
        others = dict(value)
        states = self.state
        states.clear()
        states.update(others)

    def __getattr__(self, name: str) -> Any:
        """The wrapped ``optimizer``, its public attributes to read; ``train`` and ``eval``, which change weights."""
        inner = self.__dict__.get("inner")
        if name == "optimizer" and inner is not None:
            return inner  # what DeepSpeed's optimizers call theirs
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(switch_mode, self.engine, inner, name) if name in ("train", "eval") else getattr(inner, name)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, as in torch. Collective: every rank adds the same.

        Args:
            param_group: ``params`` of the model that are in no group yet, and settings where the defaults do not do.
                Those that are frozen are stepped once ``requires_grad_`` has been called on them.

        Raises:
            TypeError, ValueError: the group cannot be used; the other ranks raise RuntimeError.
        """
        self.engine.require_idle("add_param_group")
        add_group(param_group, self.engine, self.inner, self.slices, self.apply_requires_grad)
        self.step_sync.invalidate()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep whole gradients on this rank, in the main dtype, and send nothing.

        They are sent with the first backward outside, or by ``step``. Costs one whole gradient of memory. Beside
        torch's GradScaler the last backward must be outside, since it unscales what has been sent by then.
        """
        self.engine.require_idle("no_sync", averaged=True, beside_step=True, needs=NOTHING)
        before = self.engine.set_no_sync(True)
        try:
            yield
        finally:
            self.engine.set_no_sync(before)

    @torch.no_grad()
    @uncompiled
    def clip_grad_norm_(self, max_norm: float, *, now: bool = False) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Args:
            max_norm: bound.
            now: clip what is there, before ``step(now=True)``. Otherwise nothing is touched where ``step()`` would do
                nothing.

        Returns:
            Norm before clipping, a scalar on the model's device; where nothing was touched the last step's, or 0.
        """
        self.engine.require_idle("clip_grad_norm_")
        if self.engine.accumulation.unfinished and not now:
            return torch.tensor(self.grad_norm or 0.0, dtype=torch.float64, device=self.engine.device)
        self.slices.take_edits(self.engine.pending)
        self.step_sync.invalidate()  # the user may have edited gradients since
        stats = self._decide()  # gradients held by no_sync must be in first
        norm = self.step_sync.norm_tensor()
        if not self.step_sync.spoiled:
            self.step_sync.accept_scaling(scale_gradients(self.engine, norm, max_norm))
        self._show_sent(stats)
        return norm

    @torch.no_grad()
    @uncompiled
    def grad_norms(self) -> dict[str, float]:
        """Norm of the gradient of each parameter that has one, by its name, after averaging; for logging.

        Collective: every rank calls it, between backward and ``zero_grad()``. One sum of 8 bytes a parameter; the host
        waits for it. Inside an unfinished window they are those of the last time.
        """
        self.engine.require_idle("grad_norms")
        if not self.engine.accumulation.unfinished:
            self.step_result.wait_for_result()  # of the step before: the new statistics would overwrite it
            self.slices.take_edits(self.engine.pending)
            stats = self.step_sync.keep_verdict()
            self._norms = gradient_norms(self.engine, stats)
            self._show_sent(stats)
        return GradientNorms(self._norms)

    def _show_sent(self, stats: StepStats) -> None:
        """Show gradients that were reduced for the step's statistics, such as those that no_sync() held: the user may
        edit them.
        """
        if stats.sent:
            self.slices.show_arrived(self.engine.pending)

    @uncompiled
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, now: bool = False
    ) -> Tensor | None:
        """One optimizer step; skipped on every rank if any gradient anywhere is not finite.

        With ``managed_gradient_accumulation`` true (the default) it acts when at least ``gradient_accumulation_steps``
        micro-batches have been taken since the last step, or with ``now=True``; otherwise it does nothing but run the
        closure. With false every call acts. A micro-batch is all backwards since the last training forward of the
        model, that is, one with gradients enabled. Step hooks run around steps that act.

        Args:
            closure: computes the loss and its backward; called once, before step hooks where it may be one of several.
            now: step with what is there, divided as if the window were whole; nothing is done if no backward has run.

        Raises:
            RuntimeError: the ranks are out of step, or a parameter was unused and ignore_unused_parameters is false.
        """
        if "found_inf" not in self.__dict__:
            return self._step(closure, now=now)
        try:
            return self._step_for_scaler(closure, now=now)
        except BaseException:
            # GradScaler takes its attributes away after a step that returns, and only then.
            del self.grad_scale, self.found_inf
            raise

    step.hooked = True  # type: ignore[attr-defined]  # torch would let hooks run around steps that are not taken

    def _step_for_scaler(self, closure: Callable[[], Tensor] | None, *, now: bool) -> Tensor | None:
        """A step that torch's GradScaler calls; see [Note: GradScaler]."""
        if not self._all_shown:
            raise refusal_of_scaler(self.engine.accumulation)
        if self.grad_scale is None and self._read_between:
            raise refusal_of_early_unscale()
        # GradScaler calls no step then where an optimizer leaves unscaling to it.
        if float(self.found_inf):
            return None
        if self.grad_scale is not None:
            unscale(self.inner, self.grad_scale)
            self.step_sync.doubt()
        return self._step(closure, now=now)

    def _step(self, closure: Callable[[], Tensor] | None, *, now: bool) -> Tensor | None:
        window = self.engine.accumulation
        loss = None
        if closure is not None and not window.every_step_acts:  # hooks must not run before it is known that it acts
            loss = torch.enable_grad()(closure)()
            closure = None
        self.engine.require_idle("step", beside_step=True, trains=True)
        taken = window.note_step_call(now=now)
        warning = None if now else window.warning()
        if warning is not None and self.engine.comm.rank == 0:  # all ranks come to the same
            warn_user(warning)
        if not taken:
            self.step_result.pass_over()
            return loss
        place = self.engine.begin_step()
        with self.engine.agreement.reporting_errors("step()", step=place):
            found = self._take_step(closure)
        return loss if found is None else found

    @Optimizer.profile_hook_step
    @torch.no_grad()
    def _take_step(self, closure: Callable[[], Tensor] | None) -> Tensor | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.engine.require_idle("step", beside_step=True)
        # The step before may write, and a refresh read, the main weights that are about to be stepped.
        self.engine.wait_for_refresh()
        self.engine.loss_scale.drop_losses()
        self.slices.refuse_accumulated()
        # Weights that were set by ``.data`` since the last forward are in no shard yet.
        self.weights_wanted()
        if rest := self.slices.take_rest():
            self.step_sync.missed += rest
            self.engine.note_storages()
        self.slices.take_edits(self.engine.pending)
        self.step_sync.recheck()
        stats = self._decide()
        norm = self.step_sync.norm_tensor()
        # The host has not read this sum: the device leaves the step out if a gradient is not finite.
        left_out = self.step_sync.left_out() if stats.late else None
        self.step_sync.invalidate()  # a second step asks again: every rank must come to it
        self.step_sync.forget_early_edits()
        # First, since the loss scale may raise: whoever catches that finds a new window.
        if stats.skips:
            self.carried.clear()
            self.engine.accumulation.restart()
        self.step_result.decided(stats)
        if stats.skips:
            return loss
        if not self.config.zero_optimization.ignore_unused_parameters:
            refuse_unused(self.engine, stats)
        self.slices.show_used(stats.used)
        self._steps = True
        try:
            self._optimizer_step.run_step(norm, left_out)
        except BaseException:
            self._zero_after = None  # no later step is to do what this one has asked for
            raise
        finally:
            self._steps = False
        self.slices.accept_edits()
        # Gradients stay until zero_grad(), and norms over the groups stay refused as long.
        self.slices.show_markers(True)
        self.carried.count_step()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers made before wrapping look for it
        self.engine.accumulation.restart()
        # Not where nothing had a gradient, as after batches that were all thrown away.
        self.step_result.step_was_taken = any(map(any, stats.used))
        zero = self._zero_after
        self._zero_after = None
        if zero is not None:
            self.zero_grad(set_to_none=zero)
        return loss

    def _decide(self) -> StepStats:
        """The decision to take a step or not: the step's one host read, or none; see [Note: sums read late]."""
        self.step_result.wait_for_result(stepping=True)
        return self.step_sync.reduce_stats(late=self._optimizer_step.may_leave_out)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True, *, now: bool = False) -> None:
        """Forget gradients; after a ``step()`` that did nothing, nothing.

        Args:
            set_to_none: False sets to zero the gradients that there are, as in torch: the next step takes their
                parameters along (weight decay, momentum), used or not. It waits for a step that the host is taking.
                The memory of gradients stays either way.
            now: discard the gradients of an unfinished window, too.
        """
        self.engine.require_idle("zero_grad", averaged=True, beside_step=True, needs=NOTHING)
        self.engine.zero_grad(set_to_none=set_to_none, now=now)

    def _zero_by_inner(self, set_to_none: bool) -> bool | None:
        """Do what the wrapped optimizer's ``zero_grad`` is to do; see :func:`zero_grad_by`."""
        if self.engine.closed:
            return None
        if self._steps:  # a class may call it at the end of its step, which runs for a part of the slices at a time
            self._zero_after = set_to_none
            return False
        if self.engine.accumulation.ignores_zero_grad:
            return False
        self.zero_grad(set_to_none=set_to_none)
        return True

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """State of this rank alone: the wrapped optimizer's, its main weights, counters.

        Not collective, and not the whole state: every rank saves its own, in a file of its own, and loads that into the
        ZeroOptimizer. A plain optimizer does not take it: its groups have this rank's slices in place of parameters.
        Rank 0 warns if other ranks do not call it within two seconds.
        """
        refuse_retired(self.engine, "state_dict")
        self.engine.require_idle("state_dict")
        warn_if_alone(self.engine)
        return {
            **self.inner.state_dict(),
            "zeropp": {
                **describe_rank(self.engine),
                "waiting": self.slices.frozen_states(),
                "carried": self.carried.state_dict(),
                "skipped_steps": self.step_result.count_skipped(),
            },
        }

    @uncompiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave on this rank, weights included. Every rank loads its own.

        Raises:
            ValueError: the state is a plain optimizer's, or of another partition.
            RuntimeError: another rank's is; nothing has been loaded then, on any rank.
        """
        self.engine.require_idle("load_state_dict")
        self.engine.agreement.require_same_call("load_state_dict() of the ZeroOptimizer")
        # Saved states have none, and torch counts the parameters of each group.
        with self.slices.without_markers():
            check_state(self.engine, state_dict, self.inner, self.apply_requires_grad)
            saved = state_dict["zeropp"]
            self.engine.wait_for_refresh()
            self.zero_grad(now=True)
            load_main_weights(self.engine, saved)
            load_optimizer(self.inner, {key: value for key, value in state_dict.items() if key != "zeropp"})
        self.slices.keep_frozen_states(saved["waiting"])
        load_carried(self.engine, self.carried, saved.get("carried"))
        self.step_result.load(saved["skipped_steps"], saved.get("loss_scale"))

    # Memory between phases of training; see [Note: states off the device].

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload_states(
        self,
        include: Iterable[str | Enum] | None = None,
        device: str | Enum | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Give this rank's device memory back between phases, until :meth:`reload_states`. Collective, between passes.

        What is there goes to the host's memory, and comes back bit for bit: also gradients of an unfinished window, and
        what a step under way is about to write, which is waited for. Again, for further names, adds those. What
        ``offload_optimizer`` or ``offload_param`` keeps elsewhere stays there. A use that needs what is away raises,
        and says what to call; ``state_dict()`` of the model, ``full_state``, exports and reading in
        ``GatheredParameters`` go on from the host. Views of slices, gradients and states that you have made yourself
        must not be used meanwhile.

        Args:
            include: names, or members of an enum with such values, as DeepSpeed's ``OffloadStateTypeEnum``; None for
                all. "optim_states"; "hp_params", main weights where something else of them is there to compute with;
                "lp_params", what passes begin with: weights that are cached between uses, shards where none are;
                "lp_grads", the gradients' memory; "carried_errors" of quantized gradients. "contiguous_grad_buffer"
                lives within a backward here, and is nothing.
            device: where to; only the host's memory, "cpu".
            pin_memory: into page-locked memory, where the device is a GPU.
            non_blocking: return while the device still copies; what it is given later waits.

        Raises:
            ValueError, TypeError: another name or device.
            RuntimeError: a pass is running, ranks are at different calls, there is no room on some rank; or gradients
                have come that are not part of any sum yet, as after a backward that failed.
        """
        kinds = chosen_kinds(include, device)
        offload_states(self.engine, self.inner, self.slices, kinds, pin_memory=pin_memory, non_blocking=non_blocking)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything back that :meth:`offload_states` has sent away; nothing if nothing is. Collective.

        Args:
            non_blocking: return while the device still copies; what it is given later waits.

        Raises:
            RuntimeError: there is no room on some rank; call it again when there is.
        """
        reload_states(self.engine, non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Release weights that stay gathered between passes, for the next one. Collective; the next gathers them."""
        self.engine.require_idle("empty_partition_cache", needs=NOTHING)
        self.engine.agreement.require_same_call("empty_partition_cache()")
        self.engine.release_prefetched()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            "a ZeroOptimizer cannot be pickled or deep-copied: it belongs to one model on one rank. Save "
            "optimizer.state_dict(), one for each rank, and zeropp.full_state(model)"
        )

    def close(self) -> None:
        """Take the engine off the model: hooks, streams and process groups. Values are lost with the optimizer."""
        if not self.engine.closed and self.engine.agreement.lost is None:
            # Slices and states may be read afterwards. What a step fails with now is nobody's any more.
            with contextlib.suppress(RuntimeError):
                self.engine.wait_for_step()
        self.engine.close()

    # What the engine tells; see `zeropp.engine.accumulation.Listener`.

    def forward_begins(self) -> None:
        """Weights may have been edited through the groups."""
        self.step_sync.note_missed(take_weight_edits(self.engine, self.slices))

    def weights_wanted(self) -> None:
        """Main weights are about to be read, or to be loaded."""
        # What is off the device cannot have been edited since.
        there = self.engine.parking.kinds.isdisjoint(("hp_params", "lp_params"))
        if there and self.slices.take_replaced():
            self.engine.note_storages()

    def graph_begins(self) -> None:
        """Other parameters may be trained from here on."""
        self.apply_requires_grad()
        if self._trainability.complex:
            self._trainability.refuse_complex()

    @torch.no_grad()
    def backward_begins(self) -> None:
        """Gradients may have been edited since the last one."""
        refuse_retired(self.engine, "backward")
        self.slices.refuse_accumulated()
        window = self.engine.accumulation
        self._read_between = window.count > 0 and (self._read_between or self._groups_read)
        self.engine.loss_scale.backward_begins(window.steps, first=window.count == 0)
        if self.slices.take_edits(self.engine.pending):  # all were removed, as torch's own zero_grad does
            self._forget_removed()
        self.step_sync.take_early_edits()
        self.carried.follow(self.grad_scaler)

    @torch.no_grad()
    def backward_ended(self) -> None:
        """Show gradients in the groups."""
        self.slices.refuse_accumulated()
        self.step_sync.invalidate()
        self.step_result.step_was_taken = self._groups_read = False
        self._all_shown = not (self.engine.holds_gradients or self.engine.accumulation.unfinished)
        # Nothing was reduced, so the shards have nothing new to show.
        if self.engine.holds_gradients:
            return
        shown = self.slices.show_arrived(self.engine.pending)
        # Whether all is finite is asked where a step may follow: GradScaler.step() is refused elsewhere.
        if self._all_shown:
            self.step_sync.spread_overflow(shown.gradient, shown.source)

    def _forget_removed(self) -> None:
        """Begin anew without gradients of earlier backwards, which the user has set to None.

        A rank cannot see that one was left which it has no slice of, so flags stay, and the window goes on.
        """
        self.slices.show_markers(False)  # or the next backward would take it for a removal of its own
        kept = {part.source for part in self.slices.stepped if part.shown and part.source is not None}
        self.engine.pending.forget_removed(kept)
        self.step_sync.forget_early_edits()
        if self.engine.accumulation.count:
            self.carried.clear()

    @torch.no_grad()
    def gradients_wanted(self) -> None:
        """Take over gradients that the user has set, which become zeros, too, or set to None, which stay None."""
        self.slices.take_edits(self.engine.pending)

    def gradient_forgotten(self, parameter: nn.Parameter) -> None:
        """Show the optimizer no gradient of it, even if the user has set one in the groups."""
        self.slices.drop_gradient(parameter)

    def gradients_forgotten(self) -> None:
        """A new window begins, with nothing to show."""
        self.step_sync.invalidate()
        self.step_sync.forget_early_edits()
        if self.engine.accumulation.count:
            self.carried.clear()  # no step has taken what went with these gradients
        self.engine.accumulation.restart()
        self._all_shown = True
        self.engine.loss_scale.drop_losses()
        self.slices.show_zeros(self.engine.pending)

    @torch.no_grad()
    def apply_requires_grad(self) -> None:
        """Take over which parameters are trained, as the next forward would. Collective where that has changed."""
        # In the steady state no message. A rank that alone has changed something meets ranks at something else, and all
        # are told.
        if not self.engine.requires_grad_changed:
            return
        if self._trainability.apply():
            self.slices.assign()
            self.step_sync.invalidate()
        self.slices.show_trained()


@torch.no_grad()
def take_weight_edits(engine: Engine, slices: ShardedParams) -> list[str]:
    """Let a forward that begins compute with weights that the user has edited in the groups since the last one.

    Nothing travels where nothing was edited. See [Note: edits of slices].

    Returns:
        Names of parameters; some were edited in a way that other ranks may not know of, and the forward misses that.
    """
    if slices.take_replaced():
        engine.note_storages()
    edited = [buffer for buffer in slices.buffers if buffer.edited]
    by_groups = slices.edited_by_groups()
    if engine.refresh_is_delayed:
        # What is put off begins now, with weights as they are.
        known = True
    elif by_groups or (edited and not slices.divided):
        engine.agreement.require_same_call("a forward after an edit of weights in optimizer.param_groups")
        engine.weights_changed(engine.trainable_buffers)
        known = True
    else:
        known = False
    if by_groups:
        slices.accept_edits()
    for buffer in edited:
        buffer.accept_edits()
    return [] if known else [name for buffer in edited if _keeps_old_weights(engine, buffer) for name in buffer.names]


def _keeps_old_weights(engine: Engine, buffer: FlatBuffer) -> bool:
    """Tell whether the next forward computes with a copy of the weights, and gathers no new ones."""
    source = buffer.wire_copy
    kept = buffer.paths.refresh is not None or (source is not None and source.follows)
    return kept or engine.unit_of[id(buffer.parameters[0])].state is not UnitState.SHARDED
