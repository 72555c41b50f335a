"""A program that trains a model on NVMe under a memory limit, and fails if the model does not stay on NVMe.

    python -m tests.support.offload_under_limit_job WIDTH BLOCKS STEPS FOLDER [--limit BYTES] [--cpu]

Prints one JSON line: number of elements, losses, seconds of each step, and bytes of anonymous memory before training,
at the peak, and after each step.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import zeropp
from tests.support.peak_memory import anonymous

__all__ = ["settings"]


class Block(nn.Module):
    """A residual block of two layers with 4 width^2 elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def settings(width: int, folder: str, *, cpu: bool = False) -> dict[str, object]:
    """Return a configuration with weights and states on NVMe, in sub-groups and buffers of 4 Mi elements.

    Args:
        width: width of the model's blocks.
        folder: the folder for files.
        cpu: True to put weights and states in host memory instead.
    """
    place: dict[str, object] = {"device": "cpu"} if cpu else {"device": "nvme", "nvme_path": folder}
    block = 4 * width * width
    zero = {
        "stage": 3,
        "sub_group_size": 4 << 20,
        # Allow two live blocks: the block in use and one block ahead.
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "offload_param": {**place, "max_in_cpu": 0, "buffer_count": 4, "buffer_size": 4 << 20},
        "offload_optimizer": {**place, "buffer_count": 6, "pipeline_read": True, "pipeline_write": True},
    }
    return {"gradient_clipping": 1.0, "zero_optimization": zero, "aio": {"block_size": 1 << 20, "queue_depth": 8}}


def private_nbytes() -> int:
    """Return the bytes that RLIMIT_DATA limits: private writable memory, including pages that were never written."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("width", "blocks", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("folder")
    parser.add_argument("--limit", type=int, help="bytes that may be allocated beyond what imports have taken")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # The first backward loads libraries, which must not count as growth.
    nn.Linear(8, 8)(torch.ones(1, 8)).sum().backward()
    before, most = anonymous(), [0]

    def poll() -> None:
        while True:
            most[0] = max(most[0], anonymous())
            time.sleep(0.01)

    threading.Thread(target=poll, daemon=True).start()
    if given.limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (private_nbytes() + given.limit,) * 2)
    config = settings(given.width, given.folder, cpu=given.cpu)
    torch.manual_seed(0)
    with zeropp.zero.Init(config_dict_or_path=config, remote_device="cpu" if given.cpu else "nvme"):
        model = nn.Sequential(*(Block(given.width) for _ in range(given.blocks)))
    numel = sum(parameter.numel() for parameter in model.parameters())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    x, losses, seconds, after = torch.randn(8, given.width), [], [], []
    for _ in range(given.steps):
        begin = time.perf_counter()
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        # A step on the host may run during the next forward, so seconds of one step may include the previous step's
        # update.
        seconds.append(time.perf_counter() - begin)
        after.append(anonymous())
    optimizer.close()
    told = {"numel": numel, "losses": losses, "seconds": seconds}
    print(json.dumps({**told, "before": before, "most": most[0], "after": after}))


if __name__ == "__main__":
    main()
