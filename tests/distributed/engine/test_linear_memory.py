"""No linear layer keeps a gathered weight from forward to backward, and ``functional.linear`` is torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zeropp
from tests.support.branching_models import apart, make_config
from tests.support.rank_pool import run_ranks

LINEAR = functional.linear
WIDTH, LAYERS = 64, 6


class Layers(nn.Module):
    """Linear layers, two of them frozen, each followed by a tanh, which saves its output for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[2:4].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def gathered(optimizer: zeropp.ZeroOptimizer) -> int:
    """Return the elements of all flat buffers whose storage has memory, whatever the state of their units is."""
    flats = [buffer.flat for unit in optimizer.engine.units for buffer in unit.buffers]
    return sum(flat.untyped_storage().nbytes() // flat.itemsize for flat in flats)


def kept(mem_efficient_linear: bool, settings: dict[str, Any]) -> tuple[int, int, float, bool]:
    """Train one step.

    Args:
        mem_efficient_linear: argument of ``zeropp.zero.Init``.
        settings: keys for ``make_config``.

    Returns:
        Most elements gathered at once in forward, elements gathered after forward, largest difference of weights from
        plain torch, and True if ``functional.linear`` is torch's own function.
    """
    torch.manual_seed(0)
    with zeropp.zero.Init(mem_efficient_linear=mem_efficient_linear):
        model = Layers()
    torch.manual_seed(0)
    plain = Layers()
    config = make_config(reuse=0, prefetch=0, **settings)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    most = 0

    def watch(*_: object) -> None:
        nonlocal most
        most = max(most, gathered(optimizer))

    for layer in model.layers:
        layer.register_forward_pre_hook(watch)
    x = torch.ones(4, WIDTH)
    loss = model(x).square().mean()
    left = gathered(optimizer)
    loss.backward()
    plain(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    found = zeropp.full_state(model)
    far = max(apart(found[name], value) for name, value in plain.state_dict().items())
    return most, left, far, functional.linear is LINEAR


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("mem_efficient_linear", "settings"),
    [(True, {}), (False, {}), (True, {"bf16": {"enabled": True}, "memory_efficient_linear": False})],
    ids=str,
)
def test_weights_go_between_forward_and_backward(mem_efficient_linear: bool, settings: dict[str, Any]) -> None:
    layer = WIDTH * WIDTH + 512  # the weight, a block of 256 for the bias, and a block of padding
    for most, left, far, plain in run_ranks(2, kept, mem_efficient_linear, settings):
        assert most == layer and left == 0 and plain
        assert far <= (1e-3 if settings else 0)
