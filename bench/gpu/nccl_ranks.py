"""Programs of one rank: collectives, training compared with the staged backend, a lost rank, a full launch queue.

:mod:`bench.gpu.nccl` starts all ranks on one GPU. Each rank appends its results to a file of JSON lines. In a dry run
on a CPU, the staged backend replaces NCCL, and gloo replaces the staged backend, so that all code runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeropp
from bench.common import staged
from bench.gpu.nccl import CPU_BOUNDS, LOADED, ORDER_BOUNDS, note, notes, too_old, version_of
from bench.gpu.scale import CARD, DRY, Ranks

__all__ = ["CASES", "Case", "main"]

NCCL = {"cuda": "cpu:gloo,cuda:nccl", "cpu": staged.NAME}
"""Type of device -> backend under test."""
BESIDE = {"cuda": staged.NAME, "cpu": "gloo"}
"""Type of device -> backend that gives the expected results."""
VOCABULARY = 97
RATE = 1e-3
HALF = "half of the ranks"
HALVES = {"local_world_size": HALF}
HPZ = {"zero_hpz_partition_size": HALF}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
HOST = {"device": "cpu", "pin_memory": True}
QUEUED = 8192  # number of launches; the queue holds about a thousand
SPINNING = 3.0  # seconds that the kernel spins
CLOCK = 1.5e9  # approximate GPU cycles per second


@dataclass(frozen=True)
class Case:
    """One configuration that is trained.

    Attributes:
        zero: keys of the ``zero_optimization`` block; stage 3 by default.
        zeropp: keys of the ``zeropp`` block.
        bf16: True to compute in bf16, False in float32.
        micro_batches: number of micro-batches per step.
        engines: number of engines in the process, which take turns.
        branches: True if ranks use different modules in a step.
        one_order: False if NCCL itself adds values of all ranks, in an order that may differ from the staged backend's.
    """

    zero: dict[str, Any] = field(default_factory=dict)
    zeropp: dict[str, Any] = field(default_factory=dict)
    bf16: bool = True
    micro_batches: int = 1
    engines: int = 1
    branches: bool = False
    one_order: bool = True

    def config(self, world: int, hang_timeout: float) -> dict[str, Any]:
        """Return the configuration for ``world`` ranks; HALF is replaced by half of the ranks, which form a node."""
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **self.zero}
        found = {
            "zero_optimization": {name: world // 2 if value == HALF else value for name, value in zero.items()},
            "zeropp": {
                "hang_timeout": hang_timeout,
                **{name: world // 2 if value == HALF else value for name, value in self.zeropp.items()},
            },
            "bf16": {"enabled": self.bf16},
            "gradient_accumulation_steps": self.micro_batches,
        }
        # No clipping if bits must be equal for more than two ranks: the sum of squares over all ranks is one all-reduce
        # whose last bit depends on the backend's order.
        return found if self.exact(world) and world > 2 else {**found, "gradient_clipping": 1.0}

    def exact(self, world: int) -> bool:
        """Return True if both backends must give the same bits: two values have one sum in any order."""
        return self.one_order or world == 2


CASES = {
    "stage 1": Case({"stage": 1}, bf16=False, one_order=False),
    "stage 2": Case({"stage": 2}, bf16=False, one_order=False),
    "stage 3": Case(bf16=False, one_order=False),
    "stage 3, nothing kept": Case({"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}),
    "stage 3, nodes": Case(zeropp=HALVES, bf16=False),
    "sums by the backend": Case(zeropp={"reduce_scatter": "backend"}, one_order=False),
    "hpZ": Case(HPZ, HALVES),
    "qwZ + qgZ": Case(QUANTIZED),
    "ZeRO++": Case({**HPZ, **QUANTIZED}, HALVES),
    "LoCo": Case({"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}, HALVES),
    "lossless": Case({**HPZ, "zero_quantized_gradients": True}, {**HALVES, "weight_codec": "lossless"}),
    "lossless, stage 1": Case({"stage": 1}, {"weight_codec": "lossless"}),
    "delta4": Case({**HPZ, "zero_quantized_gradients": True}, {**HALVES, "weight_codec": "delta4"}),
    "delta4, stage 1": Case({"stage": 1, "zero_quantized_gradients": True}, {"weight_codec": "delta4"}),
    "MiCS": Case({"mics_shard_size": HALF}, HALVES),
    "states on the host": Case({"offload_optimizer": HOST}),
    "weights on the host": Case({"offload_optimizer": HOST, "offload_param": HOST}),
    "accumulation": Case(zeropp={**HALVES, "defer_cross_reduction": True}, micro_batches=2),
    "two engines": Case(engines=2),
    "other modules": Case(branches=True),
}


class Block(nn.Module):
    """Two linear layers and a norm, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """A small language model without attention, whose forward can skip some blocks."""

    def __init__(self, sizes: Ranks) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.blocks))
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, without: int = -1) -> Tensor:
        """Return the loss. ``without`` is 0 to skip blocks with even numbers, 1 for odd numbers, -1 to skip none."""
        y = self.embedding(x)
        for number, block in enumerate(self.blocks):
            y = y if number % 2 == without else block(y)
        return F.cross_entropy(self.head(y).float().flatten(0, 1)[:-1], x.flatten()[1:])


