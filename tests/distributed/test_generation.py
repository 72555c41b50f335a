"""The wrapper beside other tools: profiler, gradients through gradients, several backwards, generation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.parity import assert_close
from tests.distributed.shapes import Block, Routed, make_config

PLACED: dict[str, dict[str, object]] = {"stage 1": {"stage": 1}, "stage 3": {}, "hpz": {"zero_hpz_partition_size": 2}}


def chain(count: int = 3) -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(*(Block(8) for _ in range(count))).double()


def rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 * step + rank)
    return torch.randn(3, 8, generator=generator, dtype=torch.float64)


def wrap(model: nn.Module, **settings: object) -> zeropp.ZeroOptimizer:
    return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))


def profiled(settings: dict[str, object]) -> set[str]:
    model = chain()
    optimizer = wrap(model, **settings)
    for _ in range(2):
        optimizer.zero_grad()
        model(rows(0, 0)).sum().backward()
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(rows(0, 0)).sum().backward()
        optimizer.step()
    optimizer.engine.refresh.wait()
    return {event.key for event in profile.key_averages() if event.key.startswith("zeropp::")}


def test_a_profile_names_what_was_issued_for_which_unit() -> None:
    for found in run_ranks(4, profiled, PLACED["hpz"], local_world_size=2):
        for what in ("gather", "wait", "pack", "reduce", "refresh"):
            assert {f"zeropp::{what} {unit}" for unit in (0, 1, 2)} <= found


def retained(settings: dict[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two losses of one graph, one backward each."""
    model = chain()
    plain = copy.deepcopy(model)
    optimizer, reference = wrap(model, **settings), torch.optim.SGD(plain.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        out = model(rows(step, rank))
        optimizer.backward(out.square().mean(), retain_graph=True)
        out.sum().mul(0.1).backward()
        for other in range(world):
            out = plain(rows(step, other))
            (out.square().mean() / world).backward(retain_graph=True)
            (out.sum() * 0.1 / world).backward()
        optimizer.step()
        reference.step()
    return zeropp.full_state(model), plain.state_dict()


@pytest.mark.parametrize("name", PLACED)
def test_two_backwards_of_one_graph(name: str) -> None:
    for found, expected in run_ranks(4, retained, PLACED[name], local_world_size=2):
        for key, value in expected.items():
            assert_close(found[key], value, 1e-9, key)


def penalised(settings: dict[str, object]) -> bool:
    """A gradient penalty: a graph of gradients, and backward through that. Whether the next step is right again."""
    model = chain()
    plain = copy.deepcopy(model)
    optimizer = wrap(model, **settings)
    x = rows(0, 0).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        optimizer.backward(gradient.square().mean())
    optimizer.zero_grad()
    return torch.allclose(model(rows(1, 0)), plain(rows(1, 0)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["stage 3", "stage 1"])
def test_backward_through_gradients_is_refused_by_name(name: str) -> None:
    assert run_ranks(2, penalised, PLACED[name]) == [True, True]


def generated(settings: dict[str, object], lengths: list[int], join: bool) -> tuple[Tensor, Tensor]:
    """Rows that grow by one a call; a rank that has finished joins the calls of the others, or does not."""
    model = chain()
    plain = copy.deepcopy(model)
    optimizer = wrap(model, hang_timeout=3, **settings)
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


@pytest.mark.parametrize("name", PLACED)
def test_ranks_generate_different_lengths_if_all_make_as_many_calls(name: str) -> None:
    """The contract of generation: as with ``synced_gpus`` of transformers, who is done calls on."""
    for found, expected in run_ranks(4, generated, PLACED[name], [3, 6, 1, 4], True, local_world_size=2):
        assert_close(found, expected, 1e-12, "rows")


def test_a_rank_that_stops_calling_is_named() -> None:
    for failure in run_ranks(2, generated, {}, [2, 5], False, catch=True, timeout=60):
        assert isinstance(failure, RankFailure) and "no longer in step" in failure.message


def alone_between(settings: dict[str, object]) -> tuple[float, float]:
    """Rank 0 alone evaluates the whole model and a part, the first time and again, also after a flip; all train."""
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


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_evaluates_alone_below_stage_3(stage: int) -> None:
    for found, expected in run_ranks(2, alone_between, {"stage": stage}):
        assert abs(found - expected) <= 1e-12


def test_whole_weights_need_no_company() -> None:
    """Below stage 3 nothing is gathered in a pass, so each rank may run as many as it likes without gradients."""
    for found, expected in run_ranks(2, generated, {"stage": 1}, [2, 5], False):
        assert_close(found, expected, 1e-12, "rows")
