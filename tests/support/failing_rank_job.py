"""A rank that ends in the middle of training, run as a program.

    python -m tests.support.failing_rank_job <what> <where> <victim> <hang_timeout>

Args: a key of ``WHAT`` (the way to end), an entry of ``WHERE`` (the point), the rank that ends, and ``hang_timeout`` in
seconds. Each rank is started directly, not by torchrun, so rank 0's process hosts the job's store. The rank that ends
prints the time before it ends. All other ranks are expected to end with an error.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
import zeropp.setup.build

__all__ = ["WHAT", "WHERE"]

WHAT = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": lambda: _fail(),
}
WHERE = ["forward", "backward", "step", "refresh", "wrapping", "first", "random"]
_STEPS = 3  # steps before the rank ends


def _fail() -> None:
    raise ArithmeticError("this rank fails on purpose")


class Net(nn.Module):
    """Layers that call ``inside`` in the middle of forward and in the middle of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))
        self.inside: Callable[[str], None] = lambda where: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                self.inside("forward")
                if x.requires_grad:
                    x.register_hook(lambda grad: self.inside("backward"))
        return x


class Sgd(torch.optim.SGD):
    inside: Callable[[str], None]

    def step(self, closure: Any = None) -> Any:
        self.inside("step")
        super().step(closure)
        self.inside("refresh")


def main(what: str, where: str, victim: int, hang_timeout: float) -> None:
    dist.init_process_group("gloo")
    ends = dist.get_rank() == victim
    step = 0

    def inside(there: str) -> None:
        if ends and there == where and step == _STEPS * (where not in ("wrapping", "first")):
            print("ends", time.time(), flush=True)
            WHAT[what]()

    torch.manual_seed(0)
    model = Net()
    model.inside = inside
    inner = Sgd(model.parameters(), lr=0.01)
    inner.inside = inside
    refuse_cuda_graphs = zeropp.setup.build.refuse_cuda_graphs

    def refuse(*args: Any) -> Any:
        inside("wrapping")
        return refuse_cuda_graphs(*args)

    config = {
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 400, "zero_quantized_weights": True,
            "zero_hpz_partition_size": dist.get_world_size() // 2,
        },
        "zeropp": {"hang_timeout": hang_timeout, "unit_min_blocks": 0},
    }  # fmt: skip
    inside("first")
    with mock.patch.object(zeropp.setup.build, "refuse_cuda_graphs", refuse):
        optimizer = zeropp.ZeroOptimizer(inner, model, config)
    if ends and where == "random":
        delay = random.SystemRandom().uniform(0, 1.0)
        threading.Timer(delay, lambda: (print("ends", time.time(), flush=True), WHAT[what]())).start()
    while step < 1_000_000:
        model(torch.ones(2, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
