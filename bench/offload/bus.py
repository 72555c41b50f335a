"""Copies between a card and its host as offload makes them, through rings or not, beside bare ones of pinned memory.

    python -m bench.offload.bus --mebibytes 256 --json FILE

Of one unit of so many MiB in float32: its sum of gradients on the way to the host, its bf16 weights to the card for a
gather, and new weights to the card after a step, from pinned rings and from pageable ones. What arrives is looked at.
Without a CUDA device there is no bus: then the host's memory stands for both sides, and the figures say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor, nn

import zeropp
from bench.common.machine import describe, machine
from zeropp.offload import tier_choice
from zeropp.offload.storage_tiers import HostMemory

ROUNDS = 7
RAW = {"to host": "bare copy, to host", "to device": "bare copy, to device"}


@dataclass(frozen=True)
class Way:
    """One way over the bus.

    Attributes:
        direction: "to host" or "to device".
        run: goes it.
        nbytes: that cross.
        result: what has arrived, and ``expected`` what should have.
    """

    direction: str
    run: Callable[[], object]
    nbytes: int
    result: Callable[[], Tensor]
    expected: Tensor


class Weights(nn.Module):
    """One parameter."""

    def __init__(self, numel: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, numel, device=device))

    def forward(self) -> Tensor:
        return self.weight.float().sum()


def bare(numel: int, device: str) -> dict[str, Way]:
    """Copies of as many float32 elements as a unit has, by the copy engine alone."""
    here = torch.linspace(-1.0, 1.0, numel, device=device)
    host = torch.empty(numel, pin_memory=device == "cuda")
    back = torch.empty(numel, device=device)
    return {
        RAW["to host"]: Way(
            "to host", lambda: host.copy_(here, non_blocking=True), here.nbytes, lambda: host, here.cpu()
        ),
        RAW["to device"]: Way(
            "to device", lambda: back.copy_(host, non_blocking=True), here.nbytes, lambda: back, here.cpu()
        ),
    }


def engine_of(numel: int, device: str, *, pinned: bool, weights: bool) -> zeropp.ZeroOptimizer:
    """An engine of one parameter, whose states are off the device, and with ``weights`` what gathers begin with."""
    block = {"device": "cpu", "pin_memory": pinned}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": block}
    if weights:
        zero["offload_param"] = block
    model = Weights(numel, device)
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    return zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model, config)


def offloaded(numel: int, device: str, *, pinned: bool, opened: contextlib.ExitStack) -> dict[str, Way]:
    """The three copies of a step."""
    optimizers = [engine_of(numel, device, pinned=pinned, weights=weights) for weights in (True, False)]
    for each in optimizers:
        opened.callback(each.close)
    (away,), (there,) = (optimizer.engine.trainable_buffers for optimizer in optimizers)
    gradient, source, new = away.gradient, away.wire_copy, there.wire_copy
    assert gradient is not None and source is not None and new is not None and new.row is not None
    total = torch.linspace(-2.0, 2.0, gradient.shard.numel(), device=device)
    target = torch.empty(away.shard.numel(), dtype=torch.bfloat16, device=device)
    rounded, row = away.shard.to(torch.bfloat16), new.row.tensor
    kind = "pinned" if pinned else "pageable"

    def gather() -> None:
        arriving = source.begin_gather(None)
        assert not isinstance(arriving, Tensor)
        arriving.copy_to(target)

    return {
        f"gradient, {kind} ring": Way(
            "to host", lambda: gradient._store(total), total.nbytes, lambda: gradient.shard, total.cpu()
        ),
        f"weights for a gather, {kind} ring": Way("to device", gather, target.nbytes, lambda: target, rounded),
        f"new weights, {kind} ring": Way(
            "to device", lambda: new.take_new_weights(0, there.shard), row.nbytes, lambda: row, rounded
        ),
    }  # fmt: skip


def seconds(way: Way, device: str) -> float:
    """Median of a call, between two synchronisations."""
    taken = []
    for _ in range(ROUNDS + 2):
        begin = time.perf_counter()
        way.run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of float32 values")
    parser.add_argument("--json", type=Path, help="write seconds and bytes by way to this file")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numel = given.mebibytes << 18
    print(f"{describe(machine(device))} {given.mebibytes} MiB of float32, median of {ROUNDS}")
    found = {}
    with contextlib.ExitStack() as opened, torch.no_grad():
        if device == "cpu":
            opened.enter_context(mock.patch.object(tier_choice, "host_memory", lambda _: HostMemory()))
        ways = bare(numel, device)
        for pinned in (True, False):
            ways |= offloaded(numel, device, pinned=pinned, opened=opened)
        for name, way in ways.items():
            way.result().fill_(float("nan"))
            took = seconds(way, device)
            if not torch.equal(way.result().cpu(), way.expected):
                raise SystemExit(f"{name}: other values arrived than were sent")
            found[name] = {"seconds": took, "bytes": way.nbytes, "direction": way.direction}
            print(f"{name:<40} {1e3 * took:8.2f} ms {way.nbytes / took / 1e9:7.2f} GB/s")
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
