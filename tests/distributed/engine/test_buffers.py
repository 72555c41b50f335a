"""Wrapping gives all ranks the buffers and non-float parameters of rank 0; ``buffer_dtype`` casts float buffers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Block, make_config
from tests.support.rank_pool import run_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES: dict[str, tuple[int, ...]] = {"first": (3, 2), "none": (0,), "last": ()}  # shapes of float32 buffers


class Seen(nn.Module):
    """Buffers of several shapes, layouts and dtypes, and an integer and a boolean parameter.

    A submodule shares the first buffer. Each value depends on ``value``, so ranks can begin with different values.
    """

    def __init__(self, value: int) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_buffer(name, torch.full(shape, value + 0.5))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t() + value)
        self.register_buffer("unsaved", torch.full((2,), value + 0.25), persistent=False)
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("mask", torch.tensor([value == 0, value == 1]))
        self.codes = nn.Parameter(torch.arange(3) + value, requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([value == 0, value == 1]), requires_grad=False)
        self.below = Block()
        self.below.register_buffer("shared", self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.below(x)


def values(model: nn.Module) -> dict[str, Tensor]:
    codes = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_floating_point()}
    return {name: buffer.clone() for name, buffer in model.named_buffers()} | codes


def wrapped(dtype: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """Wrap a model whose values differ between ranks.

    Args:
        dtype: ``buffer_dtype``; None to leave the key out.

    Returns:
        This rank's buffers and parameters that are not floating-point, by name, and the names of buffers that are other
        tensor objects than before wrapping.
    """
    model = Seen(1 + dist.get_rank())
    before = dict(model.named_buffers(remove_duplicate=False))
    settings = {} if dtype is None else {"data_types": {"buffer_dtype": dtype}}
    zeropp.ZeroOptimizer(torch.optim.SGD(model.below.parameters(), lr=0.1), model, make_config(**settings))
    after = dict(model.named_buffers(remove_duplicate=False))
    assert before.keys() == after.keys() and after["below.shared"] is after["first"]
    return values(model), [name for name, buffer in after.items() if buffer is not before[name]]


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_everyone_gets_rank_0s_in_the_dtype_of_the_settings(dtype: str | None) -> None:
    expected = values(Seen(1))
    for found, replaced in run_ranks(2, wrapped, dtype):
        assert replaced == [] and found.keys() == expected.keys()
        for name, value in expected.items():
            wanted = value if dtype is None or not value.is_floating_point() else value.to(DTYPES[dtype])
            assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name
