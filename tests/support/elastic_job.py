"""The example as a rank of an elastic job that stands still where a test wants it to; run as a program by torchrun.

    torchrun ... --module tests.support.elastic_job <arguments of train_gpt.py>

``HOLD`` in the environment, "step 7" or "save 8", is where: in the middle of a step's backward, or when this rank's
part of a checkpoint is on the disk and the checkpoint is not complete. Then the file ``HELD`` appears. A rank that is
alone takes a few steps, and the next one when it is asked to stop.
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

ALONE = 4  # steps that a rank takes alone before it waits


def hold() -> None:
    """Stand still for ever, and say so."""
    Path(os.environ["HELD"]).touch()
    threading.Event().wait()


def held_in_backward(step: int) -> Callable[..., Tensor]:
    """``GPT.forward``, whose backward stands still in the middle at a step; of one micro-step each."""
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
    """``write_files``, which does not return at a step."""
    write = saving.write_files

    def held(folder: Path, *rest: Any) -> Any:
        written = write(folder, *rest)
        if f"step-{step:08d}" in folder.name:
            hold()
        return written

    return held


def waits_alone() -> Callable[..., tuple[Tensor, Tensor]]:
    """``Batches.at``, which waits where a single rank has taken some steps."""
    at, first = text_data.Batches.at, None

    def waits(batches: text_data.Batches, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        nonlocal first
        first = step if first is None else first
        # A job that has been asked to stop leaves the next signal to the system.
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
