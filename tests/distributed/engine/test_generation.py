"""Forwards without gradients that differ between ranks: generation of different lengths, and evaluation on one rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Block, Routed, make_config
from tests.support.parity import assert_close
from tests.support.rank_pool import RankFailure, run_ranks

PLACED: dict[str, dict[str, object]] = {"hpz": {"zero_hpz_partition_size": 2}, "stage 3": {}, "stage 1": {"stage": 1}}


def chain(count: int = 3) -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(*(Block(8) for _ in range(count))).double()


def rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 * step + rank)
    return torch.randn(3, 8, generator=generator, dtype=torch.float64)


def wrap(model: nn.Module, **settings: object) -> zeropp.ZeroOptimizer:
    return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))


def generated(settings: dict[str, object], lengths: list[int], join: bool) -> tuple[Tensor, Tensor]:
    """Generate rows: each call of the model appends one row to the input. Then train one step.

    Args:
        settings: keys for ``make_config``.
        lengths: number of rows that each rank generates.
        join: True to let ranks that have finished call the model until the last rank has finished.

    Returns:
        This rank's input and generated rows, from the sharded model and from a plain copy.
    """
    model = chain()
    plain = copy.deepcopy(model)
    optimizer = wrap(model, hang_timeout=3 if join else 2, **settings)
    own = lengths[dist.get_rank()]
    x = y = rows(0, dist.get_rank())
    with torch.no_grad():
        for call in range(max(lengths) if join else own):
            out = model(x)
            if call < own:
                x = torch.cat([x, out[-1:]])
                y = torch.cat([y, plain(y)[-1:]])
    optimizer.zero_grad()
    model(rows(1, 0)).sum().backward()
    optimizer.step()
    return x, y


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PLACED)
def test_ranks_generate_different_lengths_if_all_make_as_many_calls(name: str) -> None:
    """Calls are collective, so a finished rank goes on calling the model, as with transformers' ``synced_gpus``."""
    for found, expected in run_ranks(4, generated, PLACED[name], [3, 6, 1, 4], True, local_world_size=2):
        assert_close(found, expected, 1e-12, "rows")


def test_a_rank_that_stops_calling_is_named() -> None:
    for failure in run_ranks(2, generated, {}, [2, 5], False, catch=True, timeout=60):
        assert isinstance(failure, RankFailure) and "no longer in step" in failure.message


def alone_between(settings: dict[str, object]) -> tuple[float, float]:
    """Train four steps, and evaluate the model and one of its blocks on rank 0 alone after each step.

    One block is frozen after the third step.

    Returns:
        Sum of the outputs on this rank, of the sharded model and of a plain model with the same weights.
    """
    model = Routed().double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    x, found, expected = torch.ones(2, 8, dtype=torch.float64), 0.0, 0.0
    for step in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step == 2:
            model.blocks[0].requires_grad_(False)
        whole = zeropp.full_state(model)
        if dist.get_rank() == 0:
            plain = Routed().double()
            plain.load_state_dict(whole)
            for training in (False, True):
                with torch.inference_mode():
                    found += float(model.train(training)(x).sum() + model.blocks[1](x).sum())
                    expected += float(plain(x).sum() + plain.blocks[1](x).sum())
    return found, expected


@pytest.mark.every(5)
@pytest.mark.parametrize("stage", [2, 0, 1])
def test_one_rank_evaluates_alone_below_stage_3(stage: int) -> None:
    for found, expected in run_ranks(2, alone_between, {"stage": stage}):
        assert abs(found - expected) <= 1e-12


def test_one_rank_may_use_whole_weights_alone() -> None:
    """Below stage 3 a forward gathers nothing, so each rank may run any number of forwards without gradients."""
    for found, expected in run_ranks(2, generated, {"stage": 1}, [2, 5], False):
        assert_close(found, expected, 1e-12, "rows")
