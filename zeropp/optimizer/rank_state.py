"""The optimizer's state on one rank: main weights, counts of steps, loss scale, errors that quantized gradients carry.

A fingerprint of the layout tells whether a saved state fits; ranks decide together whether all of theirs do.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp._compat import default_store, loss_scale
from zeropp.comm.agreement import SAVED
from zeropp.comm.timers import within
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import weakly
from zeropp.optimizer.sharded_params import SliceStates
from zeropp.optimizer.step_sync import StepStats, StepSync
from zeropp.params.gradient import LossScale
from zeropp.wire.codecs import Feedback

__all__ = [
    "ErrorFeedback",
    "StepResult",
    "check_state",
    "describe_rank",
    "from_step_result",
    "layout_id",
    "load_carried",
    "load_main_weights",
    "load_optimizer",
    "warn_if_alone",
]


def describe_rank(engine: Engine) -> dict[str, Any]:
    """Entries of a rank's state that are of its engine: main weights, loss scale, rank and layout."""
    return {
        "layout": layout_id(engine),
        "rank": engine.comm.rank,
        "world": engine.comm.world,
        "main_weights": _main_weights(engine),
        "loss_scale": engine.loss_scale.state_dict(),
    }


def _main_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """This rank's piece of each trainable buffer, by unit, compute dtype and number among such."""
    pieces: dict[str, torch.Tensor] = {}
    seen: Counter[str] = Counter()
    for buffer in engine.trainable_buffers:
        name = f"{buffer.unit}/{buffer.compute_dtype}"
        pieces[f"{name}/{seen[name]}"] = buffer.shard.clone()
        seen[name] += 1
    return pieces


def layout_id(engine: Engine) -> str:
    """Fingerprint of this rank's slices; equal exactly when they are the same."""
    # The rank is in it: every slice fits one rank alone.
    digest = hashlib.sha256(f"{engine.mode.chain.levels} {engine.mode.states} {engine.comm.rank}".encode())
    for buffer in engine.buffers:
        dtypes = f"{buffer.main_dtype} {buffer.compute_dtype}"
        digest.update(f"{buffer.unit} {buffer.trainable} {dtypes} {buffer.layout}".encode())
        # The device and the host step slices of their own, and a parameter may be cut between them.
        if buffer.trainable and 0 < buffer.tiers.device_numel < buffer.main.tensor.numel():
            digest.update(f"{buffer.tiers.device_numel}".encode())
    return digest.hexdigest()[:16]


