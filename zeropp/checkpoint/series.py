"""``Series``: the checkpoints of one run by step, with a record of the newest and deletion of old ones."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from zeropp.checkpoint.files import FILE_NBYTES
from zeropp.checkpoint.load import Loaded, load
from zeropp.checkpoint.metadata import METADATA, Checksums, write_synced, written_first
from zeropp.checkpoint.rank_sync import Progress, run_between_passes
from zeropp.checkpoint.saving import begin_save, is_under_way, is_unfinished, remove, wait_together
from zeropp.checkpoint.tensor_reader import Verify
from zeropp.config.base import warn_user
from zeropp.engine.engine import engine_of

__all__ = ["Series"]

_LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Series:
    """A folder of checkpoints ``root/step-00000100`` ..., and the file ``root/latest`` with the step of the newest.

    Attributes:
        root: folder visible to all ranks; created by the first save.
        keep: number of checkpoints to keep, including the one saved last; None keeps all. After a save, checkpoints of
            later steps are deleted first (left by a run that was resumed at an earlier step), then those of the
            earliest steps.
    """

    root: str | os.PathLike[str]
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1):
            raise ValueError(
                f"keep is {self.keep!r}; expected how many checkpoints to keep, 1 or more, or None for all"
            )
        # Resolve the path now: the program may change its working directory before a background save completes.
        object.__setattr__(self, "root", Path(self.root).absolute())

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint.

        Args:
            step: number of the step, 0 or more.

        Raises:
            ValueError: ``step`` is not an integer, or is negative.
        """
        # __index__ accepts numpy integers as well.
        if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
            raise ValueError(f"step is {step!r}; expected a number of steps, 0 or more")
        return Path(self.root) / f"step-{operator.index(step):08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        root = Path(self.root)
        found = [_NAME.fullmatch(each.name) for each in root.iterdir()] if root.is_dir() else []
        steps = [int(match.group(1)) for match in found if match is not None]
        return sorted(step for step in steps if (self.path(step) / METADATA).is_file())

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last; None if there is no complete checkpoint.

        The step is read from the file ``latest``. If that file is missing, is damaged or names an incomplete
        checkpoint, the result is the highest of :meth:`steps`.
        """
        steps = self.steps()
        named = None
        path = Path(self.root) / _LATEST
        if path.exists():
            # On file systems without rename, an in-place overwrite of the file may have been cut off. The first copy is
            # complete then.
            named = next((n for n in map(_read_latest, (path, written_first(path))) if n is not None), None)
            if named not in steps:
                warn_user(
                    f"{str(path)!r} is damaged or names no complete checkpoint; the newest that is there is taken"
                )
                named = None
        return named if named is not None else max(steps, default=None)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        busy: Literal["wait", "refuse"] = "wait",
        file_nbytes: int = FILE_NBYTES,
        exclude_frozen_parameters: bool = False,
        progress: bool = True,
    ) -> Path:
        """Save a checkpoint of a step. Collective. The other arguments are those of :func:`zeropp.checkpoint.save`.

        When the checkpoint is complete, ``latest`` is updated and old checkpoints are deleted.

        Args:
            step: number of the step, 0 or more.

        Returns:
            Path of the checkpoint.

        Raises:
            ValueError: ``step`` is negative.
            CheckpointError: as :func:`zeropp.checkpoint.save`.
        """
        path = self.path(step)
        step = operator.index(step)
        completed = functools.partial(self._completed, step)
        return begin_save(
            path,
            model,
            optimizer,
            extra,
            asynchronous=asynchronous,
            busy=busy,
            file_nbytes=file_nbytes,
            trained_only=exclude_frozen_parameters,
            progress=progress,
            completed=completed,
        )

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        only: Collection[str] | None = None,
        verify: Verify = "all",
        progress: bool = True,
    ) -> tuple[int, Loaded] | None:
        """Restore a checkpoint of the series. Collective. Other arguments are those of :func:`zeropp.checkpoint.load`.

        Args:
            step: step of the checkpoint; None for the newest.

        Returns:
            (step, result of the load); None, on every rank, if there is no checkpoint yet.

        Raises:
            CheckpointError: as :func:`zeropp.checkpoint.load`; also if the checkpoint of ``step`` does not exist.
        """
        engine = engine_of(model)
        engine.agreement.require_same_call("Series.load()")
        # A background save in progress may be the checkpoint to load.
        wait_together(engine, "nothing was changed")
        # Rank 0 looks for the newest checkpoint, because other ranks may see an older state of a network file system.
        looks = step is None and engine.comm.rank == 0
        own = run_between_passes(
            engine,
            "looking for the newest checkpoint",
            lambda: self.latest() if looks else step,
            "nothing was changed",
            at_disk=Progress(),
        )
        chosen = engine.agreement.exchange_objects(own, "looking for the newest checkpoint")[0]
        if chosen is None:
            return None
        how: dict[str, Any] = {"strict": strict, "only": only, "verify": verify, "progress": progress}
        return chosen, load(self.path(chosen), model, optimizer, extra, **how)

    def _completed(self, step: int) -> None:
        """Update ``latest`` and delete old checkpoints; called on rank 0 when a checkpoint is in place."""
        root = Path(self.root)
        body = json.dumps({"step": step})
        checks = Checksums.crc32()
        write_synced(root / _LATEST, json.dumps({"checksum": checks.hexdigest(body.encode()), "latest": body}).encode())
        for left in root.iterdir():
            # Remove the folders of saves that were cut off, but not of a save in progress in this process.
            unfinished = _NAME.fullmatch(left.name) and is_unfinished(left)
            if unfinished and not is_under_way(Path(os.path.realpath(left))):
                shutil.rmtree(left, ignore_errors=True)
        if self.keep is None:
            return
        others = sorted((each for each in self.steps() if each != step), key=lambda each: (each < step, each))
        for each in others[: -(self.keep - 1) or None]:
            remove(self.path(each))


def _read_latest(path: Path) -> int | None:
    """Return the step in a file ``latest``; None if the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
        body = found["latest"]
        if Checksums.crc32().hexdigest(body.encode()) != found["checksum"]:
            return None
        return int(json.loads(body)["step"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
