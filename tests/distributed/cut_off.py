"""A program that saves, and is killed at every system call by which it changes the disk: what is left must load.

Prints how many calls there were. A process of its own, since it forks.
"""

from __future__ import annotations

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
from tests.distributed.checkpoints import train, wrap
from zeropp import checkpoint

CALLS = ("pwrite", "fsync", "ftruncate", "posix_fallocate", "open", "mkdir", "rename", "replace", "unlink", "rmdir")


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


def main(in_place: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept, root = Path(folder) / "kept", Path(folder) / "root"
        scene = Scene(root, in_place)
        shutil.copytree(root, kept)
        number, old, status = 0, 0, -signal.SIGKILL
        while status == -signal.SIGKILL:

            def killed(number: int = number) -> None:
                before_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
                scene.save(2)

            status = in_child(killed)
            assert status in (0, -signal.SIGKILL), status
            step = scene.load()
            old += step == 1
            assert status != 0 or step == 2, "the save has ended, and what is there is older"
            # Again, by a program that was started anew.
            assert in_child(lambda: scene.save(2)) == 0
            assert scene.load() == 2 and not list(root.glob(".*")), list(root.glob(".*"))
            shutil.rmtree(root)
            shutil.copytree(kept, root)
            number += 1
        print(number - 1, old)


if __name__ == "__main__":
    main(in_place=sys.argv[1:] == ["in place"])
