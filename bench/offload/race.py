"""Training steps with offload, compared with FSDP2's: time, exposed part of the host's step, memory of GPU and host.

    python -m bench.offload.race --system cpu --device cuda --layers 20 --d-model 2048 --heads 16 --json FILE

A process runs one system, with the environment variables of a rank. Steps on the host are measured in two ways, in
turns: hidden behind the next forward ("lazy"), and waited for in ``step()`` ("eager"). The exposed time is the time of
a step and the next forward, minus the time of a forward that waits for nothing. With s_i = time of unit i's step and
f = time of a unit's forward, at least max(0, max over i of (s_0 + ... + s_i - i * f)) is exposed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import zeropp
from bench.checkpoint.ranks import resident
from bench.common import peak_rate
from bench.common.contestant import adamw, meet
from bench.common.flags import add_model_flags
from bench.offload.spans import DOWN, STEP, UP, Spans
from bench.offload.unit_steps import bound, unit_steps
from bench.step_time.ranks import join
from bench.step_time.report import CLIP
from bench.step_time.systems import MemoryMeter
from examples.gpt import GPT, GPTConfig
from examples.text_data import Batches, load_text, on_device

__all__ = ["BLOCKS", "SYSTEMS", "parse_arguments"]

BLOCKS: dict[str, dict[str, object]] = {
    "none": {},
    "cpu": {"device": "cpu", "pin_memory": True},
    "ratio": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
    "nvme": {"device": "nvme", "pin_memory": True, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
}
"""System of zeropp -> its ``offload_optimizer`` block."""
SYSTEMS = ("fsdp2", *BLOCKS)
_TILE = 16 << 20  # elements of a tile if states are in files


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure training steps with offload.")
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds of each way")
    parser.add_argument("--steps", type=int, default=2, help="steps per round")
    parser.add_argument("--warm", type=int, default=3, help="steps before the measurement")
    parser.add_argument("--ways", default="lazy,eager", help="ways to step on the host")
    parser.add_argument("--folder", type=Path, help="folder for files with states; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    add_model_flags(parser)
    args = parser.parse_args(argv)
    args.staged = False
    return args


@dataclass
class Arm:
    """One way of a system to step.

    Attributes:
        enter: function that switches to this way.
        step_s: seconds per training step, by round.
        both_s: seconds of ``step()`` and the forward after it, by round.
        forward_s: seconds of a forward that waits for nothing, by round.
        units_s: seconds of each unit's step on the host, by round.
    """

    enter: Callable[[], None]
    step_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    units_s: list[list[float]] = field(default_factory=list)


class Trainer:
    """A model, its optimizer, and their measurements.

    Attributes:
        plan: zeropp's memory plan; None for FSDP2.
        losses: loss of each step.
        host_nbytes: peak of this process's anonymous memory beyond its initial value, in bytes.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, folder: Path) -> None:
        self.args, self.device = args, device
        self.batches = Batches(load_text().train, args.batch, args.seq_len, seed=args.seed)
        self.losses: list[Tensor] = []
        self._host, self.host_nbytes = resident(), 0
        self.plan: zeropp.plan.MemoryPlan | None = None
        torch.manual_seed(args.seed)
        with device:
            self.model: nn.Module = GPT(GPTConfig(args.vocab, args.layers, args.d_model, args.heads, args.seq_len))
        self.optimizer = self._fsdp2() if args.system == "fsdp2" else self._zeropp(folder)

    def _fsdp2(self) -> torch.optim.Optimizer:
        mesh = dist.init_device_mesh(self.device.type, (1,))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for block in (*self.model.blocks, self.model):  # type: ignore[misc]
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        return adamw(self.model, peak_rate(self.args.d_model))

    def _zeropp(self, folder: Path) -> zeropp.ZeroOptimizer:
        block = dict(BLOCKS[self.args.system])
        if block.get("device") == "nvme":
            block["nvme_path"] = str(folder)
        zero = {
            "stage": 3,
            "stage3_max_reuse_distance": 0,
            **({"sub_group_size": _TILE} if "nvme_path" in block else {}),
        }
        config = {
            "zero_optimization": {**zero, **({"offload_optimizer": block} if block else {})},
            "bf16": {"enabled": True}, "gradient_clipping": CLIP,
        }  # fmt: skip
        self.plan = zeropp.plan.memory(self.model, config, 1, device=self.device)
        return zeropp.ZeroOptimizer(adamw(self.model, peak_rate(self.args.d_model)), self.model, config)

    def arms(self) -> dict[str, Arm]:
        """Return the ways to step, by name; a single way without a name if the host does not step."""
        host = self.optimizer._optimizer_step._host if isinstance(self.optimizer, zeropp.ZeroOptimizer) else None
        if host is None:
            return {"": Arm(lambda: None)}
        return {way: Arm(partial(setattr, host, "lazy", way == "lazy")) for way in self.args.ways.split(",")}

    def forward(self) -> Tensor:
        x, y = on_device(self.batches.at(len(self.losses)), self.device)
        return self.model(x, y)

    def backward(self) -> None:
        loss = self.forward()
        self.losses.append(loss.detach())
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        if not isinstance(self.optimizer, zeropp.ZeroOptimizer):
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
        self.host_nbytes = max(self.host_nbytes, resident() - self._host)

    def parts(self) -> dict[str, float]:
        """Return the seconds per step of copies and of steps on the host, added up. They run beside each other."""
        spans = Spans()
        with spans.recorded():
            begin = time.perf_counter()
            self.train(self.args.steps)
            self.settle()
        return {kind: spans.seconds(kind, begin, time.perf_counter()) / self.args.steps for kind in (DOWN, STEP, UP)}

    def settle(self) -> None:
        """Wait for the host's step and for the device."""
        if isinstance(self.optimizer, zeropp.ZeroOptimizer):
            self.optimizer.engine.wait_for_refresh()
        meet(self.device)

    def time_steps(self, arm: Arm) -> None:
        """Measure one round of training without a pause, so that the next forward can hide each step."""
        arm.enter()
        self.train(1)
        meet(self.device)
        begin = time.perf_counter()
        self.train(self.args.steps)
        meet(self.device)
        arm.step_s.append((time.perf_counter() - begin) / self.args.steps)
        self.settle()

    def time_exposed(self, arm: Arm) -> None:
        """Measure a step with the forward after it, and that forward alone."""
        arm.enter()
        self.backward()
        meet(self.device)
        with unit_steps() as seen, torch.no_grad():
            begin = time.perf_counter()
            self.step()
            self.forward()
            meet(self.device)
            arm.both_s.append(time.perf_counter() - begin)
            self.settle()
            begin = time.perf_counter()
            self.forward()
            meet(self.device)
            arm.forward_s.append(time.perf_counter() - begin)
        arm.units_s.append(seen)


