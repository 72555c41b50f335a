"""Weights of files into shards: each rank reads its part and no more, and its memory holds no more than that."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import zeropp
from tests.support.peak_memory import Peak, status
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint

WORLD = 2
_WIDTH = 4096  # units of 33 MB
_STACKS = 4 * 8 << 20  # of the threads that read


class Deep(nn.Module):
    """Square matrices in a row, of any values."""

    def __init__(self, layers: int, width: int, device: str) -> None:
        super().__init__()
        how = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, width, width, **how) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fills(folder: Path, layers: int, width: int, each: int) -> int:
    """Files in bf16 with so many layers each; returns bytes of values."""
    nbytes = 0
    for begin in range(0, layers, each):
        numbers = range(begin, min(begin + each, layers))
        tensors = {f"layers.{n}.weight": torch.full((width, width), n + 1.0, dtype=torch.bfloat16) for n in numbers}
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / f"model-{begin:05d}.safetensors")
    return nbytes


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Nothing can be allocated beyond so many bytes in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def loads(folder: Path, layers: int, width: int, slack: int) -> tuple[int, int, bool]:
    """Bytes read, bytes in use at most beyond those before the model, and whether values are right."""
    first = dist.get_rank() == 0
    gc.collect()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "zeropp": {"unit_min_blocks": 0}}
    with Peak() as peak:
        model = Deep(layers, width, "cpu" if first else "meta")
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, config, device="cpu")
        if first:
            peak.nbytes = 0  # it has built it all
        # What threads may write to is their stacks, too.
        with limited(status("VmData") + slack + _STACKS):
            found = checkpoint.load_safetensors(model, folder, progress=False)
    right = [bool((part.parameter == int(part.name.split(".")[1]) + 1).all()) for part in optimizer.slices.all]
    return found.nbytes_read, peak.nbytes, all(right) and bool(right)


def check(folder: Path, layers: int, slack: int, timeout: float = 60) -> None:
    """Main weights and gradients of a share in float32, two units in bf16, and some slack."""
    nbytes = fills(folder, layers, _WIDTH, max(layers // 3, 1))
    share, slack = 2 * (2 * nbytes // WORLD), slack + 2 * (2 * _WIDTH * _WIDTH)
    for read, most, right in run_ranks(WORLD, loads, folder, layers, _WIDTH, slack, timeout=timeout):
        assert right and nbytes / WORLD <= read <= 1.02 * nbytes / WORLD
        assert 0.9 * share < most <= share + slack, (most, share, slack)


def test_a_rank_has_no_more_than_its_share(tmp_path: Path) -> None:
    """0.1 B parameters, under a hard limit: the whole file, which has 200 MB, would be beyond it."""
    check(tmp_path, layers=6, slack=80_000_000)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_rank_of_a_billion_parameters(tmp_path: Path) -> None:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if (gigabytes := int(available.split()[1]) / 1e6) < 14:
        pytest.skip(f"needs 14 GB of memory, and {gigabytes:.1f} are available")
    check(tmp_path, layers=60, slack=300_000_000, timeout=800)
