"""One system of a comparison: its model and optimizer, driven through one interface, and what its turns took.

All of them get their inputs from pinned memory without waiting (``examples.text_data.on_device``): with pageable ones
the host waits for the card at every micro-batch, and a system that issues its work early looks like one that does not.
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
PERSISTENT_NUMEL = 100_000  # the default of stage3_param_persistence_threshold
SAMPLES = 1024  # elements of a parameter that are compared
LIKE_FSDP2 = ("zeropp", "zeropp_clipped")
"""Those of ours that place what FSDP2's defaults place: each unit is fetched twice a step, and nothing is kept."""


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
    rate: float = RATE  # peak of the learning rate
    clip: float | None = None  # largest norm of gradients; an optimizer that has a grad_norm clips by itself
    norms: list[Tensor] = field(default_factory=list)  # where gradients are clipped: before that, of the first steps
    weights: Callable[[], Iterable[Tensor]] | None = None  # whole main weights; default: the optimizer's parameters
    before: Tensor | None = None  # samples of the weights that training began with
    step: int = 0
    losses: list[Tensor] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)  # seconds a step, one entry a measured round
    host_s: list[float] = field(default_factory=list)  # of them, until the host has issued the last
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
        """Forward, backward and optimizer step on the next batch, or on several of it."""
        for micro in range(self.micro_batches):
            loss = self.forward(micro)
            if self.step == 0 and self.name in LIKE_FSDP2:
                self.kept = whole_parameters(self.model)
            self.backward(loss)
        self.finish_step(loss)

    def forward(self, micro: int = 0) -> Tensor:
        """The loss of one micro-batch of the next step."""
        x, y = on_device(self.batches.at(self.step * self.micro_batches + micro), self.device)
        with self.precision():
            return self.model(x, y)

    def finish_step(self, loss: Tensor) -> None:
        """The rest of a step after its last backward, which was that of ``loss``."""
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
        elif hasattr(type(self.optimizer), "grad_norm"):  # its class is asked: to read the norm is to wait for it
            self.optimizer.step()
            # Not at every step: on a card the host waits for it.
            if self.step < COMPARED:
                self.norms.append(torch.tensor(float(self.optimizer.grad_norm)))
        else:
            norm = nn.utils.clip_grad_norm_(self._stepped(), self.clip)
            if self.step < COMPARED:
                # Each rank has a part of FSDP2's norm.
                self.norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            self.optimizer.step()

    def samples(self) -> Tensor:
        """Some elements of every main weight, float32 on the CPU, in the order of ``before``. Collective."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            state = zeropp.full_state(self.model, cpu_offload=False)
            return samples(state[name] for name, _ in self.model.named_parameters())
        return samples(self._stepped() if self.weights is None else self.weights())

    def _stepped(self) -> list[Tensor]:
        """Parameters that the optimizer steps, in the order of the model's."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def settle(self) -> None:
        """Wait for what a step has left on its way: zeropp renews kept weights after it."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            self.optimizer.engine.wait_for_refresh()

    def _ledger(self) -> tuple[Counter[str], int]:
        """(gathers so far by unit and hop, bytes sent so far); empty for the peers, which keep no ledger."""
        if self.name not in LIKE_FSDP2:
            return Counter(), 0
        found = zeropp.comm_report(self.model)
        calls = Counter({f"{row.unit} {row.hop}": row.calls for row in found.rows if row.kind == "gather"})
        return calls, found.total_bytes

    def measured(self) -> dict:
        """What JSON can hold, agreed over ranks: times of the slowest, mean losses. Collective."""
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
    """Elements of every parameter, evenly spread, float32 on the CPU. Collective where they are DTensors."""
    found = []
    for each in parameters:
        whole = _whole(each) if isinstance(each, DTensor) else each
        found.append(whole.detach().flatten()[:: max(1, whole.numel() // SAMPLES)].float().cpu())
    return torch.cat(found)


def _whole(parameter: DTensor) -> Tensor:
    """All rows of a parameter that FSDP2 has divided. ``full_tensor`` asks for what the staged backend has not."""
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
