"""The optimizer's state of one rank: main weights, step counts, loss scale, and errors of quantized gradients.

A fingerprint of the layout shows if a saved state fits this engine. All ranks together check that their states fit.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zeropp._compat import default_store
from zeropp.comm.agreement import SAVED
from zeropp.comm.timers import within
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine

__all__ = [
    "check_state",
    "describe_rank",
    "load_main_weights",
    "warn_if_alone",
]


def describe_rank(engine: Engine) -> dict[str, Any]:
    """Return the engine's entries of a rank's state: main weights, loss scale, rank, world size and layout."""
    return {
        "layout": engine.layout_id(),
        "rank": engine.comm.rank,
        "world": engine.comm.world,
        "main_weights": _main_weights(engine),
        "loss_scale": engine.loss_scale.state_dict(),
    }


def _main_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return copies of this rank's main shards, by unit, compute dtype, and index among the unit's such buffers."""
    pieces: dict[str, torch.Tensor] = {}
    seen: Counter[str] = Counter()
    for buffer in engine.trainable_buffers:
        name = f"{buffer.unit}/{buffer.compute_dtype}"
        pieces[f"{name}/{seen[name]}"] = buffer.shard.clone()
        seen[name] += 1
    return pieces


def check_state(
    engine: Engine, state: dict[str, Any], optimizer: Optimizer, apply_requires_grad: Callable[[], None]
) -> None:
    """Raise on every rank if some rank's saved state does not fit, before any rank changes anything. Collective.

    If the states do not fit but would fit after pending changes of ``requires_grad``, these are applied first.

    Args:
        engine: engine of the model.
        state: saved state that this rank is to load.
        optimizer: the wrapped optimizer.
        apply_requires_grad: function that applies pending changes of ``requires_grad``.

    Raises:
        ValueError: this rank's state is not from a ZeroOptimizer, has another layout, or has other groups.
        RuntimeError: another rank's state does not fit; nothing was loaded.
    """
    # Complete each check on all ranks before the next one, because later checks read entries that earlier ones verify.
    wrong = _misfits(engine, "zeropp" not in state)
    if wrong:
        raise _refusal(
            engine,
            wrong,
            "the state has no 'zeropp' entry: it was not saved by ZeroOptimizer.state_dict on this rank. A plain "
            "optimizer's state cannot be loaded into partitions; start with fresh optimizer states",
        )
    found = state["zeropp"].get("layout")
    wrong = _misfits(engine, found != engine.layout_id())
    # Unfreeze only if the state does not fit as it is: it may have been saved before the parameters were unfrozen.
    if wrong and engine.requires_grad_changed:
        apply_requires_grad()
        wrong = _misfits(engine, found != engine.layout_id())
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
    """Return the ranks whose state does not fit. Collective.

    Args:
        engine: engine of this rank.
        wrong: True if this rank's state does not fit.
    """
    rows = engine.agreement.exchange(SAVED, [int(wrong)], "checking saved states")
    return [rank for rank, row in enumerate(rows) if row[0]]


def _refusal(engine: Engine, wrong: list[int], message: str) -> Exception:
    """Return the error to raise: ``message`` on the ranks in ``wrong``, and a note about them on other ranks."""
    if engine.comm.rank in wrong:
        return ValueError(message)
    return RuntimeError(f"the states given to ranks {wrong} do not fit; nothing was loaded on any rank")


def _where_from(engine: Engine, saved: dict[str, Any]) -> str:
    """Return the likely reason why a state does not fit, from its rank, world size and layout."""
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
        f"layout {saved.get('layout')}, here {engine.layout_id()}. It was saved with another model, placement, "
        "precision or unit settings, or after other parameters were unfrozen or in another order; load it under the "
        "same ones"
    )


def load_main_weights(engine: Engine, saved: dict[str, Any]) -> None:
    """Copy saved main weights into this rank's shards, and mark cached weights for renewal.

    Args:
        engine: engine of the model.
        saved: the "zeropp" entry of a saved state, whose layout has been checked.
    """
    with torch.no_grad():
        # Pair names with buffers by the current order. check_state has compared the layouts.
        for name, buffer in zip(_main_weights(engine), engine.trainable_buffers, strict=True):
            buffer.shard.copy_(saved["main_weights"][name])
    # Leave ``stepped`` False: differences to the cached weights could be large, so refreshes must send whole weights.
    engine.weights_changed(engine.trainable_buffers)


# Detection of state_dict() calls that only some ranks make.

_PATIENCE = 2.0  # seconds that rank 0 waits for other ranks to call state_dict()
_TOLD = -2
_calls: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # number of calls; _TOLD after a warning


def warn_if_alone(engine: Engine) -> None:
    """Warn on rank 0 if other ranks do not call ``state_dict()`` of their optimizer, too.

    A script that saves it only ``if rank == 0`` loses the states of all other ranks, and would fail only when it
    resumes. Ranks count their calls in the job's key-value store. Only rank 0 waits, for at most ``_PATIENCE`` seconds.

    Args:
        engine: engine of this rank.
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

    # Give up silently if the process that runs the store has ended.
    with contextlib.suppress(RuntimeError, TimeoutError):
        came = count(1)
        while comm.rank == 0 and came < comm.world and time.monotonic() < until:
            time.sleep(0.02)
            came = count(0)
    if comm.rank == 0 and came < comm.world:
        _calls[engine] = _TOLD  # later calls skip the wait: the script may only look at its states
        warn_user(
            f"optimizer.state_dict() was called on {came} of {comm.world} ranks, rank 0 among them. It has one rank's "
            "part of the states alone, and a run cannot go on from it: call it on every rank, and save each rank's in "
            "a file of its own, or call zeropp.checkpoint.save(path, model, optimizer) on every rank"
        )
