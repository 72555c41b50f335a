"""``zeropp.accumulate`` gives the losses, norms and weights of a plain torch loop over the same micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.accumulate_stages import STAGES, train_layered
from tests.support.branching_models import WIDTH, Routed, apart, make_config, worst
from tests.support.parity import Recipe, compare, train_plain
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair, rows
from zeropp._compat import unguarded


def check(recipe: Recipe, world: int, how: str = "all", *, nodes: int = 1) -> None:
    """Compare training by ``accumulate`` with plain torch, within 1e-9.

    In float64 a different order of sums stays below this bound.
    """
    runs = run_ranks(world, train_layered, recipe, how, local_world_size=world // nodes)
    for number, (run, plain) in enumerate(zip(runs, train_plain(recipe, world), strict=True)):
        compare(run, plain, 1e-9, f"rank {number}")


@pytest.mark.every(16)
@pytest.mark.parametrize("model", STAGES)
def test_every_model_trains_as_in_a_loop(model: str) -> None:
    check(Recipe(model=model, accumulation=3, steps=4, clip=0.5), 2)


# By name: ranks, nodes, settings of the zero block, and the argument ``how`` of `train_layered`.
CASES = {
    "one rank": (1, 1, {}, "all"),
    "one rank, stage 1": (1, 1, {"stage": 1}, "all"),
    "stage 0": (2, 1, {"stage": 0}, "all"),
    "stage 1": (2, 1, {"stage": 1}, "all"),
    "stage 2": (2, 1, {"stage": 2}, "all"),
    "stage 1, in halves": (2, 1, {"stage": 1}, "halves"),
    "stage 3, in halves": (2, 1, {}, "halves"),
    "stage 3, no_sync": (2, 1, {}, "no_sync"),
    "stage 3, in turn with a loop": (2, 1, {}, "in turn"),
    "nothing fetched ahead or kept": (
        2, 1,
        {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
        "all",
    ),
    "small ones persistent": (2, 1, {"stage3_param_persistence_threshold": 700}, "all"),
    "hpz": (4, 2, {"zero_hpz_partition_size": 2}, "all"),
    "mics": (4, 2, {"mics_shard_size": 2}, "halves"),
}  # fmt: skip


@pytest.mark.every(4)
@pytest.mark.parametrize("case", CASES)
def test_every_placement_trains_as_in_a_loop(case: str) -> None:
    world, nodes, zero, how = CASES[case]
    check(Recipe(accumulation=4, steps=5, clip=0.5, zero=zero), world, how, nodes=nodes)


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["all", "halves"])
def test_deferred_sums_wait_for_the_last_micro_batch(how: str) -> None:
    check(Recipe(accumulation=4, steps=4, extension={"defer_cross_reduction": True}), 4, how, nodes=2)


def test_sequential_models_need_no_stages() -> None:
    for found, wanted in run_ranks(2, sequential):
        assert apart(found, wanted) <= 1e-12


def sequential() -> tuple[Tensor, Tensor]:
    """Train on tuples as inputs; return the losses of ``accumulate`` and the losses of plain torch.

    No window is configured, so each call averages over its own micro-batches.
    """
    torch.manual_seed(3)
    model = nn.Sequential(Twice(), *(Residual() for _ in range(3)), nn.Linear(WIDTH, 1)).double()
    twin = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, make_config())
    other = torch.optim.SGD(twin.parameters(), lr=0.5)
    found, wanted, targets = [], [], (1.0, 2.0, 3.0)
    for step in range(4):
        batches = [(rows(step, micro, 0), rows(step, micro, 1)) for micro in range(3)]
        losses = zeropp.accumulate(model, zip(batches, targets, strict=True), lambda x, y: (x - y).square().mean())
        found.append(losses)
        optimizer.step()
        optimizer.zero_grad()
        values = [(twin(given) - y).square().mean() for given, y in zip(batches, targets, strict=True)]
        wanted.append(torch.stack(values).detach())
        torch.stack(values).mean().backward()
        other.step()
        other.zero_grad()
    assert not losses.requires_grad
    optimizer.close()
    return torch.cat(found), torch.cat(wanted)


class Twice(nn.Module):
    """Layer that takes a tuple and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.lin(both[0]), both[1]


