"""``ZeroOptimizer``: a torch optimizer for a model whose weights, gradients and optimizer states are sharded."""

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
    load_error_feedback,
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
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.unit import UnitState
from zeropp.plan.memory import plan_space
from zeropp.setup.build import build_engine

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(Optimizer):
    """Shards a model in place, and steps this rank's part of it with the wrapped optimizer.

    The user's parameter groups stay the same objects, so schedulers and edits of ``lr`` reach the wrapped optimizer.
    Their ``params`` become this rank's slices: 1-D leaves in the main dtype, float32 by default.

    If the host does not wait for a step, reading one of the first four attributes waits for it.

    Attributes:
        grad_norm: gradient norm over the whole model at the last step, after averaging, before configured clipping.
        skipped_steps: number of steps skipped because a gradient was not finite.
        step_was_skipped: True if the last step was skipped.
        step_was_taken: True if a step has changed weights since the last backward; a scheduler should advance only
            then.
        grad_scaler: torch's GradScaler of the losses, None by default. Set it if error feedback (``zeropp_loco_param``)
            is used, so that the errors follow its scale. Without it, the errors are wrong for one step after each
            change of the scale.
    """

    grad_norm: float | None = from_step_result("grad_norm")
    skipped_steps: int = from_step_result("skipped_steps")
    step_was_skipped: bool = from_step_result("step_was_skipped")
    step_was_taken: bool = from_step_result("step_was_taken")

    accumulation_type = GradAccumulation
    # See [Note: GradScaler]. grad_scale and found_inf exist only while GradScaler.step() runs.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    _steps = False  # True while the wrapped optimizer's step runs
    # Checks for torch's GradScaler. _all_shown: the groups show all gradients, with NaN if any rank's are not finite.
    # _groups_read: the groups were read since the last backward. _read_between: the groups were read before the last
    # backward of this window. A read is the only visible sign of ``unscale_()``.
    _all_shown = True
    _groups_read = _read_between = False
    _zero_after: bool | None = None  # set_to_none of a zero_grad() that the wrapped optimizer called inside its step

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
        """Wrap ``optimizer`` and ``model``. Collective: every rank of the group must call it.

        Args:
            optimizer: elementwise torch optimizer over parameters of ``model``. Its states are cut into slices, too.
            model: model to shard in place; all ranks get rank 0's values.
            config: DeepSpeed-style dict, path of a JSON file, or a loaded Config; None for stage 3 with defaults.
            process_group: ranks to shard over: a process group, a one-dimensional DeviceMesh, or None for all ranks.
            gradient_scale: factor on gradients summed over ranks; None for the configured mean or sum.
            device: device to train on; None for the model's. See docs/multinode.md, "A model larger than a GPU".

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
        self.error_feedback = ErrorFeedback(self.engine, loco.reset_T if loco is not None else None)
        # The hook dicts are shared with the wrapped optimizer, but the hooks run here, once per step.
        for call, when in product(("step", "state_dict", "load_state_dict"), ("pre", "post")):
            name = f"_optimizer_{call}_{when}_hooks"
            setattr(self, name, getattr(optimizer, name))
        self._patch_step_function()  # not by Optimizer.__init__, which would create groups and states
        optimizer.step = refuse_inner_step  # type: ignore[assignment, method-assign]
        optimizer.add_param_group = refuse_inner_group  # type: ignore[method-assign]
        optimizer.zero_grad = zero_grad_by(optimizer, weakly(self._zero_by_inner))  # type: ignore[method-assign]
        self.step_result = StepResult(self.step_sync, self.engine.loss_scale)
        self._norms = GradientNorms()
        self.grad_scaler: torch.amp.GradScaler | None = None

    # Losses and backward.

    @property
    def loss_scale(self) -> float:
        """Factor on the next loss in float16; 1.0 in other dtypes. See [Note: loss scale]."""
        # Wait for the last step first: on a GPU its sum may be unread, and its result changes the loss scale.
        self.step_result.wait_for_result()
        return self.engine.loss_scale.value

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped: ``step_was_skipped`` by the name that DeepSpeed and Accelerate use."""
        return self.step_was_skipped

    @uncompiled
    def scale(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor:
        """Return the loss as :meth:`backward` uses it: divided by the window length, and multiplied by the loss scale.

        Args:
            loss: scalar, the complete loss of a micro-batch. Terms that are added later are neither divided nor scaled.
            scale_wrt_gas: True to divide by the configured gradient_accumulation_steps.

        Raises:
            TypeError: ``loss`` is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}; expected the scalar tensor that the model's output gave")
        # Divide by the full length also in a window that step(now=True) ends early.
        steps = self.engine.accumulation.steps
        return self.engine.loss_scale.apply(loss / steps if scale_wrt_gas and steps > 1 else loss)

    @uncompiled
    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """Run the backward of ``loss``, divided by the configured gradient_accumulation_steps.

        Args:
            loss: scalar, the complete loss of a micro-batch.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: False for a loss that has been divided already.
        """
        refuse_compiled_autograd()
        # Scale the loss outside the try block, because an error in scale() is not an error of the backward.
        scaled = self.scale(loss, scale_wrt_gas=scale_wrt_gas)
        self.engine.accumulation.divided |= scale_wrt_gas
        try:
            scaled.backward(retain_graph=retain_graph)
        except Exception as error:
            reason = ""
            # Autograd raises this error if a view of a weight was kept after its unit was resharded.
            if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
                reason = explain_freed(self.engine, str(error))
            # Report the failure now, so that other ranks get an error instead of waiting for this rank.
            self.engine.notice_failed_backward(known=True)
            if reason:
                raise RuntimeError(reason) from error
            raise

    # The interface of torch.optim.Optimizer.

    @property
    @uncompiled
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer, with this rank's slices as ``params``."""
        # The caller may edit gradients through ``.data``, which raises no version, so count their norms as outdated.
        self.step_sync.mark_stale()
        self._groups_read = True
        return self.inner.param_groups

    @property
    @uncompiled
    def state(self) -> Any:
        """State of the wrapped optimizer, by slice. Reading it waits for a step that runs on the host."""
        self.engine.wait_for_step()
        self.engine.parking.require("optimizer.state", ["optim_states"])
        return self.inner.state

    @state.setter
    @uncompiled
    def state(self, value: Any) -> None:
        """Replace the states of this rank's slices; ``optimizer.state = defaultdict(dict)`` removes all."""
        others = dict(value)
        states = self.state
        states.clear()
        states.update(others)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped optimizer. ``train`` and ``eval`` also handle changed weights."""
        inner = self.__dict__.get("inner")
        if name == "optimizer" and inner is not None:
            return inner  # DeepSpeed's optimizers have the wrapped one as ``optimizer``
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(switch_mode, self.engine, inner, name) if name in ("train", "eval") else getattr(inner, name)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, as in torch. Collective: every rank must add the same group.

        Args:
            param_group: dict with ``params``, which must be in no group yet, and optional settings. Frozen parameters
                in it are stepped after ``requires_grad_`` has been called on them.

        Raises:
            TypeError, ValueError: the group cannot be used; other ranks raise RuntimeError.
        """
        self.engine.require_idle("add_param_group")
        add_group(param_group, self.engine, self.inner, self.slices, self.apply_requires_grad)
        self.step_sync.invalidate()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backwards in this context on the rank, unreduced, in the main dtype.

        The next backward outside the context, or ``step``, reduces them. The memory cost is one full gradient. With
        torch's GradScaler, the last backward must be outside, because GradScaler unscales only reduced gradients.
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
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``. Collective.

        Args:
            max_norm: upper bound of the norm.
            now: True to clip the gradients of an unfinished window, before ``step(now=True)``. Otherwise the call does
                nothing in such a window.

        Returns:
            Norm before clipping, a scalar on the model's device. If the call does nothing: norm at the last step, or 0.
        """
        self.engine.require_idle("clip_grad_norm_")
        if self.engine.accumulation.unfinished and not now:
            return torch.tensor(self.grad_norm or 0.0, dtype=torch.float64, device=self.engine.device)
        self.slices.take_edits(self.engine.pending)
        self.step_sync.invalidate()  # the user may have edited gradients since the last result
        stats = self._decide()  # also reduces gradients held by no_sync()
        norm = self.step_sync.norm_tensor()
        if not self.step_sync.must_skip:
            self.step_sync.accept_scaling(scale_gradients(self.engine, norm, max_norm))
        self._show_sent(stats)
        return norm

    @torch.no_grad()
    @uncompiled
    def grad_norms(self) -> dict[str, float]:
        """Return the gradient norm of each parameter that has a gradient, by name, after averaging; for logging.

        Collective: every rank must call it, between backward and ``zero_grad()``. All ranks sum a vector with 8 bytes
        per parameter, and the host waits for it. In an unfinished window, the previous result is returned.
        """
        self.engine.require_idle("grad_norms")
        if not self.engine.accumulation.unfinished:
            self.step_result.wait_for_result()  # read the last step's result before its sum is overwritten
            self.slices.take_edits(self.engine.pending)
            stats = self.step_sync.keep_stats()
            self._norms = gradient_norms(self.engine, stats)
            self._show_sent(stats)
        return GradientNorms(self._norms)

    def _show_sent(self, stats: StepStats) -> None:
        """Show gradients that the step sync had to reduce first, such as held ones, so that the user can edit them."""
        if stats.sent:
            self.slices.show_arrived(self.engine.pending)

    @uncompiled
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, now: bool = False
    ) -> Tensor | None:
        """Take an optimizer step. All ranks skip the step if a gradient of any rank is not finite.

        With ``managed_gradient_accumulation`` true (the default), a call acts if at least
        ``gradient_accumulation_steps`` micro-batches have run since the last step, or with ``now=True``. Otherwise it
        only runs the closure. With false, every call acts. A micro-batch is all backwards since the last forward of the
        model with gradients enabled. Step hooks run only around calls that act.

        Args:
            closure: function that computes the loss and runs its backward; called once. It runs before step hooks if
                the window has several micro-batches.
            now: True to step in an unfinished window, with losses divided as in a full one. Without a backward, nothing
                is done.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            RuntimeError: ranks disagree about collectives or settings, or a parameter was unused and
                ignore_unused_parameters is false.
        """
        if "found_inf" not in self.__dict__:
            return self._step(closure, now=now)
        try:
            return self._step_for_scaler(closure, now=now)
        except BaseException:
            # GradScaler deletes its attributes only after a step that returns.
            del self.grad_scale, self.found_inf
            raise

    step.hooked = True  # type: ignore[attr-defined]  # torch would let hooks run around steps that are not taken

    def _step_for_scaler(self, closure: Callable[[], Tensor] | None, *, now: bool) -> Tensor | None:
        """Take a step that torch's GradScaler calls; see [Note: GradScaler]."""
        if not self._all_shown:
            raise refusal_of_scaler(self.engine.accumulation)
        if self.grad_scale is None and self._read_between:
            raise refusal_of_early_unscale()
        # GradScaler leaves this check to optimizers that unscale gradients themselves.
        if float(self.found_inf):
            return None
        if self.grad_scale is not None:
            unscale(self.inner, self.grad_scale)
            self.step_sync.mark_stale()
        return self._step(closure, now=now)

    def _step(self, closure: Callable[[], Tensor] | None, *, now: bool) -> Tensor | None:
        window = self.engine.accumulation
        loss = None
        if closure is not None and not window.every_step_acts:  # run it before hooks: it decides if the call acts
            loss = torch.enable_grad()(closure)()
            closure = None
        self.engine.require_idle("step", beside_step=True, trains=True)
        taken = window.note_step_call(now=now)
        warning = None if now else window.warning()
        if warning is not None and self.engine.comm.rank == 0:  # all ranks have the same warning
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
        # Main weights are about to change, so wait for a step that writes them and for refreshes that read them.
        self.engine.wait_for_refresh()
        self.engine.loss_scale.drop_losses()
        self.slices.refuse_accumulated()
        # Copy weights that were set by ``.data`` since the last forward into the main shards.
        self.weights_wanted()
        if rest := self.slices.take_rest():
            self.step_sync.missed += rest
            self.engine.note_storages()
        self.slices.take_edits(self.engine.pending)
        self.step_sync.recheck()
        stats = self._decide()
        norm = self.step_sync.norm_tensor()
        # If the host has not read the sum, the device skips the step if a gradient is not finite.
        skip_flag = self.step_sync.skip_flag() if stats.late else None
        self.step_sync.invalidate()  # a further step must sum again, with all ranks
        self.step_sync.forget_early_edits()
        # Restart the window before decided(), which may raise, so that the caller can continue with a new window.
        if stats.skips:
            self.error_feedback.clear()
            self.engine.accumulation.restart()
        self.step_result.decided(stats)
        if stats.skips:
            return loss
        if not self.config.zero_optimization.ignore_unused_parameters:
            refuse_unused(self.engine, stats)
        self.slices.show_used(stats.used)
        self._steps = True
        try:
            self._optimizer_step.run_step(norm, skip_flag)
        except BaseException:
            self._zero_after = None  # a later step must not clear gradients because of this one
            raise
        finally:
            self._steps = False
        self.slices.accept_edits()
        # Gradients stay until zero_grad(), and norms over the groups stay refused until then.
        self.slices.show_markers(True)
        self.error_feedback.count_step()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers made before wrapping look for it
        self.engine.accumulation.restart()
        # Without any gradient, no weight has changed, as after batches that were all discarded.
        self.step_result.step_was_taken = any(map(any, stats.used))
        zero = self._zero_after
        self._zero_after = None
        if zero is not None:
            self.zero_grad(set_to_none=zero)
        return loss

    def _decide(self) -> StepStats:
        """Return the step sync's result. The host reads one sum per step, or none; see [Note: sums read late]."""
        self.step_result.wait_for_result(stepping=True)
        return self.step_sync.reduce_stats(late=self._optimizer_step.can_skip_on_device)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True, *, now: bool = False) -> None:
        """Clear gradients. After a ``step()`` that did nothing, this call does nothing, too.

        Args:
            set_to_none: False sets existing gradients to zero, as in torch. The next step then updates their parameters
                (weight decay, momentum) even if they are unused. False waits for a step on the host. True frees the
                memory of gradient shards on the device until the next reduction, unless the host steps some of the
                weights. Tensors that you have taken from ``.grad`` keep their memory.
            now: True to discard also the gradients of an unfinished window.
        """
        self.engine.require_idle("zero_grad", averaged=True, beside_step=True, needs=NOTHING)
        self.engine.zero_grad(set_to_none=set_to_none, now=now)

    def _zero_by_inner(self, set_to_none: bool) -> bool | None:
        """Run ``zero_grad`` for the wrapped optimizer's own method; the result is as :func:`zero_grad_by` expects."""
        if self.engine.closed:
            return None
        if self._steps:  # the class calls it inside its step, which may run once per chunk, so defer it to the end
            self._zero_after = set_to_none
            return False
        if self.engine.accumulation.ignores_zero_grad:
            return False
        self.zero_grad(set_to_none=set_to_none)
        return True

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state: states of the wrapped optimizer, main weights, and counters.

        The call is not collective, and the result is not the whole state. Every rank saves its own part in its own
        file, and loads it into a ZeroOptimizer. A plain optimizer cannot load it, because its groups hold slices. Rank
        0 warns if other ranks do not call it within two seconds.
        """
        refuse_retired(self.engine, "state_dict")
        self.engine.require_idle("state_dict")
        warn_if_alone(self.engine)
        return {
            **self.inner.state_dict(),
            "zeropp": {
                **describe_rank(self.engine),
                "waiting": self.slices.frozen_states(),
                "carried": self.error_feedback.state_dict(),
                "skipped_steps": self.step_result.count_skipped(),
            },
        }

    @uncompiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's part of a state, weights included. Collective: every rank loads its own part.

        Args:
            state_dict: the result of :meth:`state_dict` on this rank.

        Raises:
            ValueError: the state is from a plain optimizer, or has another layout.
            RuntimeError: another rank's state does not fit; nothing was loaded on any rank.
        """
        self.engine.require_idle("load_state_dict")
        self.engine.agreement.require_same_call("load_state_dict() of the ZeroOptimizer")
        # Saved states have no markers, and torch compares the number of parameters in each group.
        with self.slices.without_markers():
            check_state(self.engine, state_dict, self.inner, self.apply_requires_grad)
            saved = state_dict["zeropp"]
            self.engine.wait_for_refresh()
            self.zero_grad(now=True)
            load_main_weights(self.engine, saved)
            load_optimizer(self.inner, {key: value for key, value in state_dict.items() if key != "zeropp"})
        self.slices.keep_frozen_states(saved["waiting"])
        load_error_feedback(self.engine, self.error_feedback, saved.get("carried"))
        self.step_result.load(saved["skipped_steps"], saved.get("loss_scale"))

    # Moving memory to the host between phases of training; see [Note: states off the device].

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload_states(
        self,
        include: Iterable[str | Enum] | None = None,
        device: str | Enum | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move device memory to the host between phases, until :meth:`reload_states`. Collective, between passes.

        Values come back bit for bit, also gradients of an unfinished window. A step in flight is waited for. Further
        calls may add kinds. Memory that ``offload_optimizer`` or ``offload_param`` keeps off the device stays where it
        is. Operations that need moved memory raise and name the remedy. The model's ``state_dict()``, ``full_state``,
        exports and reads in ``GatheredParameters`` work from the host. Do not use your own views of slices, gradients
        or states meanwhile.

        Args:
            include: kinds of memory, as strings or enum members with these values, such as DeepSpeed's
                ``OffloadStateTypeEnum``; None for all. "optim_states": optimizer states. "hp_params": main weights, if
                passes do not gather from them. "lp_params": weights that passes gather from (cached weights, or main
                shards if nothing is cached). "lp_grads": gradients. "carried_errors": error feedback.
                "contiguous_grad_buffer": nothing.
            device: target device; only "cpu".
            pin_memory: True to use page-locked host memory if the device is a GPU.
            non_blocking: True to return while the device still copies; work queued on the device later waits for the
                copies.

        Raises:
            ValueError, TypeError: an unknown kind or device.
            RuntimeError: a pass is running, ranks make different calls, some rank has no room, or some gradients are
                not reduced, as after a failed backward.
        """
        kinds = chosen_kinds(include, device)
        offload_states(self.engine, self.inner, self.slices, kinds, pin_memory=pin_memory, non_blocking=non_blocking)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reload_states(self, non_blocking: bool = False) -> None:
        """Move all memory back that :meth:`offload_states` has moved; do nothing if there is none. Collective.

        Args:
            non_blocking: True to return while the device still copies; work queued on the device later waits for the
                copies.

        Raises:
            RuntimeError: some rank has no room; call it again when there is.
        """
        reload_states(self.engine, non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Reshard units that stayed gathered for the next pass, which gathers them again. Collective."""
        self.engine.require_idle("empty_partition_cache", needs=NOTHING)
        self.engine.agreement.require_same_call("empty_partition_cache()")
        self.engine.release_prefetched()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            "a ZeroOptimizer cannot be pickled or deep-copied: it belongs to one model on one rank. Save "
            "optimizer.state_dict(), one for each rank, and zeropp.full_state(model)"
        )

    def close(self) -> None:
        """Remove hooks, streams and process groups. The model stays sharded; the slices keep its main weights."""
        if not self.engine.closed and self.engine.agreement.lost is None:
            # Users may read slices and states afterwards, so finish the step. Its errors no longer concern anyone.
            with contextlib.suppress(RuntimeError):
                self.engine.wait_for_step()
        self.engine.close()

    # Methods that the engine calls; see `zeropp.engine.accumulation.Listener`.

    def forward_begins(self) -> None:
        """Apply weight edits that users made through the groups. Called when a forward begins."""
        self.step_sync.note_missed(take_weight_edits(self.engine, self.slices))

    def weights_wanted(self) -> None:
        """Copy weights that users set by ``.data`` into main shards. Called before main weights are read or loaded."""
        # Weights that are moved off the device cannot have been edited.
        there = self.engine.parking.kinds.isdisjoint(("hp_params", "lp_params"))
        if there and self.slices.take_replaced():
            self.engine.note_storages()

    def graph_begins(self) -> None:
        """Apply changes of ``requires_grad``. Called when a forward with gradients begins."""
        self.apply_requires_grad()
        if self._trainability.complex:
            self._trainability.refuse_complex()

    @torch.no_grad()
    def backward_begins(self) -> None:
        """Take gradient edits that users made since the last backward. Called when a backward begins."""
        refuse_retired(self.engine, "backward")
        self.slices.refuse_accumulated()
        window = self.engine.accumulation
        self._read_between = window.count > 0 and (self._read_between or self._groups_read)
        self.engine.loss_scale.backward_begins(window.steps, first=window.count == 0)
        if self.slices.take_edits(self.engine.pending):  # all gradients were set to None, as by torch's zero_grad
            self._forget_removed()
        self.step_sync.take_early_edits()
        self.error_feedback.follow(self.grad_scaler)

    @torch.no_grad()
    def backward_ended(self) -> None:
        """Show the reduced gradients in the groups. Called when a backward has ended."""
        self.slices.refuse_accumulated()
        self.step_sync.invalidate()
        self.step_result.step_was_taken = self._groups_read = False
        self._all_shown = not (self.engine.holds_gradients or self.engine.accumulation.unfinished)
        # If gradients are held, nothing was reduced, so the shards have no new gradients to show.
        if self.engine.holds_gradients:
            return
        shown = self.slices.show_arrived(self.engine.pending)
        # Check for non-finite gradients only if a step may follow, because GradScaler.step() is refused otherwise.
        if self._all_shown:
            self.step_sync.share_overflow(shown.gradient, shown.source)

    def _forget_removed(self) -> None:
        """Discard gradients of earlier backwards, after the user has set all of them to None.

        This rank cannot see if the user kept a gradient of which it has no slice. So the used mask stays, and the
        window continues.
        """
        self.slices.show_markers(False)  # so that the next backward does not count this removal again
        kept = {part.source for part in self.slices.stepped if part.shown and part.source is not None}
        self.engine.pending.forget_removed(kept)
        self.step_sync.forget_early_edits()
        if self.engine.accumulation.count:
            self.error_feedback.clear()

    @torch.no_grad()
    def gradients_wanted(self) -> None:
        """Take gradients that the user has set or removed. Called before gradients are set to zero."""
        self.slices.take_edits(self.engine.pending)

    def gradient_forgotten(self, parameter: nn.Parameter) -> None:
        """Hide a parameter's gradient, even one that the user has set in the groups. Called when it was set to None."""
        self.slices.drop_gradient(parameter)

    def gradients_forgotten(self) -> None:
        """Begin a new accumulation window without gradients. Called when all gradients were discarded or zeroed."""
        self.step_sync.invalidate()
        self.step_sync.forget_early_edits()
        if self.engine.accumulation.count:
            self.error_feedback.clear()  # the errors belong to gradients that no step has used
        self.engine.accumulation.restart()
        self._all_shown = True
        self.engine.loss_scale.drop_losses()
        self.slices.show_zeros(self.engine.pending)
        self.slices.free_gradients()

    @torch.no_grad()
    def apply_requires_grad(self) -> None:
        """Apply changes of ``requires_grad``, as the next forward would. Collective if there are changes."""
        # Without changes nothing is sent. If only some ranks have changes, ranks issue different collectives, and all
        # raise.
        if not self.engine.requires_grad_changed:
            return
        if self._trainability.apply():
            self.slices.assign()
            self.step_sync.invalidate()
        self.slices.show_trained()


@torch.no_grad()
def take_weight_edits(engine: Engine, slices: ShardedParams) -> list[str]:
    """Start refreshes of weights that the user has edited in the groups, so that the starting forward uses the edits.

    Without edits nothing is sent. See [Note: edits of slices].

    Args:
        engine: engine of the model.
        slices: this rank's slices.

    Returns:
        Names of parameters of which some were edited in a way that other ranks may not see; this forward misses the
        edits.
    """
    if slices.take_replaced():
        engine.note_storages()
    edited = [buffer for buffer in slices.buffers if buffer.edited]
    by_groups = slices.edited_by_groups()
    if engine.refresh_is_delayed:
        # The delayed refresh starts with this forward and sends the current weights, edits included.
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
    """Return True if the next forward reads a copy of the weights without gathering new ones from the main shard."""
    source = buffer.wire_copy
    kept = buffer.paths.refresh is not None or (source is not None and source.follows)
    return kept or engine.unit_of[id(buffer.parameters[0])].state is not UnitState.SHARDED
