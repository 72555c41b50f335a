"""The optimizer's state on one rank: main weights, counts of steps, loss scale, errors that quantized gradients carry.

A fingerprint of the layout tells whether a saved state fits; ranks decide together whether all of theirs do.
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
    """Entries of a rank's state that are of its engine: main weights, loss scale, rank and layout."""
    return {
        "layout": engine.layout_id(),
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
    wrong = _misfits(engine, found != engine.layout_id())
    # Only if they do not fit as it is: the state may be from before the change.
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
        f"layout {saved.get('layout')}, here {engine.layout_id()}. It was saved with another model, placement, "
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
