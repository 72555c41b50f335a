"""A program that saves, and is killed at every system call by which it changes the disk: what is left must load.

    python -m tests.support.saves_killed_at_calls "in place" renames none

The first argument is "in place", "in a series" or "an export". For each kind of file system, prints how many calls
there were, and after how many the older checkpoint was there. A process of its own, since it forks.
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
_MIDDLE = 12  # calls, by which a save has begun to write


def without_renames() -> None:
    """Let this process see a file system that renames nothing; it is a stand-in."""

    def refuse(one: Any, other: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.rename, os.replace = refuse, refuse  # type: ignore[assignment]


def before_call(number: int, act: Callable[[], object]) -> Callable[[], int]:
    """Have ``act`` called before that many calls were made; returns what counts them."""
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
    """Exit status of ``work`` in a forked process; negative if a signal ended it."""
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
    """A run that has saved step 1 and is about to save step 2: in its place, as another of a series, or an export."""

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
            # Two files, of the same names each time.
            checkpoint.export(self.root / "here", self.model, file_nbytes=50_000)
        else:
            checkpoint.Series(self.root, keep=1).save(step, self.model, self.optimizer)

    def load(self) -> int:
        """Load what is there, and say which step it is; 0 of an export that is gone."""
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
            assert status != 0 or step == 2, "the save has ended, and what is there is older"
            # Again, by programs that were started anew. Where metadata is written over, the first is killed, too.
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
    # What torch imports with the first optimizer would be imported by every process.
    make_optimizer(Model())
    # Each in a process of its own, which may change what system calls do.
    statuses = [in_child(lambda renames=renames: run(sys.argv[1], renames)) for renames in sys.argv[2:]]
    sys.exit(any(statuses))
