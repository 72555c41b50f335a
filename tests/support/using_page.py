"""Runs of the Python blocks of docs/using.md on two ranks: training, saving, and editing and averaging weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.rank_pool import run_ranks

__all__ = ["START", "Regression", "check_page"]

START = "zeropp.init_distributed()"
"""The line of the page that creates the process group."""

_USING = Path(__file__).resolve().parents[2] / "docs" / "using.md"


class Regression(nn.Module):
    """A model that returns its loss, as the page's model does. Its layers are too large to be persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - batch).square().mean()


def _examples() -> list[str]:
    """Return the page's Python blocks: training, accumulating, saving, editing weights, averaging."""
    found = re.findall(r"```python\n(.*?)```", _USING.read_text(), re.DOTALL)
    assert len(found) == 5
    return found


def _run_page(folder: str, start: str) -> tuple[list[bool], set[str], int, float, float]:
    """Run the blocks on this rank, then train on, and return facts for ``check_page``.

    Args:
        folder: working directory of the blocks.
        start: line that replaces ``START``.

    Returns:
        For each hop, True if it sends pairwise; the backends of all groups; the bytes of all gathers; the first and the
        last loss.
    """
    os.chdir(folder)
    torch.manual_seed(0)
    batches = [torch.randn(4, 400)] * 12
    space: dict[str, object] = {"Model": Regression, "loader": batches[:1], "validation": batches[:2]}
    training, *others = _examples()
    assert START in training
    training = training.replace(START, start)
    exec(compile(training, "using.md", "exec"), space)
    first = space["loss"]
    for block in others:
        exec(compile(block, "using.md", "exec"), space)
    optimizer, model = space["optimizer"], space["model"]
    assert isinstance(optimizer, zeropp.ZeroOptimizer) and isinstance(model, Regression)
    for batch in batches:
        last = model(batch)
        optimizer.backward(last)
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(first, Tensor)
    comm = optimizer.engine.comm
    hops = [hop for buffer in optimizer.engine.buffers for hop in buffer.paths.main.hops]
    backends = {dist.get_backend(hop.group) for hop in hops} | {comm.backend}
    sent = sum(row.bytes for row in zeropp.comm_report(model).rows if row.kind == "gather")
    return [hop.pairwise for hop in hops], backends, sent, float(first), float(last)


def check_page(start: str, folder: Path) -> None:
    """Run the blocks on two ranks with ``start`` in place of the line ``START``, and check their results and files."""
    results = run_ranks(2, _run_page, str(folder), start, init=False)
    assert {path.name for path in folder.iterdir()} == {"model.pt", "runs"}
    assert sorted(path.name for path in (folder / "runs" / "first").iterdir()) == ["latest", "step-00000100"]
    for pairwise, backends, sent, first, last in results:
        assert pairwise and all(pairwise)
        assert backends == {"gloo"}
        assert sent > 3 * 400 * 400  # each layer is gathered at least once, and half of each layer is sent in bf16
        assert last < 0.9 * first
