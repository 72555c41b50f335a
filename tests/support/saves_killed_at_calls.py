"""A program that is killed at every system call with which a save changes the disk. The checkpoint must still load.

    python -m tests.support.saves_killed_at_calls "in place" renames none

The first argument is "in place", "in a series" or "an export". Each later argument is a kind of file system: "renames"
or "none" (no renames). For each kind, the program prints the number of calls of a save, and the number of kills after
which the older checkpoint was loaded. The program forks, so it must be a process of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zeropp
from tests.support.checkpoint_training import make_optimizer, train, wrap
from tests.support.quantized_model import Model
from zeropp import checkpoint

CALLS = ("pwrite", "fsync", "ftruncate", "posix_fallocate", "open", "mkdir", "rename", "replace", "unlink", "rmdir")
_MIDDLE = 12  # number of calls after which a save has begun to write


def without_renames() -> None:
    """Make renames fail in this process, as on a file system without renames."""

    def refuse(one: Any, other: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.rename, os.replace = refuse, refuse  # type: ignore[assignment]


def before_call(number: int, act: Callable[[], object]) -> Callable[[], int]:
    """Patch the system calls so that ``act`` runs before call ``number + 1``; return a function that counts calls."""
    made = 0

    def counted(call: Any) -> Any:
        def instead(*arguments: Any, **named: Any) -> Any:
            nonlocal made
            made += 1
            if made == number + 1:
                act()
            return call(*arguments, **named)

        return instead

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: made


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process and return its exit status, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Scene:
    """A run that has saved step 1 and is about to save step 2.

    Args:
        root: folder of all checkpoints.
        how: "in place" overwrites the checkpoint, "in a series" adds one and deletes the old one, "an export"
            overwrites an export.
    """

    def __init__(self, root: Path, how: str) -> None:
        self.root, self.how = root, how
        self.model, self.optimizer = wrap("stage 3")
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.advance()
        self.save(1)
        self.advance()

    def advance(self) -> None:
        train(self.model, self.optimizer, [len(self.weights)])
        self.weights[len(self.weights) + 1] = zeropp.full_state(self.model)

    def save(self, step: int) -> None:
        if self.how == "in place":
            checkpoint.save(self.root / "here", self.model, self.optimizer)
        elif self.how == "an export":
            # The limit makes two files, which have the same names in both exports.
            checkpoint.export(self.root / "here", self.model, file_nbytes=50_000)
        else:
            checkpoint.Series(self.root, keep=1).save(step, self.model, self.optimizer)

    def load(self) -> int:
        """Load the checkpoint and return its step; 0 for an export without an index file."""
        model, optimizer = wrap("stage 3")
        if self.how == "in place":
            checkpoint.load(self.root / "here", model, optimizer)
        elif self.how == "an export":
            if not (self.root / "here" / "model.safetensors.index.json").exists():
                return 0
            checkpoint.load_safetensors(model, self.root / "here")
        else:
            assert checkpoint.Series(self.root).load(model, optimizer) is not None
        state = zeropp.full_state(model)
        (found,) = (s for s, w in self.weights.items() if all(torch.equal(state[n], w[n]) for n in w))
        return found


def run(how: str, renames: str) -> None:
    if renames == "none":
        without_renames()
    with tempfile.TemporaryDirectory() as folder:
        kept, root = Path(folder) / "kept", Path(folder) / "root"
        scene = Scene(root, how)
        shutil.copytree(root, kept)
        files = len(list(kept.rglob("*.safetensors")))
        number, old, status = 0, 0, -signal.SIGKILL
        while status == -signal.SIGKILL:

            def killed(after: int) -> None:
                before_call(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
                scene.save(2)

            status = in_child(lambda number=number: killed(number))  # type: ignore[misc]
            assert status in (0, -signal.SIGKILL), status
            step = scene.load()
            old += step == 1
            assert status != 0 or step == 2, "the save has ended, but the older checkpoint was loaded"
            # Save again in a new process. Without renames, metadata is overwritten in place, so first kill one more
            # save there.
            if renames == "none":
                in_child(lambda: killed(_MIDDLE))
                scene.load()
            assert in_child(lambda: scene.save(2)) == 0
            left = [each for each in root.rglob("*") if each.name.startswith(".")]
            assert scene.load() == 2 and not left, left
            names = [each.name for each in root.rglob("*.safetensors")]
            assert len(names) == files, names
            shutil.rmtree(root)
            shutil.copytree(kept, root)
            number += 1
        print(number - 1, old, flush=True)


if __name__ == "__main__":
    # Import in the parent the modules that torch imports with the first optimizer; else every child would import them.
    make_optimizer(Model())
    # Each kind runs in a process of its own, because ``run`` patches system calls.
    statuses = [in_child(lambda renames=renames: run(sys.argv[1], renames)) for renames in sys.argv[2:]]
    sys.exit(any(statuses))
