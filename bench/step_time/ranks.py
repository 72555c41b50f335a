"""The program of each rank: it builds the systems and lets them take turns; rank 0 writes the results."""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from bench.common import congestion, staged
from bench.common.contestant import Contestant
from bench.common.machine import card
from bench.step_time.report import counterpart
from bench.step_time.systems import MemoryMeter, build
from examples.text_data import Batches, load_text

__all__ = ["join", "work"]


class Race:
    """The systems of one job, and their measurements.

    Attributes:
        systems: results for JSON, by name of the system.
        weights: samples of each system's final weights, by name.
        peak_bytes: peak memory with all systems in the process.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        rank, world = dist.get_rank(), dist.get_world_size()
        self.batches = Batches(load_text().train, args.batch, args.seq_len, rank, world, args.seed)
        self.systems: dict[str, dict] = {}
        self.weights: dict[str, Tensor] = {}
        self.before = torch.empty(0)
        self.peak_bytes = 0

    def in_turns(self) -> None:
        """Run all systems in turns, A B C A B C, ..."""
        meter = MemoryMeter(self.device)
        built = {name: build(name, self.args, self.device, self.batches) for name in self.args.systems}
        for turn in range(self.args.rounds):
            for contestant in built.values():
                contestant.take_turn(self.args.steps, measure=turn >= self.args.discard)
        self.peak_bytes = meter.peak_bytes()  # read before samples(), which gathers all weights
        for contestant in built.values():
            self._note(contestant)

    def alone(self) -> None:
        """Run one system after another. Each is freed before the next is built, so its memory can be measured."""
        for name in self.args.systems:
            meter = MemoryMeter(self.device)
            contestant = build(name, self.args, self.device, self.batches)
            for turn in range(self.args.rounds):
                contestant.take_turn(self.args.steps, measure=turn >= self.args.discard)
            peak, reserved = meter.peak_bytes(), meter.reserved_bytes()
            self._note(contestant)
            if self.device.type == "cuda":  # a CPU process's peak includes memory that earlier systems have freed
                self.systems[name] |= {"peak_bytes": peak, "reserved_bytes": reserved}
            if isinstance(contestant.optimizer, zeropp.ZeroOptimizer):
                contestant.optimizer.close()
            del contestant

    def _note(self, contestant: Contestant) -> None:
        self.systems[contestant.name] = contestant.measured()
        self.weights[contestant.name] = contestant.samples()
        assert contestant.before is not None
        self.before = contestant.before

    def compare_weights(self) -> None:
        """Record the change of each system's weights, and their distance from the counterpart's, relative to it."""
        ways = {name: (weights - self.before).norm() for name, weights in self.weights.items()}
        for name, weights in self.weights.items():
            other = counterpart(name, self.args.systems)
            self.systems[name]["weights_way"] = float(ways[name])
            self.systems[name]["weights_apart"] = float((weights - self.weights[other]).norm() / ways[other])


def join(args: argparse.Namespace) -> torch.device:
    """Create the process group, and return this rank's device."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", 0 if args.staged else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    if args.staged:
        staged.register()
        backend = staged.NAME
    dist.init_process_group(backend)
    return device


def work(args: argparse.Namespace) -> None:
    """Run one rank from start to end; rank 0 writes ``args.result``."""
    device = join(args)
    race = Race(args, device)
    if args.alone:
        race.alone()
    else:
        race.in_turns()
    measured: dict = {"systems": race.systems, "peak_bytes": race.peak_bytes}
    # Read the clocks at once, because an idle GPU lowers them.
    measured["card"] = card() if args.device == "cuda" else {}
    race.compare_weights()
    measured["wire"] = os.environ["STEP_TIME_WIRE"]
    measured["tcp"] = congestion.in_force()
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()
