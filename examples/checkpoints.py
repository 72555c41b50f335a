"""Checkpoints for ``train_gpt.py``: saved every N steps, and resumed on the same or another number of ranks.

The number of ranks times ``--batch`` must divide the number of windows (samples) per optimizer step.
"""

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
    """Checkpoints of one training run, saved as a `checkpoint.Series` that keeps the newest three.

    Args:
        folder: folder of the run; None to save nothing.
        every: number of steps between two checkpoints.
        resume: True to continue from the newest checkpoint, if there is one.
    """

    def __init__(self, folder: Path | None, every: int, resume: bool) -> None:
        self._series = None if folder is None else checkpoint.Series(folder, keep=3)
        self._folder = folder
        self._every = every
        self._resume = resume

    def accumulation(self, batch: int, accumulate: int, job: Job) -> int:
        """Return the number of micro-batches per step that keeps the run's global batch on this number of ranks.

        The folder's file ``run.json`` stores the number of windows (samples) per optimizer step from the run's start.
        A run that resumes on another number of ranks changes the number of micro-batches, so that each step still
        trains on the same windows.

        Args:
            batch: windows per rank and micro-batch.
            accumulate: micro-batches per step, for a new run.
            job: this process's rank and world size.

        Raises:
            ValueError: no number of micro-batches gives the stored number of windows, or the folder contains a run and
                ``resume`` is False.
        """
        if self._folder is None:
            return accumulate
        # Rank 0 reads the folder and broadcasts: on a network file system other ranks may see an older state of it.
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
        """Return the windows per step, read from ``run.json`` or stored there; 0 if the run may not be resumed."""
        path = folder / "run.json"
        if not self._resume and (path.exists() or checkpoint.Series(folder).steps()):
            return 0
        if self._resume and path.exists():
            return int(json.loads(path.read_text())["windows"])
        folder.mkdir(parents=True, exist_ok=True)
        # Write another file and rename it, so that a job killed here leaves no incomplete file.
        whole = path.with_name(".run.json")
        whole.write_text(json.dumps({"windows": windows}))
        os.replace(whole, path)
        return windows

    def resume(self, model: nn.Module, optimizer: object, scheduler: LRScheduler) -> int:
        """Load the newest checkpoint and return the number of steps done; 0 if there is no checkpoint to load."""
        if self._series is None or not self._resume or not isinstance(optimizer, zeropp.ZeroOptimizer):
            return 0
        found = self._series.load(model, optimizer, {"scheduler": scheduler})
        return 0 if found is None else found[0]

    def due(self, step: int) -> bool:
        """Return True if a checkpoint must be saved after this step."""
        return self._series is not None and step % self._every == 0

    def save(self, step: int, model: nn.Module, optimizer: object, scheduler: LRScheduler) -> None:
        """Start to save a checkpoint, if there is a folder; training continues while files are written."""
        if self._series is not None and isinstance(optimizer, zeropp.ZeroOptimizer):
            self._series.save(step, model, optimizer, {"scheduler": scheduler}, asynchronous=True)

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is complete on disk."""
        checkpoint.wait()
