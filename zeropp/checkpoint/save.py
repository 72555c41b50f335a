"""``save``: make a directory one complete checkpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from zeropp.access.awaited import require_values
from zeropp.access.state import engine_of
from zeropp.checkpoint.attempt import Attempt
from zeropp.checkpoint.background import background_of, backgrounds, wait_for_cards, wait_together
from zeropp.checkpoint.checksums import Checksums
from zeropp.checkpoint.contents import Contents, add_extra, contents
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.files import FILE_NBYTES, require_file_nbytes
from zeropp.checkpoint.progress import Progress
from zeropp.checkpoint.together import EngineMeeting, absolute, path_of_rank_0, together, tried
from zeropp.engine.engine import Engine
from zeropp.optimizer.rank_state import layout_id
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["begin", "require_ours", "save", "unfreeze"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    asynchronous: bool = False,
    busy: Literal["wait", "refuse"] = "wait",
    file_nbytes: int = FILE_NBYTES,
    exclude_frozen_parameters: bool = False,
    progress: bool = True,
) -> None:
    """Make ``path`` one complete checkpoint. Collective: every rank calls it, between optimizer steps.

    Each rank writes its own part, and nothing twice. What ``path`` has before stays until all of the new is on the
    disk; a save that fails, or is cut off, leaves it as it is.

    Args:
        path: a directory that all ranks see; made, or replaced if it is a checkpoint. Where ranks give different ones
            it is rank 0's, with a warning.
        model: wrapped by a ZeroOptimizer.
        optimizer: that one; without it weights alone are saved.
        extra: by name, values of JSON, tensors or numpy arrays, or objects with ``state_dict`` and
            ``load_state_dict``: schedulers, samplers, scalers. Ranks may have different ones.
        asynchronous: return when all is copied to the host's memory, and write while training goes on;
            :func:`wait` and the next save raise what goes wrong. Costs one copy of this rank's part in memory.
        busy: while another is being written, wait for it or raise.
        file_nbytes: largest size of a file in bytes, its header aside; at least 65536.
        exclude_frozen_parameters: leave out parameters that are not trained, as around adapters; a model that has them
            frozen, too, keeps its own when it loads this.
        progress: show a bar on the first rank once it has taken two seconds, if tqdm is installed.

    Raises:
        CheckpointError: it cannot be saved; on every rank, and nothing has changed.
        RuntimeError: called inside a pass, or ranks are at different calls.
        TypeError: the optimizer is none that zeropp has wrapped.
    """
    begin(
        path, model, optimizer, extra, asynchronous=asynchronous, busy=busy, file_nbytes=file_nbytes,
        trained_only=exclude_frozen_parameters, progress=progress,
    )  # fmt: skip


def begin(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    *,
    asynchronous: bool,
    busy: str,
    file_nbytes: int,
    trained_only: bool,
    progress: bool,
    completed: Callable[[], None] | None = None,
    in_window: bool = False,
) -> Path:
    """:func:`save`, and ``completed`` is called on the first rank when the checkpoint is in place; returns its path.

    ``in_window`` saves between two steps, too, without the gradients that have come since the first of them.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.save()")
    how = f"asynchronous={asynchronous}, exclude_frozen_parameters={trained_only}"
    engine.agreement.require_same_call(f"checkpoint.save(..., {how})")
    background = background_of(engine) if asynchronous else None
    _wait_for_others(engine, busy)
    # What is cached of older weights is renewed first: it may be a part of what is saved.
    engine.finish_load()
    engine.refresh.start_put_off()
    engine.refresh.wait()
    require_values(engine)
    own = Checksums.best().name, background is not None and background.broken, absolute(path)
    told = engine.agreement.exchange_objects(own, "agreeing on checksums and the path of a checkpoint")
    names, broken, paths = zip(*told, strict=True)
    target = path_of_rank_0(engine, paths, "checkpoint.save()")
    if background is not None and any(broken):
        background.meet_anew()
    checks, meeting = Checksums.common(names), EngineMeeting(engine)
    collect = partial(contents, engine, model, extra=extra or {}, checks=checks, trained_only=trained_only)
    refused = 0 if in_window else engine.window.count
    found, token = _prepare(engine, optimizer, collect, target, file_nbytes, refused)
    shown = Progress(f"saving {target.name}", progress and meeting.rank == 0)
    attempt = Attempt(target, token, found, checks, file_nbytes, shown, completed)
    if background is None:
        # Threads copy from cards, on streams of their own.
        wait_for_cards(found.parts)
        attempt.run(meeting)
    else:
        doing, left = f"copying what is to be saved at {str(target)!r}", "nothing was saved"
        background.start(together(engine, doing, lambda: background.copied(attempt), left))
    return target


def _wait_for_others(engine: Engine, busy: str) -> None:
    """The one that is being written comes first; its error is this call's."""
    if busy not in ("wait", "refuse"):
        raise ValueError(f'busy is {busy!r}; expected "wait" or "refuse"')
    background = backgrounds.get(engine)
    own = background is not None and background.busy
    if busy == "refuse" and any(engine.agreement.exchange_objects(own, "looking for a save under way")):
        raise CheckpointError('a checkpoint is still being written; wait() for it, or save with busy="wait"')
    wait_together(engine, "this one was not begun")


def _prepare(
    engine: Engine,
    optimizer: Optimizer | None,
    collect: Callable[..., Contents],
    target: Path,
    limit: int,
    waiting: int,
) -> tuple[Contents, str]:
    """This rank's contents, and the attempt's token; fails on all ranks if it fails on any.

    ``waiting`` micro-batches have gradients that would be lost.
    """

    def prepare() -> Contents:
        require_file_nbytes(limit, least=1 << 16)
        if waiting:
            raise CheckpointError(
                f"gradients of {waiting} micro-batches wait for a step and would be lost; save after "
                "step(), or discard them with zero_grad(now=True)"
            )
        owner = require_ours(engine, optimizer)
        found = collect(optimizer=owner)
        found.own["layout"] = layout_id(engine)
        found.values["config"] = owner.config.model_dump(mode="json") if owner is not None else {}
        return found

    collected, error, told = tried(prepare)
    # A rank that has failed still takes part in the exchange, to say so.
    found = collected or Contents()
    own = (told, found.digest, secrets.token_hex(4))
    accounts = engine.agreement.exchange_objects(own, f"preparing the checkpoint {str(target)!r}")
    if error is not None:
        raise error
    failed = {rank: told for rank, (told, _, _) in enumerate(accounts) if told is not None}
    if failed:
        rank, cause = next(iter(failed.items()))
        raise CheckpointError(f"the checkpoint {str(target)!r} was not begun: rank {rank} has {cause}")
    _, digest, token = accounts[0]
    add_extra(found, engine.comm.rank, digest)
    return found, token


def require_ours(engine: Engine, optimizer: Optimizer | None) -> ZeroOptimizer | None:
    """The optimizer of an engine, as what it is.

    Raises:
        TypeError: it is none that zeropp has wrapped.
        ValueError: it is another model's.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; expected the ZeroOptimizer around it, or None for weights only"
        )
    if optimizer.engine is not engine:
        raise ValueError("the optimizer and the model do not belong together; give the ZeroOptimizer of this model")
    return optimizer


def unfreeze(engine: Engine, optimizer: Optimizer | None) -> None:
    """Let parameters that are trained from now on have states, and averages, before these are loaded."""
    if isinstance(optimizer, ZeroOptimizer) and optimizer.engine is engine:
        optimizer.apply_requires_grad()