def measure(args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, object]:
    meter, shared = MemoryMeter(device), resident("RssShmem")
    trainer = Trainer(args, device, folder)
    trainer.train(args.warm)
    locked = None
    if device.type == "cuda":
        # Wrapping has held the whole model on the GPU, which is not part of training.
        torch.cuda.reset_peak_memory_stats(device)
        locked = resident("RssShmem") - shared
    arms = trainer.arms()
    for time_one in (trainer.time_steps, trainer.time_exposed):
        for _ in range(args.rounds):
            for arm in arms.values():
                time_one(arm)
    parts = trainer.parts() if args.system not in ("none", "fsdp2") else None
    found: dict[str, object] = {
        "parts_s": parts,
        "losses": torch.stack(trainer.losses).tolist(),
        "host_bytes": trainer.host_nbytes,
        "locked_bytes": locked,
        "peak_bytes": meter.peak_bytes() if device.type == "cuda" else None,
        "arms": {name: {"step_s": arm.step_s, "both_s": arm.both_s, "forward_s": arm.forward_s}
                 for name, arm in arms.items()},
        "bound_s": bound(arms["eager"].units_s, median(arms["eager"].forward_s)) if "eager" in arms else None,
    }  # fmt: skip
    if (plan := trainer.plan) is not None:
        moving = max(2 * unit.gathered + unit.message + unit.arriving for unit in plan.units)
        owned = plan.total + plan.device_states + plan.new_weights
        found |= {"planned_bytes": owned + moving, "planned_host_bytes": plan.host_total - plan.pinned,
                  "pinned_bytes": plan.pinned, "planned_disk_bytes": plan.disk_total}  # fmt: skip
    if isinstance(trainer.optimizer, zeropp.ZeroOptimizer):
        trainer.optimizer.close()
    return found


def main() -> None:
    args = parse_arguments()
    device = join(args)
    if device.type == "cuda":
        # FSDP2 also steps on the host, and splits its kernels over torch's threads.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args, device, Path(folder))
    text = json.dumps(found)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
