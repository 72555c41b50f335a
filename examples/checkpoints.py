"""Checkpoints of a run of ``train_gpt.py``: saved now and then, resumed on any number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

from job import Job
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import zeropp
from zeropp import checkpoint


class Checkpoints:
    """Those of one run, or of none.

    Args:
        folder: of the run; None saves nothing.
        every: steps from one to the next.
        resume: go on from the newest, if there is one.
    """

    def __init__(self, folder: Path | None, every: int, resume: bool) -> None:
        self._series = None if folder is None else checkpoint.Series(folder, keep=3)
        self._folder = folder
        self._every = every
        self._resume = resume

    def accumulation(self, batch: int, accumulate: int, job: Job) -> int:
        """Micro-steps of an optimizer step, so that a step has as many windows as when the run began.

        Raises:
            ValueError: no number of micro-steps gives that; the folder has a run, which is not to be resumed.
        """
        if self._folder is None:
            return accumulate
        # The first rank's word: on a network's file system others may see an older state of the folder.
        windows = job.first(self._windows(self._folder, batch * accumulate * job.world) if job.rank == 0 else 0)
        if not windows:
            raise ValueError(
                f"{self._folder} has a run, which would be mixed with this one; give --resume to go on with it, or "
                "another --checkpoint"
            )
        if windows % (batch * job.world):
            raise ValueError(
                f"the run in {self._folder} has {windows} windows a step, which {job.world} ranks with --batch {batch} "
                f"do not make in any number of micro-steps; give a --batch that divides {windows / job.world:g}"
            )
        return windows // (batch * job.world)

    def _windows(self, folder: Path, windows: int) -> int:
        """Windows of a step when the run began, which may be now; 0 for a run that is not to be resumed."""
        path = folder / "run.json"
        if not self._resume and (path.exists() or checkpoint.Series(folder).steps()):
            return 0
        if self._resume and path.exists():
            return int(json.loads(path.read_text())["windows"])
        folder.mkdir(parents=True, exist_ok=True)
        # At once or not at all: the job may be killed here, too.
        whole = path.with_name(".run.json")
        whole.write_text(json.dumps({"windows": windows}))
        os.replace(whole, path)
        return windows

    def resume(self, model: nn.Module, optimizer: object, scheduler: LRScheduler) -> int:
        """Steps that are done: those of the newest checkpoint, which is loaded, or 0."""
        if self._series is None or not self._resume or not isinstance(optimizer, zeropp.ZeroOptimizer):
            return 0
        found = self._series.load(model, optimizer, {"scheduler": scheduler})
        return 0 if found is None else found[0]

    def due(self, step: int) -> bool:
        """Whether to save after a step."""
        return self._series is not None and step % self._every == 0

    def save(self, step: int, model: nn.Module, optimizer: object, scheduler: LRScheduler) -> None:
        """Save, while training goes on."""
        if self._series is not None and isinstance(optimizer, zeropp.ZeroOptimizer):
            self._series.save(step, model, optimizer, {"scheduler": scheduler}, asynchronous=True)

    def wait(self) -> None:
        """Until what is being saved is on the disk."""
        checkpoint.wait()
