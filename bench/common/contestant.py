"""One system of a comparison: its model and optimizer, driven through one interface, and what its turns took."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from bench.common.namespaces import sent_bytes
from examples.text_data import Batches

__all__ = ["ADAMW", "Contestant", "adamw", "meet", "over_ranks"]

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
PERSISTENT_NUMEL = 100_000  # the default of stage3_param_persistence_threshold


@dataclass
class Contestant:
    """One system: its model and optimizer, and what its turns took."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    device: torch.device
    backward: Callable[[Tensor], None] = torch.Tensor.backward
    precision: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    micro_batches: int = 1  # backwards before each optimizer step
    predicted: dict[str, int] = field(default_factory=dict)  # terms of zeropp.plan.memory, bytes
    step: int = 0
    losses: list[Tensor] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)  # seconds a step, one entry a measured round
    cpu_s: list[float] = field(default_factory=list)  # of all threads of this rank
    wire: list[float] = field(default_factory=list)  # bytes a step over the loopback, all ranks together
    ledger_steps: int = 0
    ledger_calls: Counter[str] = field(default_factory=Counter)  # zeropp: gathers by "unit hop"
    ledger_bytes: int = 0
    kept: list[str] | None = None  # zeropp: large parameters still whole between forward and backward

    def take_turn(self, steps: int, *, measure: bool) -> None:
        """Run ``steps`` optimizer steps between two meetings of all ranks; keep what they took if ``measure``."""
        calls, sent = self._ledger()
        meet(self.device)
        wire, cpu, wall = wire_bytes(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.one_step()
        meet(self.device)
        wall, cpu, wire = time.perf_counter() - wall, time.process_time() - cpu, wire_bytes() - wire
        if not measure:
            return
        self.wall_s.append(wall / steps)
        self.cpu_s.append(cpu / steps)
        self.wire.append(wire / steps)
        calls_now, sent_now = self._ledger()
        self.ledger_calls.update(calls_now - calls)
        self.ledger_bytes += sent_now - sent
        self.ledger_steps += steps

    def one_step(self) -> None:
        """Forward, backward and optimizer step on the next batch, or on several of it."""
        for micro in range(self.micro_batches):
            x, y = self.batches.at(self.step * self.micro_batches + micro)
            with self.precision():
                loss = self.model(x.to(self.device), y.to(self.device))
            if self.step == 0 and self.name == "zeropp":
                self.kept = whole_parameters(self.model)
            self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.step += 1

    def settle(self) -> None:
        """Wait for what a step has left on its way: zeropp renews kept weights after it."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            self.optimizer.engine.refresh.wait()

    def _ledger(self) -> tuple[Counter[str], int]:
        """(gathers so far by unit and hop, bytes sent so far); empty for the peers, which keep no ledger."""
        if self.name != "zeropp":
            return Counter(), 0
        found = zeropp.comm_report(self.model)
        calls = Counter({f"{row.unit} {row.hop}": row.calls for row in found.rows if row.kind == "gather"})
        return calls, found.total_bytes

    def measured(self) -> dict:
        """What JSON can hold, agreed over ranks: times of the slowest, mean losses. Collective."""
        result = {
            "step_s": over_ranks(self.wall_s, dist.ReduceOp.MAX),
            "cpu_s": [s / dist.get_world_size() for s in over_ranks(self.cpu_s, dist.ReduceOp.SUM)],
            "losses": [
                loss / dist.get_world_size()
                for loss in over_ranks(torch.stack(self.losses).cpu().tolist(), dist.ReduceOp.SUM)
            ],
            "wire_bytes": self.wire if os.environ.get("STEP_TIME_WIRE") == "private" else None,
        }
        if self.name == "zeropp":
            steps = max(1, self.ledger_steps)
            result["ledger_bytes"] = self.ledger_bytes / steps
            result["gathers_per_step"] = {key: n / steps for key, n in self.ledger_calls.items()}
            result["kept_after_forward"] = self.kept
            result["predicted_bytes"] = self.predicted
        return result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def whole_parameters(model: nn.Module) -> list[str]:
    """Names of large parameters whose values are present. zeropp gives released ones a class of their own."""
    large = ((name, p) for name, p in model.named_parameters() if p.numel() > PERSISTENT_NUMEL)
    return [name for name, p in large if type(p) is nn.Parameter]


def meet(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))  # on the CPU: gloo with every device


def wire_bytes() -> int:
    return sent_bytes("lo") if os.environ.get("STEP_TIME_WIRE") == "private" else 0


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    vector = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(vector, op=op)
    return vector.tolist()
