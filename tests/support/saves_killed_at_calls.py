"""A program that saves, and is killed at every system call by which it changes the disk: what is left must load.

    python -m tests.support.saves_killed_at_calls "in place" "all renames" none

For each kind of file system, prints how many calls there were, and after how many the older checkpoint was there. A
process of its own, since it forks.
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
from zeropp.checkpoint import place

CALLS = ("pwrite", "fsync", "ftruncate", "posix_fallocate", "open", "mkdir", "rename", "replace", "unlink", "rmdir")
_MIDDLE = 12  # calls, by which a save has begun to write


def without_renames(files: bool) -> None:
    """Let this process see a file system that renames no folders, nor, unless ``files``, files; it is a stand-in."""
    replace = os.replace

    def refuse(one: Any, other: Any) -> None:
        if os.path.isfile(one) and files:
            return replace(one, other)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    place.exchange_names = lambda one, other: False  # type: ignore[assignment]
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
    """A run that has saved step 1 and is about to save step 2: as another of a series, or in its place."""

    def __init__(self, root: Path, in_place: bool) -> None:
        self.root, self.in_place = root, in_place
        self.model, self.optimizer = wrap("stage 3")
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.advance()
        self.save(1)
        self.advance()

    def advance(self) -> None:
        train(self.model, self.optimizer, [len(self.weights)])
        self.weights[len(self.weights) + 1] = zeropp.full_state(self.model)

    def save(self, step: int) -> None:
        if self.in_place:
            checkpoint.save(self.root / "here", self.model, self.optimizer)
        else:
            checkpoint.Series(self.root, keep=1).save(step, self.model, self.optimizer)

    def load(self) -> int:
        """Load what is there, and say which step it is."""
        model, optimizer = wrap("stage 3")
        if self.in_place:
            checkpoint.load(self.root / "here", model, optimizer)
        else:
            assert checkpoint.Series(self.root).load(model, optimizer) is not None
        state = zeropp.full_state(model)
        (found,) = (s for s, w in self.weights.items() if all(torch.equal(state[n], w[n]) for n in w))
        return found


def run(in_place: bool, renames: str) -> None:
    if renames != "all renames":
        without_renames(files=renames == "files alone")
    with tempfile.TemporaryDirectory() as folder:
        kept, root = Path(folder) / "kept", Path(folder) / "root"
        scene = Scene(root, in_place)
        shutil.copytree(root, kept)
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
            # Again, by programs that were started anew. Where they clear up in the folder itself, the first is killed.
            if renames != "all renames":
                in_child(lambda: killed(_MIDDLE))
                scene.load()
            assert in_child(lambda: scene.save(2)) == 0
            left = [each for each in root.rglob("*") if each.name.startswith(".")]
            assert scene.load() == 2 and not left, left
            names = [each.name for each in root.rglob("*.safetensors")]
            assert len(names) == 1, names
            shutil.rmtree(root)
            shutil.copytree(kept, root)
            number += 1
        print(number - 1, old, flush=True)


if __name__ == "__main__":
    # What torch imports with the first optimizer would be imported by every process.
    make_optimizer(Model())
    # Each in a process of its own, which may change what system calls do.
    statuses = [in_child(lambda renames=renames: run(sys.argv[1] == "in place", renames)) for renames in sys.argv[2:]]
    sys.exit(any(statuses))
