"""The systems step_time.py compares, each built from the same seed and driven through one interface."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from step_time_net import loopback_bytes
from text_data import Batches
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zeropp
import zeropp.fsdp2

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
PERSISTENT_NUMEL = 100_000  # the default of stage3_param_persistence_threshold


class AllToAllReduceScatter(ReduceScatter):
    """A reduce-scatter as an all-to-all and a local sum in fp32.

    gloo's own reduce-scatter sends what an all-reduce sends, twice what is needed. In FSDP2's hands this one shows
    how much of a difference to zeropp is only that.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) or async_op:
            raise ValueError(f"expected a synchronous SUM or AVG, got op={op}, async_op={async_op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = received.view(group.size(), -1).sum(dim=0, dtype=torch.float32)  # [ranks, shard] -> [shard]
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)
        return None


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
            self.optimizer.engine.refresh.settle()

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
            "step_s": _over_ranks(self.wall_s, dist.ReduceOp.MAX),
            "cpu_s": [s / dist.get_world_size() for s in _over_ranks(self.cpu_s, dist.ReduceOp.SUM)],
            "losses": [
                loss / dist.get_world_size()
                for loss in _over_ranks(torch.stack(self.losses).cpu().tolist(), dist.ReduceOp.SUM)
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


def build(name: str, args: argparse.Namespace, device: torch.device, batches: Batches) -> Contestant:
    """Create the model from the seed and hand it to the system called ``name``."""
    torch.manual_seed(args.seed)
    with device:
        model = GPT(GPTConfig(256, args.layers, args.d_model, args.heads, args.seq_len))
    if name.startswith("ddp"):
        return _build_ddp(name, model, args, device, batches)
    if name.startswith("zeropp"):
        return _build_zeropp(name, model, args, device, batches)
    if name.startswith("deepspeed"):
        from deepspeed_system import build_deepspeed  # it knows this module

        return build_deepspeed(name, model, args, device, batches)
    return _build_fsdp2(name, model, args, device, batches)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def _build_ddp(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    # DDP has no mixed precision of its own; in bf16 it computes under autocast and reduces fp32 gradients.
    precision = contextlib.nullcontext
    if args.dtype == "bf16":
        precision = partial(torch.autocast, device.type, torch.bfloat16)
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(wrapped)
    if name == "ddp_zero1":
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), type(optimizer), **ADAMW)
    return Contestant(name, wrapped, optimizer, batches, device, precision=precision)


def _build_fsdp2(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    policy = MixedPrecisionPolicy()
    if args.dtype != "fp32" or args.reduce_dtype != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=DTYPES[args.reduce_dtype])
    half = ranks_per_node(args)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    if name == "hsdp":
        shape = (dist.get_world_size() // half, half)
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=half if name == "fsdp2_hpz" else None)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if name == "fsdp2_a2a":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(AllToAllReduceScatter())
    if name == "fsdp2_two_hop":  # plain values, over our hops
        zeropp.fsdp2.apply(model, weights=None, gradient_bits=None, local_world_size=half)
    if name == "fsdp2_pp":
        zeropp.fsdp2.apply(model, local_world_size=half)
    return Contestant(name, model, adamw(model), batches, device)


def _build_zeropp(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    half = ranks_per_node(args)
    base, _, times = name.partition("_x")
    zero, own = zeropp_modes(half)[base]
    micro_batches = int(times or 1)
    config = {
        # Nothing is kept from forward to backward, as in FSDP2; parameters below the default threshold are whole.
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, **zero},
        "zeropp": {
            "local_world_size": half if name != "zeropp" else None, "defer_cross_reduction": micro_batches > 1, **own
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "communication_data_type": args.reduce_dtype,
        "gradient_accumulation_steps": micro_batches,
    }  # fmt: skip
    predicted = zeropp.plan.memory(model, config, dist.get_world_size(), half if name != "zeropp" else None).terms
    optimizer = zeropp.ZeroOptimizer(adamw(model), model, config)
    return Contestant(
        name, model, optimizer, batches, device, backward=optimizer.backward, predicted=dict(predicted),
        micro_batches=micro_batches,
    )  # fmt: skip


def ranks_per_node(args: argparse.Namespace) -> int:
    """As given; else the ranks are halved, as if on two nodes."""
    return getattr(args, "local", None) or dist.get_world_size() // 2


def zeropp_modes(local: int) -> dict[str, tuple[dict[str, object], dict[str, object]]]:
    """Keys of the zero block and of the zeropp block for each of our contestants; "_x4" behind one accumulates."""
    hpz = {"zero_hpz_partition_size": local}
    gradients = {"zero_quantized_gradients": True}
    quantized = {**hpz, **gradients, "zero_quantized_weights": True}
    loco = {"zeropp_loco_param": {}}
    return {
        "zeropp": ({}, {}),
        "zeropp_s0": ({"stage": 0}, {}),
        "zeropp_s1": ({"stage": 1}, {}),
        "zeropp_s2": ({"stage": 2}, {}),
        "zeropp_s3": ({}, {}),
        "zeropp_hpz": (hpz, {}),
        "zeropp_mics": ({"mics_shard_size": local}, {}),
        "zeropp_pp": (quantized, {}),
        "zeropp_pp_loco": ({**quantized, **loco}, {}),
        "zeropp_delta4": ({**hpz, **gradients, **loco}, {"weight_codec": "delta4"}),
        "zeropp_lossless": ({**hpz, **gradients, **loco}, {"weight_codec": "lossless"}),
    }


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
    return loopback_bytes() if os.environ.get("STEP_TIME_WIRE") == "private" else 0


def _over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    vector = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(vector, op=op)
    return vector.tolist()


class MemoryMeter:
    """Peak bytes since it was made, above what was in use then. For a process that runs one system only."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing torch
        self.start = self._peak()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def peak_bytes(self) -> int:
        """Of the rank that needs most. Collective."""
        return int(_over_ranks([float(self._peak() - self.start)], dist.ReduceOp.MAX)[0])
