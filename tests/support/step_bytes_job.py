"""A program that test_bytes starts: it trains a wide model and compares ledger bytes with loopback traffic.

Arguments: ranks per node, steps, compute dtype (fp32 or bf16). Rank 0 prints one JSON line with the bytes that the
ledgers of all ranks counted and the payload bytes that the loopback device carried during the steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.network_namespace import Counters


def counters() -> Counters:
    """Return the counters of the loopback device, which are sums over all ranks of this machine."""
    return Counters.parse(Path("/proc/net/dev").read_text(), Path("/proc/net/snmp").read_text())


def main(local: int, steps: int, dtype: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(5)), nn.LayerNorm(width))
    config = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 4096, "stage3_max_reuse_distance": 0},
        "bf16": {"enabled": dtype == "bf16"},
        "zeropp": {"unit_min_blocks": 0, "local_world_size": local, "hang_timeout": 60},
    }
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, config)
    ledger = optimizer.engine.comm.ledger

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()
        optimizer.engine.wait_for_refresh()

    for _ in range(2):  # the order of collectives is learned in these steps
        step()
    dist.barrier()
    before, counted = counters(), ledger.total_bytes
    dist.barrier()
    for _ in range(steps):
        step()
    dist.barrier()
    carried, counted = counters() - before, ledger.total_bytes - counted
    rows: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(rows, counted)
    if dist.get_rank() == 0:
        found = {"ledger": sum(rows), "payload": carried.payload_bytes, "resent": carried.resent_segments}
        found["most"] = carried.most_payload_bytes
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