class Residual(nn.Module):
    """Layer that takes a tuple or a tensor, and returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor] | Tensor) -> Tensor:
        x = both if isinstance(both, Tensor) else sum(both, torch.zeros_like(both[0]))
        return x + torch.tanh(self.lin(x))


def window(counts: tuple[int, ...]) -> list[bool]:
    """Return, for each call of ``accumulate``, True if the ``step()`` after the call was taken.

    Args:
        counts: number of micro-batches of each call. The configured window has four.
    """
    model = nn.Sequential(*(Residual() for _ in range(2))).double()
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(gradient_accumulation_steps=4)
    )
    taken = []
    for step, count in enumerate(counts):
        batches = [(rows(step, micro, 0), None) for micro in range(count)]
        zeropp.accumulate(model, batches, lambda x, _: x.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        taken.append(optimizer.step_was_taken)
    return taken


def test_micro_batches_count_in_the_window() -> None:
    assert run_ranks(1, window, (4, 2, 2, 1, 3, 4)) == [[True, False, True, False, True, True]]


def window_of_a_loop() -> list[bool]:
    """Return, for each backward of a window of four, True if the ``step()`` after the backward was taken.

    One ``accumulate`` of four micro-batches comes before the window.
    """
    model = Residual().double()
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(gradient_accumulation_steps=4)
    )
    batches = [(rows(0, micro, 0), None) for micro in range(4)]
    zeropp.accumulate(model, batches, lambda x, _: x.square().mean(), stages=[model])
    optimizer.step()
    optimizer.zero_grad()
    taken = []
    for x, _ in batches:
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        taken.append(optimizer.step_was_taken)
    return taken


def test_a_backward_after_it_is_one_micro_batch_again() -> None:
    assert run_ranks(1, window_of_a_loop) == [[False, False, False, True]]


def bits(dtype: torch.dtype, count: int, stage: int, layered: bool) -> dict[str, Tensor]:
    """Return the whole weights after four steps of SGD, which passes small differences of gradients on to weights.

    Args:
        dtype: dtype that the model computes with.
        count: micro-batches in a step.
        stage: ZeRO stage.
        layered: True to train by ``accumulate``, False to train by a loop.
    """
    torch.manual_seed(5)
    model = nn.Sequential(*(Residual() for _ in range(3)))
    settings: dict[str, Any] = {"stage": stage, "gradient_accumulation_steps": count}
    if dtype is torch.bfloat16:
        settings |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, make_config(**settings)
    )
    for step in range(4):
        given = [rows(step, 0, micro).float() for micro in range(count)]
        if layered:
            zeropp.accumulate(model, [(x, None) for x in given], lambda x, _: x.float().square().mean())
        else:
            for x in given:
                optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = zeropp.full_state(model)
    optimizer.close()
    return state


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("world", "count"), [(1, 2), (2, 1)])
def test_two_terms_of_a_sum_give_the_bits_of_a_loop(dtype: torch.dtype, stage: int, world: int, count: int) -> None:
    """Two terms have the same sum in either order, so weights equal those of a loop bit for bit.

    The two terms are two micro-batches on one rank, or one micro-batch on each of two ranks.
    """
    found, wanted = (run_ranks(world, bits, dtype, count, stage, layered)[0] for layered in (True, False))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.campaign
def test_several_micro_batches_differ_from_a_loop_by_rounding() -> None:
    """Five micro-batches are summed in another order than in a loop.

    The bound of 2e-6 is for float32 gradients near one over four steps: a sum of some roundings of 6e-8 each.
    """
    found, wanted = (run_ranks(2, bits, torch.float32, 5, 3, layered)[0] for layered in (True, False))
    assert worst(found, wanted) <= 2e-6


def sixteen_bits() -> float:
    """Return the norm of a gradient that is a sum of 256 and 63 ones, one term from each of 64 micro-batches.

    In bf16 such a sum would stay 256, because 256 + 1 rounds to 256.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    config = make_config(bf16={"enabled": True}, communication_data_type="fp32")
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    inputs = [torch.full((1, 1), 256.0), *[torch.ones(1, 1)] * 63]
    # accumulate adds gradients from the last micro-batch to the first. The large one is last, so ones are added to it.
    zeropp.accumulate(model, [(64 * x, None) for x in reversed(inputs)], lambda x, _: x.sum())
    optimizer.step()
    with unguarded():
        assert all(parameter.grad_dtype is torch.bfloat16 for parameter in model.parameters()), "restored for loops"
    return float(optimizer.grad_norm)


def test_gradients_of_16_bit_weights_are_summed_in_fp32() -> None:
    assert run_ranks(1, sixteen_bits) == [256 + 63]


