"""Copies between a GPU and its host as offload makes them, compared with bare copies of pinned memory.

    python -m bench.offload.bus --mebibytes 256 --json FILE

The copies are those of one unit: its float32 gradient sum to the host, its bf16 weights to the GPU for a gather, and
new weights to the GPU after a step. Each copy is made with pinned and with pageable host memory, and its result is
checked. Without a CUDA device both sides are host memory, so the numbers have no meaning.
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

import torch
from torch import Tensor, nn

import zeropp
from bench.common.machine import describe, machine
from bench.offload.spans import apart

ROUNDS = 7
RAW = {"to host": "bare copy, to host", "to device": "bare copy, to device"}


@dataclass(frozen=True)
class Way:
    """One way to copy over the bus.

    Attributes:
        direction: "to host" or "to device".
        run: function that copies.
        nbytes: number of bytes copied.
        result: function that returns the target of the copy.
        expected: values of the target after the copy.
    """

    direction: str
    run: Callable[[], object]
    nbytes: int
    result: Callable[[], Tensor]
    expected: Tensor


class Weights(nn.Module):
    """A model with one parameter."""

    def __init__(self, numel: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, numel, device=device))

    def forward(self) -> Tensor:
        return self.weight.float().sum()


def bare(numel: int, device: str) -> dict[str, Way]:
    """Return copies of a unit's float32 elements by the copy engine alone, by name."""
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
    """Return an optimizer of one parameter with offloaded states; ``weights`` offloads the weights for gathers, too."""
    block = {"device": "cpu", "pin_memory": pinned}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": block}
    if weights:
        zero["offload_param"] = block
    model = Weights(numel, device)
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    return zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model, config)


def offloaded(numel: int, device: str, *, pinned: bool, opened: contextlib.ExitStack) -> dict[str, Way]:
    """Return the three copies of a training step with offload, by name."""
    optimizers = [engine_of(numel, device, pinned=pinned, weights=weights) for weights in (True, False)]
    for each in optimizers:
        opened.callback(each.close)
    (away,), (there,) = (optimizer.engine.trainable_buffers for optimizer in optimizers)
    host = optimizers[1]._optimizer_step._host
    gradient, source, new = away.gradient, away.wire_copy, there.wire_copy
    assert gradient is not None and source is not None and new is not None and new.row is not None
    assert host is not None and host._upload_ring is not None
    total = torch.linspace(-2.0, 2.0, gradient.shard.numel(), device=device)
    target = torch.empty(away.shard.numel(), dtype=torch.bfloat16, device=device)
    rounded, row = away.shard.to(torch.bfloat16), new.row.tensor
    staged = host._upload_ring.take_buffer()[: rounded.nbytes].view(torch.bfloat16).copy_(rounded)
    kind = "pinned" if pinned else "pageable"

    def gather() -> None:
        arriving = source.begin_gather(None)
        assert isinstance(arriving, Tensor)  # the row in host memory
        target.copy_(arriving)

    return {
        f"gradient, {kind}": Way(
            "to host", lambda: list(gradient._store(total)), total.nbytes, lambda: gradient.shard, total.cpu()
        ),
        f"weights for a gather, {kind}": Way("to device", gather, target.nbytes, lambda: target, rounded),
        f"new weights, {kind}": Way(
            "to device", lambda: new.take_new_weights(0, staged), row.nbytes, lambda: row, rounded
        ),
    }  # fmt: skip


def seconds(way: Way, device: str) -> float:
    """Return the median time of a call in seconds, with a synchronization before and after the call."""
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
    parser.add_argument("--mebibytes", type=int, default=256, help="MiB of float32 values")
    parser.add_argument("--json", type=Path, help="write seconds and bytes of each way to this file")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numel = given.mebibytes << 18
    print(f"{describe(machine(device))} {given.mebibytes} MiB of float32, median of {ROUNDS}")
    found = {}
    with contextlib.ExitStack() as opened, torch.no_grad():
        if device == "cpu":
            opened.enter_context(apart())
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