class Training:
    """One engine and its data.

    Args:
        case: configuration.
        sizes: sizes of the model and its batches.
        device: device of the training.
        hang_timeout: the engine's ``hang_timeout`` in seconds.
        group: process group of all ranks; None for the default group.
        number: number of the engine in its process; part of the seeds.
    """

    def __init__(
        self, case: Case, sizes: Ranks, device: torch.device, hang_timeout: float, group: Any = None, number: int = 0
    ) -> None:
        self.case, self.sizes, self.device, self.number = case, sizes, device, number
        torch.manual_seed(number)
        self.model = Net(sizes).to(device)
        self.before = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        adamw = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        config = case.config(dist.get_world_size(), hang_timeout)
        self.optimizer = zeropp.ZeroOptimizer(adamw, self.model, config, process_group=group)
        self.losses: list[Tensor] = []

    def step(self, step: int) -> None:
        """Run one optimizer step; each rank has its own batches."""
        rank = dist.get_rank()
        for micro in range(self.case.micro_batches):
            seed = 1000 * step + 100 * self.number + 10 * micro + rank
            shape = (self.sizes.batch, self.sizes.length)
            x = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
            loss = self.model(x, (step + rank) % 2 if self.case.branches else -1)
            self.optimizer.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())


@dataclass
class Trained:
    """Results of a training.

    Attributes:
        losses: this rank's losses, one per micro-batch.
        weights: full final weights, by name.
        before: full initial weights, by name.
        memory: results of :func:`measure` after wrapping, after the first step and after the last.
    """

    losses: Tensor
    weights: dict[str, Tensor]
    before: dict[str, Tensor]
    memory: list[dict[str, int]]


def measure(device: torch.device, before: int = 0) -> dict[str, int]:
    """Return this rank's bytes on the GPU: allocated and reserved by torch, and outside of torch's allocator.

    The driver only reports the memory of the whole GPU. So all ranks measure at the same time, and the part outside of
    torch is the mean over ranks, minus ``before``.
    """
    on_card = device.type == "cuda"
    wait = torch.cuda.synchronize if on_card else lambda: None
    wait()
    dist.barrier()
    free, total = torch.cuda.mem_get_info(device) if on_card else (0, 0)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    every = torch.tensor([float(reserved)], dtype=torch.float64)
    dist.all_reduce(every)  # also keeps each rank from continuing before all have measured
    outside = (total - free - int(every)) // dist.get_world_size() - before
    return {"allocated": allocated, "reserved": reserved, "outside": outside}