class Noisy(nn.Module):
    """Layer that draws random numbers and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(torch.tanh(self.lin(x))))


def noisy(dropout: bool) -> tuple[float, float]:
    """Return the largest differences of weights and of buffers from plain torch.

    Args:
        dropout: True to compare with plain torch that runs stage by stage; False to compare with a loop, without
            dropout.
    """
    torch.manual_seed(5)
    model = nn.Sequential(*(Noisy() for _ in range(3))).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    twin = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        given = [rows(step, 0, micro) for micro in range(3)]
        torch.manual_seed(step)
        zeropp.accumulate(model, [(x, None) for x in given], lambda x, _: x.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        if dropout:
            for part in twin:
                given = [part(x) for x in given]
        else:
            given = [twin(x) for x in given]
        (sum(x.square().mean() for x in given) / 3).backward()
        other.step()
        other.zero_grad()
    found, wanted = zeropp.full_state(model), twin.state_dict()
    buffers = {name for name, _ in twin.named_buffers()}
    distance = {name: apart(found[name], wanted[name]) for name in wanted}
    return max(distance[n] for n in distance if n not in buffers), max(distance[n] for n in buffers)


@pytest.mark.parametrize("dropout", [True, False])
def test_random_numbers_are_drawn_by_stage_and_buffers_see_micro_batches_in_order(dropout: bool) -> None:
    """Without dropout, running statistics equal those of a loop.

    All ranks have the same inputs, so one plain model serves for all of them.
    """
    for weights, buffers in run_ranks(2, noisy, dropout):
        assert weights <= 1e-12 and buffers <= 1e-12


def scaled() -> tuple[list[bool], list[float]]:
    """Return which of four steps GradScaler takes, and the scale after each. Rank 1 overflows in the second step."""
    model = nn.Sequential(*(Residual() for _ in range(2)))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    taken, scales = [], []
    for step in range(4):
        bad = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        batches = [(rows(step, 0, micro).float() * (bad if micro == 1 else 1.0), None) for micro in range(3)]
        zeropp.accumulate(model, batches, lambda x, _: scaler.scale(x.square().mean()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken.append(optimizer.step_was_taken)
        scales.append(scaler.get_scale())
    return taken, scales


def test_grad_scaler_scales_losses_and_skips() -> None:
    for taken, scales in run_ranks(2, scaled):
        assert taken == [True, False, True, True] and scales == [8.0, 4.0, 8.0, 16.0]


def not_finite() -> tuple[list[bool], int]:
    model = nn.Sequential(*(Residual() for _ in range(2)))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    skipped = []
    for step in range(3):
        bad = float("nan") if step == 1 and dist.get_rank() == 1 else 1.0
        zeropp.accumulate(model, [(rows(step, 0, n).float() * bad, None) for n in range(2)], lambda x, _: x.mean())
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    return skipped, optimizer.skipped_steps


def test_a_step_that_is_not_finite_is_skipped() -> None:
    assert run_ranks(2, not_finite) == [([False, True, False], 1)] * 2


def routed(route_of: str) -> float:
    """Return the largest weight difference from plain torch when ranks or micro-batches take different branches.

    Args:
        route_of: rule by which the branch of a micro-batch is chosen, see `_route`.
    """
    pair = Pair(Routed(4), make_config())
    for step in range(6):
        pair.zero_grad()
        routes = [_route(route_of, step, micro, pair.rank) for micro in range(3)]
        batches = [((rows(step, micro, pair.rank), routes[micro]), None) for micro in range(3)]
        stages = [lambda both: (pair.model.blocks[0](both[0]), both[1]), lambda both: _branch(pair.model, *both)]
        zeropp.accumulate(pair.model, batches, lambda x, _: x.square().mean(), stages=stages)
        for rank in range(pair.world):
            for micro in range(3):
                x = pair.plain.blocks[0](rows(step, micro, rank))
                out = _branch(pair.plain, x, _route(route_of, step, micro, rank))
                (out.square().mean() / 3 / pair.world).backward()
        pair.step()
    return pair.difference()


def _branch(model: Any, x: Tensor, index: int) -> Tensor:
    y: Tensor = model.blocks[index](x)
    return y


def _route(how: str, step: int, micro: int, rank: int) -> int:
    return 1 + {"by micro-batch": micro, "by rank": 2 * rank, "by both": (step + micro + rank) % 3}[how]


@pytest.mark.every(5)
@pytest.mark.parametrize("how", ["by micro-batch", "by rank", "by both"])
def test_micro_batches_may_go_different_ways(how: str) -> None:
    for difference in run_ranks(2, routed, how):
        assert difference <= 1e-12
