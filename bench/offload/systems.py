"""The systems that ``bench.offload.peers`` compares, built from the same seed, with times of a step's phases."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import zeropp
from bench.common import COMPARED
from bench.common.contestant import Contestant, adamw, over_ranks, samples
from bench.step_time.deepspeed_system import build_deepspeed
from bench.step_time.report import CLIP
from examples.gpt import GPT, GPTConfig
from examples.text_data import Batches

__all__ = ["Phased", "build"]

PHASES = ("forward", "backward", "step")
BLOCK = 256 << 10  # bytes per request; smaller rows stay in memory
TILE = 512 << 10  # elements; each unit must have several tiles, because reading ahead works between tiles


@dataclass
class Phased(Contestant):
    """A system that measures the time of each phase of a step.

    A turn starts with one unmeasured step. The first measured forward then includes the work that the unmeasured step
    has left to it, just as the last measured step leaves work to a forward that is not measured.

    Attributes:
        spent: seconds of this turn's forwards, backwards and ``step()``.
        phases: the same per step, for each measured round.
    """

    spent: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    phases: list[list[float]] = field(default_factory=list)

    def take_turn(self, steps: int, *, measure: bool) -> None:
        self.one_step()
        self.spent = [0.0] * len(PHASES)
        super().take_turn(steps, measure=measure)
        if measure:
            self.phases.append([seconds / steps for seconds in self.spent])
        # Wait for work in flight, so that it does not slow down the next system's turn.
        self.settle()

    def one_step(self) -> None:
        x, y = self.batches.at(self.step)
        moments = [time.perf_counter()]
        with self.precision():
            loss = self.model(x, y)
        moments.append(time.perf_counter())
        self.backward(loss)
        moments.append(time.perf_counter())
        self._clip_and_step()
        self.optimizer.zero_grad()
        moments.append(time.perf_counter())
        if self.name.startswith("deepspeed") and self.step < COMPARED:
            self.norms.append(torch.tensor(float(self.model.get_global_grad_norm())))
        for index in range(len(PHASES)):
            self.spent[index] += moments[index + 1] - moments[index]
        self.losses.append(loss.detach())
        self.step += 1

    def measured(self) -> dict[str, Any]:
        """Return the results for JSON, with ``forward_s``, ``backward_s`` and ``step_call_s`` of the slowest rank."""
        found = super().measured()
        for index, key in enumerate(("forward_s", "backward_s", "step_call_s")):
            found[key] = over_ranks([each[index] for each in self.phases], dist.ReduceOp.MAX)
        return found

    def close(self) -> None:
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            self.optimizer.close()


def build(name: str, args: argparse.Namespace, batches: Batches, folder: Path) -> Phased:
    """Create the model from the seed, and build the system called ``name`` around it.

    Args:
        name: one of ``bench.offload.peers.SYSTEMS``.
        args: parsed arguments of ``bench.offload.peers``.
        batches: batches of this rank.
        folder: folder for files with states.
    """
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(args.vocab, args.layers, args.d_model, args.heads, args.seq_len))
    before = samples(model.parameters())
    if name.startswith("fsdp2"):
        found = _build_fsdp2(name, model, args, batches)
    elif name.startswith("deepspeed"):
        theirs = build_deepspeed(name, model, args, torch.device("cpu"), batches)
        found = Phased(name, theirs.model, theirs.optimizer, batches, theirs.device, theirs.backward, theirs.precision)
    else:
        found = _build_zeropp(name, model, args, batches, folder)
    found.before = before
    return found


def zeropp_blocks(name: str, folder: Path) -> dict[str, Any]:
    """Return the keys of the ``zero_optimization`` block for a zeropp system."""
    files = {"device": "nvme", "nvme_path": str(folder)}
    piped = {**files, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    known: dict[str, dict[str, Any]] = {
        "none": {},
        "cpu": {"offload_optimizer": {"device": "cpu"}},
        "cpu_eager": {"offload_optimizer": {"device": "cpu"}},
        "cpu_part": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "nvme": {"offload_optimizer": piped},
        "nvme_all": {"offload_optimizer": piped, "offload_param": {**files, "max_in_cpu": 0, "buffer_size": TILE}},
    }
    return known[name]


def _build_zeropp(name: str, model: nn.Module, args: argparse.Namespace, batches: Batches, folder: Path) -> Phased:
    # As in FSDP2, weights are not cached between forward and backward.
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "sub_group_size": TILE, **zeropp_blocks(name, folder)}
    config = {
        "zero_optimization": zero,
        "aio": {"block_size": BLOCK},
        "bf16": {"enabled": args.dtype == "bf16"},
        "communication_data_type": args.dtype,
        "gradient_clipping": CLIP,
        "zeropp": {"lazy_step": name != "cpu_eager"},
    }
    optimizer = zeropp.ZeroOptimizer(adamw(model), model, config)
    return Phased(name, model, optimizer, batches, torch.device("cpu"), optimizer.backward, clip=CLIP)


def _build_fsdp2(name: str, model: nn.Module, args: argparse.Namespace, batches: Batches) -> Phased:
    policy = MixedPrecisionPolicy()
    if args.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    # Pinned memory needs an accelerator.
    offload = CPUOffloadPolicy(pin_memory=False) if name == "fsdp2_cpu" else OffloadPolicy()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return Phased(name, model, adamw(model), batches, torch.device("cpu"), clip=CLIP)