def train(case: Case, sizes: Ranks, device: torch.device, backend: str) -> Trained:
    """Train on a new process group, which is destroyed at the end."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=3 * sizes.patience))
    before = measure(device)["outside"]
    engines = [Training(case, sizes, device, sizes.patience, group, number) for number in range(case.engines)]
    memory = [measure(device, before)]
    for step in range(sizes.steps):
        for each in engines:
            each.step(step)
        if step in (0, sizes.steps - 1):
            memory.append(measure(device, before))
    weights, begun = {}, {}
    for each in engines:
        # Include the engine's number in the names, because all engines have the same parameter names.
        for name, value in zeropp.full_state(each.model).items():
            weights[f"{each.number} {name}"], begun[f"{each.number} {name}"] = value.cpu(), each.before[name]
    losses = torch.stack([loss for each in engines for loss in each.losses]).cpu()
    for each in engines:
        each.optimizer.close()
    dist.destroy_process_group(group)
    return Trained(losses, weights, begun, memory)


def compare(found: Trained, other: Trained) -> tuple[int, float, float]:
    """Return the number of tensors that differ, and the distances of losses and weights (see ORDER_BOUNDS)."""
    pairs = [(value, other.weights[name]) for name, value in found.weights.items()]
    differ = sum(not torch.equal(*pair) for pair in [*pairs, (found.losses, other.losses)])
    losses = ((found.losses - other.losses).abs() / other.losses.abs()).max()
    apart = torch.stack([(one - two).float().norm() for one, two in pairs]).norm()
    way = torch.stack([(value - other.before[name]).float().norm() for name, value in other.weights.items()]).norm()
    return differ, float(losses), float(apart / way)


def beyond(losses: float, weights: float, bounds: tuple[float, float], other: str) -> list[str]:
    """Return a list with one error text if losses or weights differ by more than the bounds; else an empty list."""
    if losses <= bounds[0] and weights <= bounds[1]:
        return []
    return [f"losses are {losses:.1e} and weights {weights:.1e} from those {other}, beyond {bounds}"]


def train_case(name: str, sizes: Ranks, device: torch.device) -> dict[str, Any]:
    """Train one case with each backend and on the CPU; return the results, with the worst values of all ranks."""
    case, world, began = CASES[name], dist.get_world_size(), time.monotonic()
    kind, cpu = device.type, torch.device("cpu")
    # The staged backend comes first and loads the kernels, so that their memory is not counted as NCCL's.
    ways = dict.fromkeys([(device, BESIDE[kind]), (device, NCCL[kind]), (cpu, "gloo")])
    trained = {(on, backend): train(case, sizes, on, backend) for on, backend in ways}
    found = trained[device, NCCL[kind]]
    told = [*compare(found, trained[device, BESIDE[kind]]), *compare(found, trained[cpu, "gloo"])]
    # The largest values of all ranks. NaN becomes infinity, because MAX may lose a NaN.
    worst = torch.tensor([value if value == value else float("inf") for value in told], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    differ, losses, apart, _, cpu_losses, cpu_apart = worst.tolist()
    config = case.config(world, sizes.patience)
    plan = zeropp.plan.memory(Net(sizes), config, world, config["zeropp"].get("local_world_size"))
    beside, exact = f"over {BESIDE[kind]}", case.exact(world)
    wrong = [f"{differ:.0f} tensors have other bits than {beside}"] * (exact and differ > 0)
    if not exact:
        wrong += beyond(losses, apart, ORDER_BOUNDS[case.bf16], beside)
    wrong += beyond(cpu_losses, cpu_apart, CPU_BOUNDS[case.bf16], "on the CPU")
    return {
        "exact": exact, "differ": differ, "losses": losses, "apart": apart, "cpu_losses": cpu_losses,
        "cpu_apart": cpu_apart, "memory": found.memory, "communicators": len(plan.communicators),
        "planned": plan.communicator_nbytes, "last_loss": float(found.losses[-1]),
        "seconds": time.monotonic() - began, "wrong": "; ".join(wrong),
    }  # fmt: skip


def train_cases(names: Sequence[str], folder: Path, sizes: Ranks, device: torch.device) -> None:
    """Train the cases one after another, until the first error, after which the ranks are out of step."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3 * sizes.patience))
    for name in names:
        # If a case hangs, write all stacks to the log before the launcher kills the rank.
        faulthandler.dump_traceback_later(2.5 * sizes.patience)
        try:
            found = train_case(name, sizes, device)
        except Exception as error:
            note(folder, name=name, rank=dist.get_rank(), error=repr(error)[:2000])
            raise
        if dist.get_rank() == 0:
            note(folder, name=name, rank=0, **found)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def collectives(names: Sequence[str], folder: Path, sizes: Ranks, device: torch.device) -> None:
    """Run each collective that the engine uses, on integers, so that the expected results are exact."""
    version = version_of(LOADED) if device.type == "cuda" else None
    old = too_old(version)
    assert old is None, old
    dist.init_process_group(NCCL[device.type], timeout=timedelta(seconds=sizes.patience))
    rank, world, numel = dist.get_rank(), dist.get_world_size(), sizes.numel
    began, wrong = time.monotonic(), list[str]()

    def check(what: str, found: Tensor, expected: Tensor) -> None:
        wrong.extend([what] * (not torch.equal(found.cpu(), expected.to(found.dtype))))

    rows = torch.arange(world).repeat_interleave(numel)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        own = torch.full((numel,), rank, device=device).to(dtype)
        whole = torch.empty(world * numel, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, own)
        check(f"all_gather {dtype}", whole, rows)
        given = (rows + world * rank).to(device, dtype)
        dist.all_to_all_single(whole, given)
        check(f"all_to_all_single {dtype}", whole, rows * world + rank)
    total = sum(range(world))
    given = (rows + rank).float().to(device)
    part = torch.empty(numel, device=device)
    dist.reduce_scatter_tensor(part, given)
    check("reduce_scatter", part, torch.full((numel,), total + world * rank))
    dist.all_reduce(given)
    check("all_reduce", given, rows * world + total)
    largest = torch.full((numel,), rank, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    check("all_reduce of the largest", largest, torch.full((numel,), world - 1))
    told = {"wrong": ", ".join(wrong), "nccl": ".".join(map(str, version or ())), "seconds": time.monotonic() - began}
    note(folder, name="collectives", rank=rank, **told)
    dist.destroy_process_group()


def _raise() -> None:
    raise ValueError("planted in forward")


LOSSES: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raising": _raise,
}
"""Name -> function that makes the last rank fail in the middle of a forward."""


