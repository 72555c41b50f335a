"""The process around the training loop: its rank and device, a common stop on signals, and a file of metrics."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch
import torch.distributed as dist

INTERRUPTED = 130  # exit status that shells use for a command stopped by Ctrl-C


@dataclass
class Job:
    """This process's rank, the world size, the device, and True in ``stop_requested`` after a signal to stop."""

    rank: int
    world: int
    device: torch.device
    stop_requested: bool = field(default=False, init=False)

    def install_signals(self) -> None:
        """Stop after the current step on the first SIGINT or SIGTERM; a second signal kills the process at once.

        torchrun handles Ctrl-C itself and forwards the signal to each rank.
        """

        def request(signum: int, frame: FrameType | None) -> None:
            self.stop_requested = True
            # Restore the default handlers: they end the process even while Python is blocked inside a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        signal.signal(signal.SIGINT, request)
        signal.signal(signal.SIGTERM, request)

    def agree(self, value: float = 0.0) -> tuple[bool, float]:
        """Return True if any rank got a signal to stop, and the mean of ``value`` over ranks. Collective.

        All ranks get the same result, so they leave the loop after the same step. A rank that left earlier would make
        the others wait for it in the next gather.
        """
        vector = torch.tensor([float(self.stop_requested), value], dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(vector)  # a CPU tensor, reduced by gloo, so the host does not wait for the GPU
        return vector[0].item() > 0, vector[1].item() / self.world

    def first(self, value: int) -> int:
        """Return rank 0's ``value`` on every rank. Collective."""
        number = torch.tensor(value)
        if self.world > 1:
            dist.broadcast(number, 0)
        return int(number)


@contextlib.contextmanager
def start_job(plain: bool, patience: float = 600.0) -> Iterator[Job]:
    """Context with a `Job`. Creates the process group that torchrun describes, if any, and destroys it at the end.

    Args:
        plain: True to require a single process.
        patience: timeout of gloo's collectives in seconds. With zeropp, its ``hang_timeout``.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if plain and world > 1:
        raise ValueError(f"--plain trains in one process, and torchrun started {world}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1 and device.type == "cuda":
        # NCCL kills the process at its timeout. Twice the patience lets zeropp raise its error, which names the missing
        # ranks, before that.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=2 * patience))
    elif world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    job = Job(int(os.environ.get("RANK", "0")), world, device)
    job.install_signals()
    try:
        yield job
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            # Without this pause, the process may crash at exit: gloo's threads still free tensors of the last
            # collectives when Python has shut down.
            time.sleep(0.2)


class Metrics:
    """File of metrics with one JSON object per line; only rank 0 writes. Each line is flushed at once.

    Args:
        path: path of the file; None for ``runs/<time>/metrics.jsonl``.
        job: this process's rank.
        append: True to append to an existing file; False to replace it.
    """

    def __init__(self, path: Path | None, job: Job, append: bool = False) -> None:
        self.path: Path | None = None
        self._file: TextIO | None = None
        if job.rank == 0:
            stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
            self.path = path or Path("runs") / stamp / "metrics.jsonl"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a" if append else "w")

    def write(self, event: str, **values: object) -> None:
        if self._file:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


def memory_bytes(device: torch.device) -> int:
    """Return the peak of allocated memory in bytes: of torch's allocator on CUDA, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
