"""Training with offloaded states or weights on a GPU or CPU, and counts of the page-locked host memory in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zeropp
from tests.gpu.delays import Block, Trained
from tests.support.branching_models import make_config
from tests.support.offload_pairs import host_apart
from zeropp.offload import read_ahead, storage_tiers, swap, tier_choice

__all__ = ["STEPS", "config_of", "counted_locked", "make_model", "page_locked", "train_fused"]

STEPS, MICROS, SPOILT = 10, 2, 4


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    width = 256 if device == "cuda" else 16
    return nn.Sequential(*(Block(width) for _ in range(4))).to(device)


def config_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {**make_config(**settings), "gradient_clipping": 0.3, "gradient_accumulation_steps": MICROS}


def train_fused(
    device: str,
    settings: dict[str, Any],
    begun: Callable[[zeropp.ZeroOptimizer], object] = lambda optimizer: None,
    steps: int = STEPS,
) -> Trained:
    """Train with fused AdamW from one seed, with accumulation and clipping; a NaN loss makes one step skipped.

    Args:
        device: "cpu" or "cuda". On CPU, host memory is treated as separate from device memory.
        settings: settings for :func:`make_config`.
        begun: function called with the optimizer before the first step.
        steps: number of steps.

    Returns:
        Losses of all micro-batches, norms of all steps (None for the skipped step), and the full weights.
    """
    with host_apart(device == "cpu"):
        model = make_model(device)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, config_of(settings))
        begun(optimizer)
        width, generator = model[0].norm.weight.numel(), torch.Generator().manual_seed(3)
        losses: list[Tensor] = []
        norms: list[float | None] = []
        for step in range(steps):
            for x in torch.randn(MICROS, 8, width, generator=generator).to(device):
                loss = model(x).square().mean()
                losses.append(loss.detach())
                optimizer.backward(loss * float("nan") if step == SPOILT else loss)
                del loss
            # Reading param_groups makes the engine treat gradient norms as outdated. Loggers read them here, too.
            assert optimizer.param_groups[0]["lr"] == 1e-3
            optimizer.step()
            assert optimizer.step_was_skipped is (step == SPOILT)
            norms.append(None if step == SPOILT else optimizer.grad_norm)
            optimizer.zero_grad()
        found = Trained(torch.stack(losses).tolist(), norms, zeropp.full_state(model))
        optimizer.close()
    return found


@contextlib.contextmanager
def counted_locked(device: str) -> Iterator[list[int]]:
    """Yield a list of the bytes of each page-locked ring and row. On CPU, list those that a GPU would lock."""
    asked: list[int] = []
    lock = swap.page_locked

    def counted(numel: int, dtype: torch.dtype, card: torch.device) -> Tensor:
        asked.append(numel * dtype.itemsize)
        return lock(numel, dtype, card) if device == "cuda" else swap.aligned(numel, dtype)

    with (
        mock.patch.object(storage_tiers, "page_locked", counted),
        mock.patch.object(read_ahead, "page_locked", counted),
        mock.patch.object(tier_choice, "can_page_lock", lambda _: True),
    ):
        yield asked


def page_locked() -> int:
    """Return the bytes of page-locked memory that torch's allocator has given out."""
    return int(torch.cuda.host_memory_stats()["active_bytes.current"])
