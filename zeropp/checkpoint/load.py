"""``load``: restore a checkpoint in place, whatever ranks and layout it was saved with."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeropp.access.state import engine_of
from zeropp.checkpoint.foreign import foreign_source
from zeropp.checkpoint.metadata import Metadata
from zeropp.checkpoint.restore import IN_PART, Loaded, Restore
from zeropp.checkpoint.save import require_ours, unfreeze, wait_together
from zeropp.checkpoint.source import Source, Verify
from zeropp.checkpoint.together import Progress, common_path, together
from zeropp.engine.engine import Engine

__all__ = ["KINDS", "Loaded", "load", "load_foreign", "load_safetensors"]

KINDS = ("model", "optimizer", "extra", "random")
"""The parts of a checkpoint that can be loaded alone."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    only: Collection[str] | None = None,
    verify: Verify = "all",
    progress: bool = True,
) -> Loaded:
    """Restore what :func:`zeropp.checkpoint.save` saved. Collective: every rank calls it, between optimizer steps.

    On any number of ranks, of nodes, in any stage and placement, with other units, precision, frozen parameters or
    order of parameter groups; each rank reads the bytes of its own part. On the same ranks and layout everything goes
    on bit for bit.

    Args:
        path: the directory.
        model: wrapped by a ZeroOptimizer.
        optimizer: that one; without it weights alone are restored.
        extra: objects whose ``load_state_dict`` gets what was saved under their names. Values that are no objects come
            back in the result.
        strict: raise if model and checkpoint have other parameters or buffers, or ``extra`` has names that it has not.
        only: some of "model", "optimizer", "extra" and "random"; None for all that there is.
        verify: check every byte that is read, and of files that nobody reads the rest; or a sample of stretches; or
            nothing.
        progress: show a bar on the first rank once it has taken two seconds, if tqdm is installed.

    Raises:
        CheckpointError: it is no complete checkpoint, damaged, or does not fit; on every rank. The message says whether
            values have changed.
        RuntimeError: called inside a pass, or ranks are at different calls.
        TypeError, ValueError: an argument is wrong.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.load()")
    # Sorted, since each process has an order of its own in a set of strings.
    kinds = only if only is None or isinstance(only, str) else sorted(map(str, only))
    engine.agreement.require_same_call(f"checkpoint.load(..., strict={strict}, only={kinds}, {verify!r})")
    # What was given: nodes may have other links to one disk. As save() has it, "a/../b" is b, whether or not there is
    # an a.
    folder = Path(os.path.realpath(common_path(engine, path, "checkpoint.load()")))
    wait_together(engine, "nothing was changed")
    unfreeze(engine, optimizer)
    shown = Progress(f"loading {folder.name}", progress and engine.comm.rank == 0)

    def prepare() -> Restore:
        kinds = _kinds(only)
        if only is not None and "optimizer" in kinds and optimizer is None:
            raise ValueError(f"only is {only!r}, and no optimizer is given; give the model's ZeroOptimizer")
        source = Source(folder, Metadata.read(folder), verify, shown)
        source.check_sizes(engine.comm.rank, engine.comm.world)
        return Restore(engine, model, require_ours(engine, optimizer), extra or {}, source, strict, kinds)

    return _run(engine, f"loading the checkpoint {str(folder)!r}", shown, prepare)


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, progress: bool = True
) -> Loaded:
    """Read weights and buffers of safetensors files, as Hugging Face has them, straight into the shards.

    Collective, between optimizer steps. Each rank reads the bytes of its own part; names are those of the plain
    model's ``state_dict()``, any of a tied parameter's, or what transformers converts to them for its own models.

    Args:
        model: wrapped by a ZeroOptimizer.
        path: a file, or a folder with one, with an index, or with any safetensors files.
        strict: raise if model and files have other tensors.
        progress: show a bar on the first rank once it has taken two seconds, if tqdm is installed.

    Raises:
        CheckpointError: files are missing, damaged, or of another model; on every rank.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.load_safetensors()")
    engine.agreement.require_same_call(f"checkpoint.load_safetensors(..., strict={strict})")
    place = common_path(engine, path, "checkpoint.load_safetensors()")
    shown = Progress(f"loading {place.name}", progress and engine.comm.rank == 0)

    def prepare() -> Restore:
        source = foreign_source(place, model, None, strict, prefix=None, safetensors=True)
        source.progress = shown
        return Restore(engine, model, None, {}, source, strict, frozenset(["model"]))

    return _run(engine, f"loading {str(place)!r}", shown, prepare)


def load_foreign(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    prefix: str | None = None,
    progress: bool = True,
) -> Loaded:
    """Read what other programs saved straight into the shards. Collective, between optimizer steps.

    Files of ``torch.save``, folders of torch.distributed.checkpoint as FSDP2 and torchtitan write them, DeepSpeed's of
    ZeRO stages 1 to 3, and safetensors. Each rank reads the bytes of its own part. Nothing that a file names is run.

    Args:
        path: a file or a folder; of DeepSpeed's that with ``latest``, or that of a tag.
        model: wrapped by a ZeroOptimizer.
        optimizer: that one, to restore its states and its groups' settings, too.
        strict: raise if model and files have other tensors, or no states are there for ``optimizer``.
        prefix: what stands before the model's names in files that name other tensors, too, as in ``"model."``; None
            for what most of them have.
        progress: as in :func:`load`.

    Raises:
        CheckpointError: it is of no known format, damaged, of another model, or names code; on every rank.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.load_foreign()")
    engine.agreement.require_same_call(f"checkpoint.load_foreign(..., strict={strict}, prefix={prefix!r})")
    place = common_path(engine, path, "checkpoint.load_foreign()")
    unfreeze(engine, optimizer)
    shown = Progress(f"loading {place.name}", progress and engine.comm.rank == 0)

    def prepare() -> Restore:
        ours = require_ours(engine, optimizer)
        source = foreign_source(place, model, ours, strict, prefix)
        source.progress = shown
        work = Restore(engine, model, ours, {}, source, strict, frozenset(["model", "optimizer"]))
        if source.locate is not None:
            # Each box has a header of its own, and may be no tensor at all: found before anything changes.
            work.look_up()
        return work

    return _run(engine, f"loading {str(place)!r}", shown, prepare)


@torch.inference_mode(False)  # a step cannot write to states that are made in it
def _run(engine: Engine, doing: str, shown: Progress, prepare: Callable[[], Restore]) -> Loaded:
    work = together(engine, doing, prepare, "nothing was changed", at_disk=shown)
    engine.finish_load()
    engine.refresh.start_put_off()
    # Refreshes read what is about to be written.
    engine.refresh.wait()
    # Of the ranks of a node one after the other, or all at once.
    turns = engine.comm.local if engine.maker.config.zero.pipeline_loading_checkpoint else 1
    try:
        for turn in range(turns):
            reads = work.read if engine.comm.rank % turns == turn else lambda: None
            together(engine, doing, reads, IN_PART, at_disk=shown)
    finally:
        shown.close()
    work.finish(doing)
    return work.result


def _kinds(only: Collection[str] | None) -> frozenset[str]:
    if only is None:
        return frozenset(KINDS)
    wrong = [each for each in only if each not in KINDS] if not isinstance(only, str) else [only]
    if wrong:
        raise ValueError(f"only is {only!r}; expected some of {', '.join(map(repr, KINDS))}, as a list")
    return frozenset(only)
