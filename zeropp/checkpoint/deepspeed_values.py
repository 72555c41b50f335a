"""Values of a run in DeepSpeed's folders besides tensors: counters, the schedule's place, the script's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeropp.checkpoint.deepspeed_folder import PACKAGES, model_files, optim_files
from zeropp.checkpoint.torch_files import Record, Stored, read_torch_file

__all__ = ["RunValues", "read_run_values"]

_COUNTS = ("global_steps", "global_samples", "micro_steps")
# Its own, which are read elsewhere, or say nothing to another engine.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_metadata", *_COUNTS,
}  # fmt: skip


@dataclass
class RunValues:
    """Plain values of the first rank's file.

    Attributes:
        counts: ``global_steps`` and its like, as far as they are there.
        lr_scheduler: its ``state_dict()``, or None.
        skipped_steps: steps that overflowed.
        loss_scale: a dynamic one, as of :meth:`zeropp.params.loss_scale.LossScale.state_dict`; None for others.
        client: what the script gave.
        left_out: names of the script's values that hold tensors or objects, which are not read.
    """

    counts: dict[str, int] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] | None = None
    skipped_steps: int = 0
    loss_scale: dict[str, Any] | None = None
    client: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_run_values(folder: Path) -> RunValues:
    """Read them.

    Args:
        folder: of one checkpoint.

    Raises:
        CheckpointError: the file is damaged, or names what is not known.
    """
    files = model_files(folder)
    found = RunValues()
    if not files:
        return found
    saved = read_torch_file(files[0], PACKAGES)
    if not isinstance(saved, Mapping):
        return found
    found.counts = {name: saved[name] for name in _COUNTS if isinstance(saved.get(name), int)}
    skipped = saved.get("skipped_steps")
    found.skipped_steps = skipped if isinstance(skipped, int) else 0
    found.loss_scale = _loss_scale(folder)
    schedule = saved.get("lr_scheduler")
    # Of a schedule that is an object of the user's, the state may be anything.
    if isinstance(schedule, dict) and _is_plain(schedule):
        found.lr_scheduler = schedule
    elif schedule is not None:
        found.left_out.append("lr_scheduler")
    for name, value in saved.items():
        if name in _OWN:
            continue
        if _is_plain(value):
            found.client[name] = value
        else:
            found.left_out.append(str(name))
    return found


def _loss_scale(folder: Path) -> dict[str, Any] | None:
    """The dynamic loss scale of a run in float16: the same in every rank's file."""
    # Its own attributes -> ours. A static scale has but the first, and is the configuration's.
    names = {"cur_scale": "value", "cur_iter": "iterations", "last_overflow_iter": "last_overflow",
             "cur_hysteresis": "left"}  # fmt: skip
    for path in optim_files(folder)[:1]:
        saved = read_torch_file(path, PACKAGES)
        inner = saved.get("optimizer_state_dict") if isinstance(saved, Mapping) else None
        scaler = inner.get("loss_scaler") if isinstance(inner, Mapping) else None
        if isinstance(scaler, Record) and all(isinstance(scaler.get(name), int | float) for name in names):
            return {own: scaler.get(name) for name, own in names.items()}
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return not isinstance(value, Stored | Record) and (value is None or isinstance(value, str | bytes | int | float))
