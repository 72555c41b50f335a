"""Loading safetensors into shards: each rank reads its share only, and its memory stays within that share."""

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
_WIDTH = 4096  # width of a weight matrix, which is a unit of 33 MB in bf16
_STACKS = 4 * 8 << 20  # bytes: stacks of 8 MiB of the four threads that read


class Deep(nn.Module):
    """A stack of square matrices in bf16, with uninitialized values."""

    def __init__(self, layers: int, width: int, device: str) -> None:
        super().__init__()
        how = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, width, width, **how) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fills(folder: Path, layers: int, width: int, each: int) -> int:
    """Write safetensors files of bf16 weights with the value ``n + 1`` in layer n.

    Args:
        folder: folder of the files.
        layers: number of layers.
        width: width of a matrix.
        each: layers per file.

    Returns:
        Bytes of all weights.
    """
    nbytes = 0
    for begin in range(0, layers, each):
        numbers = range(begin, min(begin + each, layers))
        tensors = {f"layers.{n}.weight": torch.full((width, width), n + 1.0, dtype=torch.bfloat16) for n in numbers}
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / f"model-{begin:05d}.safetensors")
    return nbytes


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Limit the memory of this process to ``nbytes`` in all (RLIMIT_DATA)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def loads(folder: Path, layers: int, width: int, slack: int) -> tuple[int, int, bool]:
    """Load safetensors files into a sharded model within a memory limit.

    Args:
        folder: folder of the files.
        layers: number of layers.
        width: width of a matrix.
        slack: bytes that the load may take beyond the memory in use before it.

    Returns:
        Bytes read, the peak of memory above that before the model was built (on rank 0: during the load only), and True
        if all values are right.
    """
    first = dist.get_rank() == 0
    gc.collect()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "zeropp": {"unit_min_blocks": 0}}
    with Peak() as peak:
        model = Deep(layers, width, "cpu" if first else "meta")
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, config, device="cpu")
        if first:
            peak.nbytes = 0  # Rank 0 has built the whole model on the CPU, which must not count as memory of the load.
        # RLIMIT_DATA counts the stacks of threads, too.
        with limited(status("VmData") + slack + _STACKS):
            found = checkpoint.load_safetensors(model, folder, progress=False)
    right = [bool((part.parameter == int(part.name.split(".")[1]) + 1).all()) for part in optimizer.slices.all]
    return found.nbytes_read, peak.nbytes, all(right) and bool(right)


def check(folder: Path, layers: int, slack: int, timeout: float = 60) -> None:
    """Check bytes read and peak memory of each rank.

    Expected memory: main weights of a share in float32, plus slack and two units in bf16.

    Args:
        folder: folder for the files.
        layers: number of layers.
        slack: additional bytes allowed.
        timeout: seconds for the ranks.
    """
    nbytes = fills(folder, layers, _WIDTH, max(layers // 3, 1))
    share, slack = 2 * nbytes // WORLD, slack + 2 * (2 * _WIDTH * _WIDTH)
    for read, most, right in run_ranks(WORLD, loads, folder, layers, _WIDTH, slack, timeout=timeout):
        assert right and nbytes / WORLD <= read <= 1.02 * nbytes / WORLD
        assert 0.9 * share < most <= share + slack, (most, share, slack)


def test_a_rank_has_no_more_than_its_share(tmp_path: Path) -> None:
    """The model has 0.1 B parameters. All 200 MB of weights in the files would exceed the limit on memory."""
    check(tmp_path, layers=6, slack=80_000_000)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_rank_of_a_billion_parameters(tmp_path: Path) -> None:
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    if (gigabytes := int(available.split()[1]) / 1e6) < 14:
        pytest.skip(f"needs 14 GB of memory, and {gigabytes:.1f} are available")
    check(tmp_path, layers=60, slack=300_000_000, timeout=800)
