"""Weights in the dtype that a model computes in: as main weights, and as one file."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

import torch
from torch import Tensor, nn

from zeropp.access.awaited import require_values
from zeropp.access.state import engine_of, gather_computed
from zeropp.checkpoint.metadata import sync_folder
from zeropp.checkpoint.names import model_names
from zeropp.checkpoint.parts import MODEL, main_parts
from zeropp.checkpoint.progress import Progress
from zeropp.checkpoint.together import Left, common_path, together
from zeropp.config.base import notify
from zeropp.engine.engine import Engine
from zeropp.engine.parking import NOTHING

__all__ = ["gather_16bit", "round_main", "save_16bit_model"]


def round_main(engine: Engine, names: Container[str]) -> None:
    """Round this rank's main weights of some parameters to what they are computed with."""
    dtypes = {name: buffer.compute_dtype for buffer in engine.buffers for name in buffer.names}
    for part in main_parts(engine, "slice"):
        name = part.name.removeprefix(MODEL)
        if name in names:
            part.values.copy_(part.values.to(dtypes[name]))


def save_16bit_model(
    save_dir: str | os.PathLike[str],
    model: nn.Module,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write whole weights and buffers, in the dtypes that are computed with, to one file of ``torch.save``.

    What DeepSpeed's engine has under this name. Collective: every rank calls it, between passes; the first one holds
    the whole model and writes. :func:`zeropp.checkpoint.export` does it on all ranks, with one unit in memory.

    Args:
        save_dir: a directory, made if it is not there.
        model: wrapped by a ZeroOptimizer.
        save_filename: of the file, which is replaced.
        exclude_frozen_parameters: leave out parameters that are not trained.

    Returns:
        Whether it was written: in stage 3 only with ``stage3_gather_16bit_weights_on_model_save``, as in DeepSpeed.

    Raises:
        OSError, CheckpointError: it cannot be written; on every rank, and a file that was there stays.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.save_16bit_model()", averaged=True, needs=NOTHING)
    engine.agreement.require_same_call(f"checkpoint.save_16bit_model(..., {exclude_frozen_parameters=})")
    path = common_path(engine, save_dir, "checkpoint.save_16bit_model()") / save_filename
    # Also where nothing is going to be written: weights that are missing are worth a word whenever somebody saves.
    require_values(engine)
    zero = engine.maker.config.zero
    if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
        if engine.comm.rank == 0:
            notify(
                f"{str(path)!r} was not written, since stage3_gather_16bit_weights_on_model_save is false; set it to "
                "true, or use zeropp.checkpoint.export"
            )
        return False
    state, left = _gathered(engine, model, exclude_frozen_parameters), Left("what was there before is as it was")

    def write() -> None:
        if state is not None:
            _write(path, left, state)

    together(engine, f"writing {str(path)!r}", write, left, at_disk=Progress())
    return True


def gather_16bit(model: nn.Module, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
    """Whole weights and buffers on the first rank's CPU, in the dtypes that are computed with; None on other ranks.

    Collective, between passes.

    Args:
        model: wrapped by a ZeroOptimizer.
        exclude_frozen_parameters: leave out parameters that are not trained.
    """
    engine = engine_of(model)
    engine.require_idle("gathering 16-bit weights", averaged=True, needs=NOTHING)
    engine.agreement.require_same_call(f"gathering 16-bit weights, {exclude_frozen_parameters=}")
    require_values(engine)
    return _gathered(engine, model, exclude_frozen_parameters)


def _gathered(engine: Engine, model: nn.Module, exclude_frozen_parameters: bool) -> dict[str, Tensor] | None:
    """:func:`gather_16bit`, where ranks have agreed to it."""
    first, spread = engine.comm.rank == 0, dict[str, Tensor]()
    for buffer in engine.buffers:
        # Gathering is collective, whoever keeps what comes of it.
        for name, values in zip(buffer.names, gather_computed(engine, buffer), strict=True):
            if first:
                spread[name] = values.to("cpu", copy=True)
    if not first:
        return None
    # Only now: what other ranks have gathered for is this one's to name.
    named, aliases = model_names(model)
    left_out = {
        name
        for name, tensor in named.items()
        if exclude_frozen_parameters and isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    }
    # Copies of the rest, too, which training goes on to write to.
    state = {n: spread[n] if n in spread else t.detach().to("cpu", copy=True) for n, t in named.items()}
    state |= {alias: state[name] for alias, name in aliases.items()}
    return {name: tensor for name, tensor in state.items() if aliases.get(name, name) not in left_out}


def _write(path: Path, left: Left, state: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        left.text = "it is complete all the same"
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)
