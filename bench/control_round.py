"""Time of one exchange of integers between ranks (zeropp's Agreement), for which the host waits.

    python -m bench.control_round --ranks 2 4 8

The engine makes such exchanges while an order is learned, at forks of orders, and at the end of phases that vary. The
benchmark prints the smallest and the median time of 300 exchanges. If there are more ranks than cores, these times
include the operating system's scheduling. zeropp's exchange (`zeropp.comm.process_groups.gather_rows`) takes
log2(ranks) message rounds, 10 for 1024 ranks. gloo's all-gather is a ring and takes ``ranks - 1`` rounds.
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
    """Run one rank; rank 0 writes the measured times to the file ``result``."""
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
