"""What a round of agreement costs: ranks tell each other a row of integers, and the host waits.

    python -m bench.control_round --ranks 2 4 8

Rounds are made while an order is learned, at its forks, and at the end of phases that vary. Printed is the least and
the median time of a round over 300; on a machine with fewer cores than ranks that is the time of its scheduler, too.
What zeropp does (`zeropp.comm.process_groups.gather_rows`) makes one hop for each doubling of the ranks, ten for 1024;
gloo's all-gather is a ring, one hop for each other rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.common.machine import describe, machine
from zeropp._compat import all_gather_single
from zeropp.comm.process_groups import gather_rows

ROUNDS = 300


def measure(rank: int, world: int, store: str, result: str) -> None:
    """One rank; the first writes what it has measured."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    row, rows = torch.zeros(9, dtype=torch.int64), torch.zeros(9 * world, dtype=torch.int64)
    everyone, lines = dist.distributed_c10d._get_default_group(), []
    for name, call in {
        "zeropp, 9 integers": lambda: gather_rows(row, everyone, timedelta(minutes=1)).tolist(),
        "gloo's all-gather": lambda: all_gather_single(rows, row),
    }.items():
        taken = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        lines.append(f"{world:>5} ranks  {name:26}{1e6 * min(taken):>9.0f} us{1e6 * statistics.median(taken):>9.0f} us")
    if rank == 0:
        with open(result, "w") as file:
            file.write("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    print(describe(machine("cpu")))
    print(f"{'':38}{'least':>12}{'median':>12}")
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            store, result = f"{folder}/store", f"{folder}/result"
            mp.spawn(measure, (world, store, result), nprocs=world)
            with open(result) as file:
                print(file.read())


if __name__ == "__main__":
    main()
