"""Optimizers whose step sync is read late, that is, without a wait on the host, and the numbers to compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Routed, make_config, share

__all__ = ["ADAM", "STATIC", "Leaning", "backward", "numbers", "wrapped"]

ADAM: dict[str, Any] = {"lr": 0.05, "fused": True}
STATIC: dict[str, object] = {"static_graph": True, "gradient_clipping": 0.1}


def wrapped(late: bool, kind: Any = torch.optim.AdamW, **settings: object) -> zeropp.ZeroOptimizer:
    torch.manual_seed(3)
    model = Routed(3)
    share(model)
    fused = {} if settings.pop("unfused", False) else {"fused": True}
    inner = kind(model.parameters(), lr=0.05, **fused)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
    optimizer.model = model  # type: ignore[attr-defined]
    optimizer.step_sync.defers_read = late
    return optimizer


def backward(optimizer: Any, step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(10 * step + (dist.get_rank() if dist.is_initialized() else 0))
    (optimizer.model(torch.randn(3, 8, generator=generator)).square().mean() * factor).backward()


def numbers(optimizer: zeropp.ZeroOptimizer) -> list[Tensor]:
    """Return copies of this rank's main weights and optimizer states."""
    rows = [sorted(row.items()) for row in optimizer.state.values()]  # loading may change the order of keys
    states = [value.clone() for row in rows for _, value in row if isinstance(value, Tensor)]
    return [gradient.clone() for buffer in optimizer.engine.trainable_buffers for gradient in [buffer.shard]] + states


class Leaning(nn.Module):
    """Blocks, and a vector that is added to their output on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Routed(2)
        self.vector = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, leans: bool) -> Tensor:
        x = self.body(x)
        return x + self.vector if leans else x
