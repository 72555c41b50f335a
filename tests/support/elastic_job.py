"""The example as a rank of an elastic job that stops at a chosen point; a program that torchrun starts.

    torchrun ... --module tests.support.elastic_job <arguments of train_gpt.py>

The environment variable ``HOLD`` names the point. "step 7" is the middle of the backward of the rank's seventh step.
"save 8" is the moment when this rank has written its files of the checkpoint of step 8 and the checkpoint is not yet
complete. At the point, the rank creates the file ``HELD`` and waits forever. A rank without others takes ``ALONE``
steps and waits there until a signal asks it to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import text_data
import torch
import train_gpt
from gpt import GPT
from torch import Tensor

from zeropp.checkpoint import saving

__all__ = ["ALONE"]

ALONE = 4  # steps that a rank without others takes before it waits


def hold() -> None:
    """Create the file ``HELD`` and wait forever."""
    Path(os.environ["HELD"]).touch()
    threading.Event().wait()


def held_in_backward(step: int) -> Callable[..., Tensor]:
    """Return a replacement of ``GPT.forward`` whose backward stops in the middle of a step.

    Calls are counted from 1. Each step has one micro-step, so the number of the call is the number of the step.
    """
    forward, done = GPT.forward, 0

    def held(model: GPT, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        nonlocal done
        if torch.is_grad_enabled():
            done += 1
            if done == step:
                model.blocks[0].register_forward_hook(lambda _, __, out: out.register_hook(lambda _: hold()) and None)
        return forward(model, tokens, targets)

    return held


def held_while_saving(step: int) -> Callable[..., Any]:
    """Return a replacement of ``write_files`` that does not return when the checkpoint of a step is written."""
    write = saving.write_files

    def held(folder: Path, *rest: Any) -> Any:
        written = write(folder, *rest)
        if f"step-{step:08d}" in folder.name:
            hold()
        return written

    return held


def waits_alone() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a replacement of ``Batches.at`` that waits after ``ALONE`` steps of a single rank."""
    at, first = text_data.Batches.at, None

    def waits(batches: text_data.Batches, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        nonlocal first
        first = step if first is None else first
        # The example's handler of the first stop signal restores the default actions, which ends this wait.
        while batches.world == 1 and step >= first + ALONE and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            time.sleep(0.01)
        return at(batches, step, micro)

    return waits


def main() -> int:
    where, _, step = os.environ.get("HOLD", "").partition(" ")
    patches = [mock.patch.object(text_data.Batches, "at", waits_alone())]
    if where == "step":
        patches.append(mock.patch.object(GPT, "forward", held_in_backward(int(step))))
    elif where == "save":
        patches.append(mock.patch.object(saving, "write_files", held_while_saving(int(step))))
    for patch in patches:
        patch.start()
    return train_gpt.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
