"""TiledLinear computes the same as nn.Linear, and its tiles are units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeropp
from zeropp.training import TiledLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 1), (1, 4), (3, 4), (10, 7)])
def test_a_linear_in_tiles(in_splits: int, out_splits: int, bias: bool) -> None:
    """Results agree within 1e-11 in float64, because sums are computed in another order."""
    plain = nn.Linear(10, 7, bias=bias).double()
    tiled = TiledLinear(10, 7, bias, in_splits, out_splits, init_linear=plain, dtype=torch.float64)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in plain.parameters())
    x, y = (torch.randn(2, 3, 10, dtype=torch.float64).requires_grad_() for _ in range(2))
    with torch.no_grad():
        y.copy_(x)
    one, other = plain(x), tiled(y)
    assert torch.allclose(one, other, rtol=0, atol=1e-12)
    one.square().sum().backward()
    other.square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=0, atol=1e-11)
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    assert torch.allclose(torch.cat(rows), plain.weight.grad, rtol=0, atol=1e-11)


def test_parts_stay_apart_where_they_are_to() -> None:
    tiled = TiledLinear(10, 7, in_splits=3, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(2, 10)
    outputs = tiled(x.split((4, 3, 3), dim=-1))
    assert tiled.in_parts == [0, 4, 7, 10] and [each.shape[-1] for each in outputs] == [4, 3]
    with pytest.raises(RuntimeError, match="of 3 in_splits was given 2 inputs"):
        tiled(x.split(5, dim=-1))


@pytest.mark.parametrize(("sizes", "said"), [((0, 1), "in_splits is 0"), ((1, 8), "out_splits is 8; expected 1 to 7")])
def test_more_tiles_than_features(sizes: tuple[int, int], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        TiledLinear(10, 7, in_splits=sizes[0], out_splits=sizes[1])


@pytest.mark.parametrize("other", [nn.Linear(10, 8), nn.Linear(10, 7, bias=False)])
def test_weights_of_another_shape(other: nn.Linear) -> None:
    with pytest.raises(RuntimeError, match="does not fit a TiledLinear of in_features=10"):
        TiledLinear(10, 7).copy_params_from(other)


def test_tiles_are_units() -> None:
    model = nn.Sequential(TiledLinear(64, 64, in_splits=2, out_splits=2))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "zeropp": {"unit_min_blocks": 0}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    assert len(optimizer.engine.units) == 4
    optimizer.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    optimizer.close()
