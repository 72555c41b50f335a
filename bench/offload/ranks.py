"""The program of each rank of ``bench.offload.peers``: all systems in turns for times, or one alone for memory."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.checkpoint.ranks import Peak, resident
from bench.common.contestant import over_ranks
from bench.offload.systems import build
from examples.text_data import Batches, load_text

__all__ = ["work"]


def in_turns(args: argparse.Namespace, batches: Batches) -> dict[str, Any]:
    """Run all systems in turns (A B C, C B A, ...), and return their results by name."""
    built = {name: build(name, args, batches, args.folder) for name in args.systems}
    for turn in range(args.rounds):
        # Alternate the order, because a system may affect the next one by a busy disk or by the contents of the cache.
        for contestant in list(built.values())[:: -1 if turn % 2 else 1]:
            contestant.take_turn(args.steps, measure=turn >= args.discard)
    found = {name: contestant.measured() for name, contestant in built.items()}
    for contestant in built.values():
        contestant.close()
    return found


def alone(args: argparse.Namespace, batches: Batches) -> dict[str, Any]:
    """Return one system's bytes: memory beyond the process's memory before the model, and files on disk."""
    if args.systems[0].startswith("deepspeed"):
        import deepspeed  # noqa: F401  # a library, as torch is: not a part of what its states take
    before = resident()
    with Peak() as building:
        contestant = build(args.systems[0], args, batches, args.folder)
    contestant.one_step()  # creates optimizer states
    contestant.settle()
    # Return memory to the system that building and the first step have freed, so that it is not counted.
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    start = resident()
    with Peak() as training:
        for _ in range(args.steps):
            contestant.one_step()
        contestant.settle()
    found = {"building_bytes": building.most, "peak_bytes": start - before + training.most}
    disk = on_disk(args.folder)
    contestant.close()
    most = over_ranks([float(value) for value in found.values()], dist.ReduceOp.MAX)
    total = over_ranks([float(disk)], dist.ReduceOp.SUM)
    return {**dict(zip(found, map(int, most), strict=True)), "disk_bytes": int(total[0])}


def on_disk(folder: Path) -> int:
    """Return the bytes of files in ``folder`` that this process has open, including deleted ones."""
    found: dict[tuple[int, int], int] = {}
    for each in Path("/proc/self/fd").glob("*"):
        try:
            inside = str(each.readlink()).startswith(f"{folder.resolve()}/")
            state = each.stat()
        except OSError:  # the file was closed in the meantime
            continue
        if inside:
            found[state.st_dev, state.st_ino] = state.st_blocks * 512
    return sum(found.values())


def work(args: argparse.Namespace) -> None:
    """Run one rank from start to end; rank 0 writes ``args.result``."""
    dist.init_process_group("gloo")
    torch.set_num_threads(args.threads)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = Batches(load_text().train, args.batch, args.seq_len, rank, world, args.seed)
    found = alone(args, batches) if args.alone else in_turns(args, batches)
    if rank == 0:
        args.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
