"""The process around the training loop: ranks and device, leaving together, and metrics on disk."""

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

INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C


@dataclass
class Job:
    """Who this process is, and its share of the agreement on stopping."""

    rank: int
    world: int
    device: torch.device
    stop_requested: bool = field(default=False, init=False)

    def install_signals(self) -> None:
        """First SIGINT or SIGTERM: leave after the current step. A second one kills at once.

        torchrun keeps the terminal's Ctrl-C to itself and passes the signal on to each rank.
        """

        def request(signum: int, frame: FrameType | None) -> None:
            self.stop_requested = True
            # The default action needs no interpreter, so it works while a rank is stuck inside a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        signal.signal(signal.SIGINT, request)
        signal.signal(signal.SIGTERM, request)

    def agree(self, value: float = 0.0) -> tuple[bool, float]:
        """(has any rank been asked to stop, mean of ``value`` over ranks): the same answer on every rank.

        A rank that left alone would leave the others waiting in the next gather.
        """
        vector = torch.tensor([float(self.stop_requested), value], dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(vector)  # on the CPU, through gloo: does not make the host wait for the device
        return vector[0].item() > 0, vector[1].item() / self.world

    def first(self, value: int) -> int:
        """The first rank's ``value``, on every rank."""
        number = torch.tensor(value)
        if self.world > 1:
            dist.broadcast(number, 0)
        return int(number)


@contextlib.contextmanager
def start_job(plain: bool, patience: float = 600.0) -> Iterator[Job]:
    """Join the process group torchrun describes, if any, and leave it on the way out.

    Args:
        plain: one process, without a group.
        patience: seconds to wait for other ranks before it is an error; ``hang_timeout``, where zeropp trains.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if plain and world > 1:
        raise ValueError(f"--plain trains in one process, and torchrun started {world}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1 and device.type == "cuda":
        # At its timeout NCCL ends the process; the error of zeropp that names ranks has to come before.
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
            # gloo's threads drop tensors of the last collectives, and end the process if Python has ended before.
            time.sleep(0.2)


class Metrics:
    """One JSON object a line, flushed line by line, so that a killed run keeps what it had. Rank 0 only.

    Args:
        path: of the file; None makes one.
        job: whose metrics they are.
        append: go on behind what is there; else the file begins anew.
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
    """Peak so far: of the allocator on CUDA, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