def check_state(
    engine: Engine, state: dict[str, Any], optimizer: Optimizer, apply_requires_grad: Callable[[], None]
) -> None:
    """Let every rank see that all have a state of their own; before any of them changes anything.

    Parameters that are to be unfrozen with the next forward are unfrozen first if that makes the states fit.

    Raises:
        ValueError: this rank's is not of a ZeroOptimizer, or of another layout; the message tells what to do.
        RuntimeError: another rank's is; nothing was loaded.
    """
    # Each question is put to all ranks before the next, which may read what the first one asked for.
    wrong = _misfits(engine, "zeropp" not in state)
    if wrong:
        raise _refusal(
            engine,
            wrong,
            "the state has no 'zeropp' entry: it was not saved by ZeroOptimizer.state_dict on this rank. A plain "
            "optimizer's state cannot be loaded into partitions; start with fresh optimizer states",
        )
    found = state["zeropp"].get("layout")
    wrong = _misfits(engine, found != layout_id(engine))
    # Only if they do not fit as it is: the state may be from before the change.
    if wrong and engine.requires_grad_changed:
        apply_requires_grad()
        wrong = _misfits(engine, found != layout_id(engine))
    if wrong:
        raise _refusal(
            engine,
            wrong,
            f"this state is of another partition: {_where_from(engine, state['zeropp'])}. To move weights alone there "
            "are zeropp.full_state and model.load_state_dict",
        )
    saved, own = (
        [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    wrong = _misfits(engine, saved != own)
    if wrong:
        raise _refusal(
            engine,
            wrong,
            f"this state has parameter groups of {saved} slices, and the optimizer here of {own}; give it the "
            "same groups, in the same order, before loading",
        )


def _misfits(engine: Engine, wrong: bool) -> list[int]:
    """Ranks whose state does not fit."""
    rows = engine.agreement.exchange(SAVED, [int(wrong)], "checking saved states")
    return [rank for rank, row in enumerate(rows) if row[0]]


def _refusal(engine: Engine, wrong: list[int], message: str) -> Exception:
    if engine.comm.rank in wrong:
        return ValueError(message)
    return RuntimeError(f"the states given to ranks {wrong} do not fit; nothing was loaded on any rank")


def _where_from(engine: Engine, saved: dict[str, Any]) -> str:
    """The reason why a state does not fit, as far as it tells."""
    rank = saved.get("rank")
    world = saved.get("world")
    here = engine.comm
    if world not in (None, here.world):
        return f"it was saved by rank {rank} of {world}, and there are {here.world} ranks now; start as many"
    if rank not in (None, here.rank):
        return (
            f"it was saved by rank {rank} of {world}; this is rank {here.rank}: each rank saves its own state, in a "
            "file of its own, and loads that"
        )
    return (
        f"layout {saved.get('layout')}, here {layout_id(engine)}. It was saved with another model, placement, "
        "precision or unit settings, or after other parameters were unfrozen or in another order; load it under the "
        "same ones"
    )


def load_main_weights(engine: Engine, saved: dict[str, Any]) -> None:
    """Put saved pieces back."""
    with torch.no_grad():
        # Names of this moment, in the order of the buffers; the layout has been compared.
        for name, buffer in zip(_main_weights(engine), engine.trainable_buffers, strict=True):
            buffer.shard.copy_(saved["main_weights"][name])
    # Not stepped: differences to what is cached could be large, so it is renewed whole.
    engine.weights_changed(engine.trainable_buffers)


def load_carried(engine: Engine, carried: ErrorFeedback, saved: dict[str, Any] | None) -> None:
    """Restore carried errors; where some rank's do not fit, all ranks begin anew, with a warning. That costs little."""
    steps = saved["steps"] if saved is not None else 0
    # With the steps since they were cleared: ranks that clear at different steps would part.
    rows = engine.agreement.exchange(SAVED, [int(carried.fits(saved)), steps], "checking carried errors")
    if all(row == [1, rows[0][1]] for row in rows):
        carried.load_state_dict(saved)
        return
    wrong = [rank for rank, row in enumerate(rows) if row[0] == 0]
    cause = f"of ranks {wrong} do not fit this configuration, or were not saved" if wrong else "differ in age"
    warn_user(f"carried errors of quantized gradients {cause}; they begin anew")
    carried.clear()


# A call of state_dict() on some ranks alone.

_PATIENCE = 2.0  # seconds that rank 0 gives the others to call state_dict(), too
_TOLD = -2
_calls: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # so far, or _TOLD


def warn_if_alone(engine: Engine) -> None:
    """Warn on rank 0 if other ranks do not call ``state_dict()`` of their optimizer as well.

    A script that saves it behind ``if rank == 0`` loses the states of all other ranks, and would learn of it when it
    resumes. The ranks count calls in the job's store, so only rank 0 waits, and no longer than ``_PATIENCE``.
    """
    comm = engine.comm
    call = _calls.get(engine, 0) + 1
    if comm.world == 1 or comm.backend == "fake" or call == _TOLD + 1:
        return
    _calls[engine] = call
    came = comm.world
    until = time.monotonic() + _PATIENCE

    def count(own: int) -> int:
        add = partial(default_store().add, f"{comm.job}/state_dict/{call}", own)
        return within(_PATIENCE, add, "counting calls of state_dict()")

    # The process that keeps the store may be gone.
    with contextlib.suppress(RuntimeError, TimeoutError):
        came = count(1)
        while comm.rank == 0 and came < comm.world and time.monotonic() < until:
            time.sleep(0.02)
            came = count(0)
    if comm.rank == 0 and came < comm.world:
        _calls[engine] = _TOLD  # a script that only looks at its states need not wait again
        warn_user(
            f"optimizer.state_dict() was called on {came} of {comm.world} ranks, rank 0 among them. It has one rank's "
            "part of the states alone, and a run cannot go on from it: call it on every rank, and save each rank's in "
            "a file of its own, or call zeropp.checkpoint.save(path, model, optimizer) on every rank"
        )


# Carried errors.


class ErrorFeedback:
    """Errors that quantized gradients carry over, of all units: cleared every so many steps, saved and restored.

    An error goes with the next gradient, and a new one takes its place in the same memory. Where a step is skipped, or
    gradients are forgotten before a step, the old one is lost, and the new one is of a gradient that may be huge: one
    rank has NaN, another perhaps 1e8. So all are cleared then. To keep the old ones would take as much memory again.

    Args:
        engine: whose gradients carry them.
        reset: steps after which all of them are cleared, at once.
    """

    def __init__(self, engine: Engine, reset: int) -> None:
        self._engine = engine
        self._reset = reset
        # Since they were cleared.
        self._steps = 0
        # Scale of the losses that the errors came from; None if nobody scaled them.
        self._scale: Tensor | None = None

    def follow(self, scaler: torch.amp.GradScaler | None) -> None:
        """Bring the errors to the scale that the next losses have; exact where that changes by powers of two."""
        if scaler is None:
            # They are of losses that somebody scaled, and by how much the next ones are is not known.
            if self._scale is not None:
                self._scale = None
                self.clear()
            return
        scale = loss_scale(scaler, self._engine.device)
        before = self._scale
        # A copy: update() changes the scaler's own tensor in place.
        self._scale = scale.clone()
        found = [feedback.scales for feedback in self._named().values()]
        if before is not None and found:
            # Errors are codes with scales, so the scales alone follow; on the device, and the host does not wait.
            torch._foreach_mul_(found, (scale / before).to(torch.bfloat16))

    def _named(self) -> dict[str, Feedback]:
        found: dict[str, Feedback] = {}
        seen: Counter[str] = Counter()
        for buffer in self._engine.trainable_buffers:
            name = f"{buffer.unit}/{buffer.compute_dtype}"
            for hop in buffer.gradient.paths.straight.hops if buffer.gradient is not None else ():
                # Named with the codec: errors of another one are not what this one would lose.
                if hop.feedback is not None:
                    found[f"{name}/{seen[name]}/{hop.spec.outer} {hop.codec.name}"] = hop.feedback
            seen[name] += 1
        return found

    def count_step(self) -> None:
        """An optimizer step was taken; skipped ones do not count."""
        self._steps += 1
        if self._steps >= self._reset:
            self.clear()

    def clear(self) -> None:
        """Begin anew with the next gradients."""
        self._steps = 0
        for feedback in self._named().values():
            # A flag, and no zeros: what is fresh is written, and not read.
            feedback.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Steps since they were cleared, and the errors of this rank."""
        errors = {name: each.saved() for name, each in self._named().items()}
        return {"steps": self._steps, "errors": errors, "scale": None if self._scale is None else float(self._scale)}

    def fits(self, saved: dict[str, Any] | None) -> bool:
        """Tell whether saved errors are of the same units, hops, codecs and sizes; none fit if nothing is carried."""
        errors: dict[str, Tensor] = saved["errors"] if saved is not None else {}
        here = {name: feedback.state.numel() for name, feedback in self._named().items()}
        return {name: each.numel() for name, each in errors.items()} == here

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Take back saved errors that fit."""
        self.clear()
        if saved is None:
            return
        self._steps = saved["steps"]
        scale = saved.get("scale")
        self._scale = None if scale is None else torch.tensor(scale, device=self._engine.device)
        for name, feedback in self._named().items():
            feedback.state.copy_(saved["errors"][name])
            feedback.fresh = False


class StepResult:
    """The result of the last step: taken, skipped, or not known yet; and counts. See [Note: sums read late].

    Args:
        step_sync: has the sum of a step that no host has waited for.
        loss_scale: follows the results of steps.

    Attributes:
        grad_norm: at the last step.
        skipped_steps: since the beginning.
        step_was_skipped: the last one.
        step_was_taken: since the last backward.
    """

    def __init__(self, step_sync: StepSync, loss_scale: LossScale) -> None:
        self._step_sync = step_sync
        self._loss_scale = loss_scale
        # The engine has the scale, and must not keep its wrapper alive.
        loss_scale.wait_for_last = weakly(self.wait_for_result)
        self._unread = False
        # Text of an error that the next step raises, too. No exception: it would hold what holds this.
        self._error: str | None = None
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_was_skipped = self.step_was_taken = False

    def decided(self, stats: StepStats) -> None:
        """A step is over, or is going to be."""
        self._unread = stats.norm is None
        self.step_was_skipped = stats.skips
        self.step_was_taken = False
        self.skipped_steps += self.step_was_skipped
        if not self._unread:
            self.grad_norm = stats.norm
            # Last, since it may raise.
            self._loss_scale.update(overflow=self.step_was_skipped)

    def load(self, skipped_steps: int, loss_scale: dict[str, Any] | None = None) -> None:
        """Go on from a saved count; what is wrong with the step before is of no interest any more."""
        # On every rank, whether it has asked or not: one alone would raise at the next step, or read a sum.
        self._step_sync.forget_unread()
        self._error = None
        self._unread = False
        self.step_was_skipped = self.step_was_taken = False
        self.skipped_steps = skipped_steps
        if loss_scale is not None:
            self._loss_scale.load_state_dict(loss_scale)

    def count_skipped(self) -> int:
        """``skipped_steps``, to be saved: also after a step at which ranks were out of step, which is none of them.

        Raises:
            RuntimeError: the ranks have lost each other. Some may have stepped and others not.
        """
        try:
            self.wait_for_result()
        except RuntimeError:
            # Settings that differ the next step tells of.
            if self._step_sync.engine.agreement.lost is not None:
                raise
        return self.skipped_steps

    def pass_over(self) -> None:
        """A step was asked for inside a window, and does nothing."""
        self.wait_for_result()
        self.step_was_skipped = self.step_was_taken = False

    def wait_for_result(self, *, stepping: bool = False) -> None:
        """Wait for a step's sum, by which the device has decided alone.

        Raises:
            RuntimeError: ranks were out of step; no weight was changed. Until the next step, at which every rank raises
                it: one that has asked before would otherwise go on there, and wait for the others.
        """
        found = None
        if self._error is None and self._unread:
            try:
                found = self._step_sync.read_unread()
            except RuntimeError as caught:
                self._error = str(caught)
                self.step_was_taken = False
        self._unread = False
        if (error := self._error) is not None:
            self._error = None if stepping else error
            raise RuntimeError(error)
        if found is not None:
            taken = self.step_was_taken
            self.decided(found)
            # A backward since then has cleared it.
            self.step_was_taken = taken and not found.skips


def from_step_result(name: str) -> Any:
    """Make a property of the optimizer that waits for its last step's result and returns the attribute of that name."""

    def ask(optimizer: Any) -> Any:
        optimizer.step_result.wait_for_result()
        return getattr(optimizer.step_result, name)

    return property(ask)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Call ``optimizer.load_state_dict(state)``, and let its groups and its ``state`` stay the dicts that they were.

    torch puts new ones in their place. Where a scheduler holds them through another optimizer of the same dicts, as
    after Accelerate has put DeepSpeed's Adam in place of torch's, it would set learning rates that nobody reads.
    """
    groups = list(optimizer.param_groups)
    states = optimizer.state
    optimizer.load_state_dict(state)
    if isinstance(states, SliceStates) and optimizer.state is not states:
        states.clear()
        states.update(optimizer.state)
        optimizer.state = states
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups[:] = groups