def lose(names: Sequence[str], folder: Path, sizes: Ranks, device: torch.device) -> None:
    """Train, make the last rank fail in the fourth step or close its engine, and record the other ranks' errors."""
    dist.init_process_group(NCCL[device.type], timeout=timedelta(minutes=10))
    (kind,), rank, world = names, dist.get_rank(), dist.get_world_size()
    training = Training(CASES["stage 3, nothing kept"], sizes, device, sizes.hang_timeout)
    for step in range(3):
        training.step(step)
    training.losses[-1].item()
    lost = rank == world - 1
    act = LOSSES.get(kind, training.optimizer.close)
    if lost and kind in LOSSES:
        training.model.blocks[-1].register_forward_pre_hook(lambda *_: act())
    # If the step hangs, write all stacks to the log before the launcher kills the rank.
    faulthandler.dump_traceback_later(sizes.hang_timeout + 15)
    meet = torch.zeros(1, device=device)
    dist.all_reduce(meet)
    meet.item()
    # gloo sends the last message of the collective on another thread after the call returns, so the lost rank waits.
    time.sleep(0.5 * lost)
    began, said = time.monotonic(), ""
    try:
        # On a GPU a step may return before its error is known; then a later step raises the error.
        for step in range(3, 6):
            (act if lost and kind not in LOSSES else partial(training.step, step))()
            training.losses[-1].item()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    note(folder, name=kind, rank=rank, said=said, seconds=time.monotonic() - began)
    # Wait for all results before closing. Rank 0 hosts the store. The lost rank must not exit earlier either, because
    # the others must notice its loss without the end of its process.
    until = time.monotonic() + sizes.hang_timeout + 10
    while len(notes(folder)) < world - (kind in ("killed", "stopped")) and time.monotonic() < until:
        time.sleep(0.05)
    began = time.monotonic()
    training.optimizer.close()
    note(folder, name="closed", rank=rank, seconds=time.monotonic() - began)
    faulthandler.cancel_dump_traceback_later()


def launch_queue(names: Sequence[str], folder: Path, sizes: Ranks, device: torch.device) -> None:
    """Launch kernels behind one that spins, until a launch waits; another thread measures the time of event queries."""
    torch.cuda.set_device(device)
    x = torch.zeros(1, device=device)
    event, over = torch.cuda.Event(), threading.Event()
    torch.cuda.synchronize()
    took = [0.0]
    asking = threading.Thread(target=ask, args=(event, over, device, took), daemon=True)
    torch.cuda._sleep(int(SPINNING * CLOCK))
    event.record()
    asking.start()
    launches = []
    for _ in range(QUEUED):
        began = time.monotonic()
        x.add_(1)
        launches.append(time.monotonic() - began)
    over.set()
    asking.join(SPINNING)
    torch.cuda.synchronize()
    told = {"launch": max(launches), "queries": len(took) - 1, "query": max(took), "returned": not asking.is_alive()}
    note(folder, name="launch queue", rank=0, **told)


def ask(event: torch.cuda.Event, over: threading.Event, device: torch.device, took: list[float]) -> None:
    """Query the event until ``over`` is set, and append the seconds of each query to ``took``."""
    torch.cuda.set_device(device)
    while not over.wait(0.02):
        began = time.monotonic()
        event.query()
        took.append(time.monotonic() - began)


PROGRAMS: dict[str, Callable[[Sequence[str], Path, Ranks, torch.device], None]] = {
    "collectives": collectives, "train": train_cases, "lose": lose, "launch-queue": launch_queue,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank; started by bench.gpu.nccl.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    scale = DRY if args.dry_run else CARD
    torch.set_num_threads(1)
    staged.register()
    device = torch.device("cpu") if scale.dry else torch.device("cuda", 0)
    PROGRAMS[args.program](args.names, args.folder, scale.ranks, device)


if __name__ == "__main__":
    main()
