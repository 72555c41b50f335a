"""``Contestant``: one system of a comparison, with its model, optimizer and measurements behind one interface.

All systems copy their inputs from pinned memory (``examples.text_data.on_device``). A copy from pageable memory would
make the host wait for the GPU at every micro-batch, and would hide the advantage of systems that issue work early.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zeropp
from bench.common import COMPARED, RATE, WARM_UP
from bench.common.namespaces import sent_bytes
from examples.text_data import Batches, on_device
from zeropp._compat import all_gather_single

__all__ = ["ADAMW", "LIKE_FSDP2", "Contestant", "adamw", "meet", "over_ranks", "samples"]

ADAMW = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
PERSISTENT_NUMEL = 100_000  # default of stage3_param_persistence_threshold
SAMPLES = 1024  # number of elements of a parameter that are compared, about
LIKE_FSDP2 = ("zeropp", "zeropp_clipped")
"""zeropp systems that gather as FSDP2 does by default: each unit twice per step, without cached weights."""


@dataclass
class Contestant:
    """One system: its model and optimizer, and the measurements of its turns."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    device: torch.device
    backward: Callable[[Tensor], None] = torch.Tensor.backward
    precision: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    micro_batches: int = 1  # number of backwards before each optimizer step
    predicted: dict[str, int] = field(default_factory=dict)  # terms of zeropp.plan.memory, in bytes
    rate: float = RATE  # peak learning rate
    clip: float | None = None  # largest gradient norm; optimizers with an attribute grad_norm clip by themselves
    norms: list[Tensor] = field(default_factory=list)  # gradient norms of the first steps before clipping
    weights: Callable[[], Iterable[Tensor]] | None = None  # full main weights; None: the optimizer's parameters
    before: Tensor | None = None  # samples of the initial weights
    step: int = 0
    losses: list[Tensor] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)  # seconds per step, one entry per measured round
    host_s: list[float] = field(default_factory=list)  # seconds per step until the host has issued all work
    cpu_s: list[float] = field(default_factory=list)  # CPU seconds per step, of all threads of this rank
    wire: list[float] = field(default_factory=list)  # bytes per step over the loopback, all ranks together
    ledger_steps: int = 0
    ledger_calls: Counter[str] = field(default_factory=Counter)  # zeropp: number of gathers by "unit hop"
    ledger_bytes: int = 0
    kept: list[str] | None = None  # zeropp: large parameters that are unsharded between forward and backward

    def take_turn(self, steps: int, *, measure: bool) -> None:
        """Run ``steps`` optimizer steps, with all ranks synchronized before and after; store times if ``measure``."""
        calls, sent = self._ledger()
        meet(self.device)
        wire, cpu, wall = wire_bytes(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.one_step()
        host = time.perf_counter() - wall
        meet(self.device)
        wall, cpu, wire = time.perf_counter() - wall, time.process_time() - cpu, wire_bytes() - wire
        if not measure:
            return
        self.wall_s.append(wall / steps)
        self.host_s.append(host / steps)
        self.cpu_s.append(cpu / steps)
        self.wire.append(wire / steps)
        calls_now, sent_now = self._ledger()
        self.ledger_calls.update(calls_now - calls)
        self.ledger_bytes += sent_now - sent
        self.ledger_steps += steps

    def one_step(self) -> None:
        """Run forward, backward and optimizer step, with one or several micro-batches."""
        for micro in range(self.micro_batches):
            loss = self.forward(micro)
            if self.step == 0 and self.name in LIKE_FSDP2:
                self.kept = whole_parameters(self.model)
            self.backward(loss)
        self.finish_step(loss)

    def forward(self, micro: int = 0) -> Tensor:
        """Return the loss of one micro-batch of the next step."""
        x, y = on_device(self.batches.at(self.step * self.micro_batches + micro), self.device)
        with self.precision():
            return self.model(x, y)

    def finish_step(self, loss: Tensor) -> None:
        """Clip, step and drop gradients after the last backward of a step; ``loss`` is that of the last micro-batch."""
        self._clip_and_step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.step += 1

    def _clip_and_step(self) -> None:
        if self.step < WARM_UP:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * (self.step + 1) / WARM_UP
        if self.clip is None:
            self.optimizer.step()
        elif hasattr(type(self.optimizer), "grad_norm"):  # look at the class: reading the norm would wait for the GPU
            self.optimizer.step()
            # Read the norm in the first steps only, because the host waits for the GPU when it reads the norm.
            if self.step < COMPARED:
                self.norms.append(torch.tensor(float(self.optimizer.grad_norm)))
        else:
            norm = nn.utils.clip_grad_norm_(self._stepped(), self.clip)
            if self.step < COMPARED:
                # FSDP2's norm is a DTensor; full_tensor() sums the ranks' parts.
                self.norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            self.optimizer.step()

    def samples(self) -> Tensor:
        """Return some elements of every main weight, float32 on the CPU, in the order of ``before``. Collective."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            state = zeropp.full_state(self.model, cpu_offload=False)
            return samples(state[name] for name, _ in self.model.named_parameters())
        return samples(self._stepped() if self.weights is None else self.weights())

    def _stepped(self) -> list[Tensor]:
        """Return the parameters that the optimizer steps, in the model's order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def settle(self) -> None:
        """Wait for communication that a step leaves in flight, such as zeropp's refresh of cached weights."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            self.optimizer.engine.wait_for_refresh()

    def _ledger(self) -> tuple[Counter[str], int]:
        """Return the number of gathers by unit and hop, and the bytes sent; empty for systems without a ledger."""
        if self.name not in LIKE_FSDP2:
            return Counter(), 0
        found = zeropp.comm_report(self.model)
        calls = Counter({f"{row.unit} {row.hop}": row.calls for row in found.rows if row.kind == "gather"})
        return calls, found.total_bytes

    def measured(self) -> dict:
        """Return the results for JSON, over all ranks: times of the slowest rank, mean losses. Collective."""
        result = {
            "step_s": over_ranks(self.wall_s, dist.ReduceOp.MAX),
            "host_s": over_ranks(self.host_s, dist.ReduceOp.MAX),
            "cpu_s": [s / dist.get_world_size() for s in over_ranks(self.cpu_s, dist.ReduceOp.SUM)],
            "losses": [
                loss / dist.get_world_size()
                for loss in over_ranks(torch.stack(self.losses).cpu().tolist(), dist.ReduceOp.SUM)
            ],
            "norms": torch.stack(self.norms).tolist() if self.norms else None,
            "wire_bytes": self.wire if os.environ.get("STEP_TIME_WIRE") == "private" else None,
        }
        if self.name in LIKE_FSDP2:
            steps = max(1, self.ledger_steps)
            result["ledger_bytes"] = self.ledger_bytes / steps
            result["gathers_per_step"] = {key: n / steps for key, n in self.ledger_calls.items()}
            result["kept_after_forward"] = self.kept
            result["predicted_bytes"] = self.predicted
        return result


def adamw(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{**ADAMW, "lr": rate})


def samples(parameters: Iterable[Tensor]) -> Tensor:
    """Return evenly spaced elements of every parameter, float32 on the CPU. Collective for DTensors."""
    found = []
    for each in parameters:
        whole = _whole(each) if isinstance(each, DTensor) else each
        found.append(whole.detach().flatten()[:: max(1, whole.numel() // SAMPLES)].float().cpu())
    return torch.cat(found)


def _whole(parameter: DTensor) -> Tensor:
    """Return the full tensor of a parameter that FSDP2 has sharded by rows.

    ``DTensor.full_tensor`` uses collectives that the staged backend does not have.
    """
    local = parameter.detach().to_local()
    divided = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    if not divided:
        return local
    group = parameter.device_mesh.get_group(divided[0])
    rows = -(-parameter.size(0) // group.size())
    own = local.new_zeros(rows, *local.shape[1:])
    own[: local.size(0)] = local
    every = own.new_empty(rows * group.size(), *own.shape[1:])
    all_gather_single(every, own, group=group)
    return every[: parameter.size(0)]


def whole_parameters(model: nn.Module) -> list[str]:
    """Return the names of large parameters that are unsharded; zeropp's sharded parameters have another class."""
    large = ((name, p) for name, p in model.named_parameters() if p.numel() > PERSISTENT_NUMEL)
    return [name for name, p in large if type(p) is nn.Parameter]


def meet(device: torch.device) -> None:
    """Wait for the device, and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))  # a CPU tensor, so gloo reduces it on every device


def wire_bytes() -> int:
    return sent_bytes("lo") if os.environ.get("STEP_TIME_WIRE") == "private" else 0


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    vector = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(vector, op=op)
    return vector.tolist()
