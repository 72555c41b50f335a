"""A weight that another module's forward uses trains as in plain torch, registered as external or not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Block, make_config, worst
from tests.support.gathered_model import PLACED, data
from tests.support.parity import assert_close
from tests.support.rank_pool import run_ranks
from zeropp.zero import register_external_parameter


class Borrowing(nn.Module):
    """Three blocks, and a reader whose forward uses the first block's weight, as untied heads of old models do.

    Args:
        say: "before" registers the weight as an external parameter of the reader when the model is built.
    """

    def __init__(self, say: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.reader = nn.Identity()
        self.reader.forward = lambda x: nn.functional.linear(x, self.blocks[0].lin.weight).sum(-1)  # type: ignore
        if say == "before":
            register_external_parameter(self.reader, self.blocks[0].lin.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.reader(x)


def borrow(say: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    model = Borrowing(say).double()
    plain = Borrowing("never").double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    if say == "after":
        register_external_parameter(model.reader, model.blocks[0].lin.weight)
        register_external_parameter(model.reader, model.blocks[0].lin.weight)
    touched = 0
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = model(data(step, dist.get_rank())).square().mean()
        touched += bool(optimizer.engine._backward._whole)
        loss.backward()
        for other in range(dist.get_world_size()):
            (plain(data(step, other)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        reference.step()
    return zeropp.full_state(model), plain.state_dict(), touched


@pytest.mark.every(2)
@pytest.mark.parametrize("say", ["before", "after", "never"])
def test_external_parameters_may_be_registered_and_need_not_be(say: str) -> None:
    for found, expected, touched in run_ranks(2, borrow, say):
        for key, value in expected.items():
            assert_close(found[key], value, 1e-9, key)
        assert touched == (4 if say == "never" else 0), "a registered weight's unit need not stay gathered"


class LateSayer(nn.Module):
    """A model whose last block registers the first block's weight as an external parameter in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

        def forward(x: Tensor) -> Tensor:
            register_external_parameter(self.blocks[2], self.blocks[0].lin.weight)
            return self.blocks[2].lin(x) @ self.blocks[0].lin.weight.T

        self.blocks[2].forward = forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def say_late(settings: dict[str, object]) -> tuple[float, list[int]]:
    model, plain = LateSayer().double(), LateSayer().double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        model(data(step, dist.get_rank())).square().mean().backward()
        for other in range(dist.get_world_size()):
            (plain(data(step, other)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        reference.step()
    return worst(zeropp.full_state(model), plain.state_dict()), [unit.users for unit in optimizer.engine.units]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 3", "stage 1"])
def test_an_external_parameter_may_be_registered_while_it_runs(name: str) -> None:
    for off, holds in run_ranks(2, say_late, PLACED[name]):
        assert off <= 1e-12 and set(holds) == {0}
