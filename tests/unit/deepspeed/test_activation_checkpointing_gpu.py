"""Inputs of checkpointed segments are kept in page-locked host memory between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeropp.deepspeed import checkpointing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

WIDTH, ROWS, SEGMENTS = 1024, 4096, 8


def run(way: dict[str, Any] | None) -> tuple[list[torch.Tensor], int, int]:
    """Return gradients, bytes on the device between forward and backward, and bytes of the input."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU()).cuda() for _ in range(SEGMENTS)]
    before = torch.cuda.memory_allocated()
    h = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    x, own = h, h.nbytes
    if way is not None:
        checkpointing.configure(None, **way)
    for layer in layers:
        h = layer(h) if way is None else checkpointing.checkpoint(layer, h)
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated() - before
    for _ in range(2):
        h.square().sum().backward(retain_graph=True)
    assert x.grad is not None
    return [x.grad, *(p.grad for layer in layers for p in layer.parameters() if p.grad is not None)], between, own


def test_inputs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []

    class Watched(checkpointing._SavedOnHost):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            pinned.append(self._copy.is_pinned())

    monkeypatch.setattr(checkpointing, "_SavedOnHost", Watched)
    way: dict[str, Any] = {"checkpoint_in_cpu": True}
    try:
        wanted, _, _ = run(None)
        found, between, own = run(way)
        # Run twice, because the second run reuses host memory that the first has returned.
        again, _, _ = run(way)
    finally:
        checkpointing.configure(None)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(wanted, found, again, strict=True))
    assert pinned == [True] * 2 * SEGMENTS
    # Only the first input, which the caller keeps, and the last output are on the device.
    assert between < 2.5 * own
