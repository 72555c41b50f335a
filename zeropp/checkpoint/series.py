"""``Series``: the checkpoints of one run, by step: the newest is known, old ones go once a newer one is complete."""

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
    """Checkpoints ``root/step-00000100`` and on, and the file ``root/latest``, which names the newest.

    Attributes:
        root: a directory that all ranks see; made when something is saved.
        keep: how many to keep, the one that was saved last among them; None for all. Those of later steps, which a run
            that went back has left, go first, then those of the earliest.
    """

    root: str | os.PathLike[str]
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1):
            raise ValueError(
                f"keep is {self.keep!r}; expected how many checkpoints to keep, 1 or more, or None for all"
            )
        # Where it is now: a checkpoint may be completed after the program has gone to another directory.
        object.__setattr__(self, "root", Path(self.root).absolute())

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        # numpy's numbers, too.
        if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
            raise ValueError(f"step is {step!r}; expected a number of steps, 0 or more")
        return Path(self.root) / f"step-{operator.index(step):08d}"

    def steps(self) -> list[int]:
        """Steps of which there is a complete checkpoint, in order."""
        root = Path(self.root)
        found = [_NAME.fullmatch(each.name) for each in root.iterdir()] if root.is_dir() else []
        steps = [int(match.group(1)) for match in found if match is not None]
        return sorted(step for step in steps if (self.path(step) / METADATA).is_file())

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None if there is none.

        What ``latest`` names; where that file is damaged or names what is not there, the last of :meth:`steps`.
        """
        steps = self.steps()
        named = None
        path = Path(self.root) / _LATEST
        if path.exists():
            # Where files cannot be renamed it may have been cut off while it was written over.
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
        """Save under the number of a step; see :func:`zeropp.checkpoint.save`. Returns the checkpoint's path."""
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
        """Restore the newest checkpoint, or that of a step; see :func:`zeropp.checkpoint.load`.

        Returns:
            The step and what was found; None, on every rank, if there is no checkpoint yet.
        """
        engine = engine_of(model)
        engine.agreement.require_same_call("Series.load()")
        # It may be the one to load.
        wait_together(engine, "nothing was changed")
        # The first rank's: others may see an older state of a network's file system.
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
        """On the first rank, once a checkpoint is in place: name it, and let old ones go."""
        root = Path(self.root)
        body = json.dumps({"step": step})
        checks = Checksums.crc32()
        write_synced(root / _LATEST, json.dumps({"checksum": checks.hexdigest(body.encode()), "latest": body}).encode())
        for left in root.iterdir():
            # Of jobs that ended while they wrote, perhaps another step; of nothing else that may be written here.
            unfinished = _NAME.fullmatch(left.name) and is_unfinished(left)
            if unfinished and not is_under_way(Path(os.path.realpath(left))):
                shutil.rmtree(left, ignore_errors=True)
        if self.keep is None:
            return
        others = sorted((each for each in self.steps() if each != step), key=lambda each: (each < step, each))
        for each in others[: -(self.keep - 1) or None]:
            remove(self.path(each))


def _read_latest(path: Path) -> int | None:
    try:
        found = json.loads(path.read_bytes())
        body = found["latest"]
        if Checksums.crc32().hexdigest(body.encode()) != found["checksum"]:
            return None
        return int(json.loads(body)["step"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
