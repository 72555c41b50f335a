"""One non-finite gradient element on one rank: every rank skips the step, and the next step works."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeropp
from tests.support.branching_models import Routed, chain, logged, make_config, shards, share
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Poisoned(Routed):
    """Model that sets one element of the gradient at the output of block ``place`` to ``value``; its loss is finite."""

    value: float | None = None
    place = 1

    def forward(self, x: Tensor, route: object = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.place and self.value is not None and torch.is_grad_enabled():
                x.register_hook(self._spoil)
        return x

    def _spoil(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = self.value
        return gradient


def states(optimizer: zeropp.ZeroOptimizer) -> list[Tensor]:
    rows = [row for row in optimizer.state.values()]
    return [value.clone() for row in rows for value in row.values() if isinstance(value, Tensor)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, dtype: torch.dtype, micro: int = 1) -> None:
    optimizer.zero_grad()
    for index in range(micro):
        generator = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
        x = torch.randn(3, 8, generator=generator).to(dtype)
        loss = model(x).float().square().mean() if dtype != torch.float64 else model(x).square().mean()
        (loss / micro).backward()


def skip_one(
    dtype: str, value: float, poisoned: int, place: int, settings: dict[str, object], micro: int, at: int
) -> list[str]:
    """Take five steps, the third with a non-finite gradient on one rank, beside a twin without the third step.

    Args:
        dtype: key of DTYPES.
        value: gradient element that is not finite.
        poisoned: rank that gets the element.
        place: block at whose output the gradient gets the element.
        settings: settings of the configuration.
        micro: micro-batches in a step.
        at: micro-batch that gets the element.

    Returns:
        Texts on results that are wrong.
    """
    torch_dtype = DTYPES[dtype]
    wrong: list[str] = []
    config = make_config(bf16={"enabled": dtype == "bf16"}, gradient_accumulation_steps=micro, **settings)
    model = Poisoned().to(torch_dtype)
    share(model)
    twin = copy.deepcopy(model)
    make = lambda m: zeropp.ZeroOptimizer(torch.optim.AdamW(m.parameters(), lr=0.01), m, config)  # noqa: E731
    optimizer, twin_optimizer = make(model), make(twin)
    for step in range(5):
        bad = step == 2
        model.value = None
        model.place = place
        before, states_before = shards(optimizer), states(optimizer)
        if bad:
            optimizer.zero_grad()
            for index in range(micro):
                model.value = value if dist.get_rank() == poisoned and index == at else None
                x = torch.randn(3, 8).to(torch_dtype)
                optimizer.backward(model(x).square().mean())
        else:
            train(model, optimizer, step, torch_dtype, micro)
            train(twin, twin_optimizer, step, torch_dtype, micro)
        reads = optimizer.step_sync.reads
        optimizer.step()
        if optimizer.step_sync.reads != reads + 1:
            wrong.append(f"step {step}: {optimizer.step_sync.reads - reads} host reads")
        if not bad:
            twin_optimizer.step()
        if optimizer.step_was_skipped != bad:
            wrong.append(f"step {step}: step_was_skipped is {optimizer.step_was_skipped}")
        if optimizer.skipped_steps != int(step >= 2):
            wrong.append(f"step {step}: skipped_steps is {optimizer.skipped_steps}")
        finite = optimizer.grad_norm is not None and optimizer.grad_norm - optimizer.grad_norm == 0
        if finite == bad:
            wrong.append(f"step {step}: grad_norm is {optimizer.grad_norm}")
        changed = not all(map(torch.equal, before, shards(optimizer)))
        moved = len(states_before) != len(states(optimizer)) or not all(
            map(torch.equal, states_before, states(optimizer))
        )
        if bad and (changed or moved):
            wrong.append(f"step {step}: weights changed {changed}, optimizer states changed {moved}")
        if not all(map(torch.equal, shards(optimizer), shards(twin_optimizer))):
            wrong.append(f"step {step}: weights differ from those of a run without the skipped step")
    return wrong


def check(world: int, local: int, *args: object) -> None:
    for rank, wrong in enumerate(run_ranks(world, skip_one, *args, local_world_size=local)):
        assert not wrong, f"rank {rank}: {wrong}"


# By name: ranks, ranks per node, dtype, value, poisoned rank, block, settings, micro-batches, poisoned micro-batch.
CASES = {
    "two-fp32-nan": (2, 2, "fp32", "nan", 1, 1, {}, 1, 0),
    "two-fp32-inf-persistent": (2, 2, "fp32", "inf", 0, 3, {"persist": 1000}, 1, 0),
    "two-bf16-inf": (2, 2, "bf16", "inf", 1, 0, {"reuse": 0, "prefetch": 0}, 1, 0),
    "two-bf16-nan-clipping": (2, 2, "bf16", "nan", 0, 2, {"gradient_clipping": 0.5}, 1, 0),
    "two-fp64-minus-inf-clipping": (2, 2, "fp64", "-inf", 1, 3, {"gradient_clipping": 0.5}, 1, 0),
    "two-fp32-first-of-three": (2, 2, "fp32", "inf", 1, 1, {}, 3, 0),
    "two-nodes-of-one": (2, 1, "bf16", "nan", 1, 2, {}, 1, 0),
    "four-fp32-inf": (4, 4, "fp32", "inf", 3, 2, {}, 1, 0),
    "two-by-two-bf16-inf": (4, 2, "bf16", "inf", 2, 0, {"persist": 20}, 1, 0),
    "two-by-two-fp64-nan": (4, 2, "fp64", "nan", 3, 1, {}, 2, 1),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_skips(name: str) -> None:
    world, local, dtype, value, poisoned, place, settings, micro, at = CASES[name]
    check(world, local, dtype, VALUES[value], poisoned, place, settings, micro, at)


@pytest.mark.campaign
@pytest.mark.timeout(600)  # seconds, for 108 runs
@pytest.mark.parametrize("world", [(2, 2), (2, 1), (4, 4), (4, 2)], ids=str)
def test_every_rank_skips_sweep(world: tuple[int, int]) -> None:
    for dtype, value, place in itertools.product(DTYPES, VALUES, range(4)):
        for settings in ({}, {"persist": 1000}, {"persist": 20, "gradient_clipping": 0.5}):
            check(*world, dtype, VALUES[value], world[0] - 1, place, settings, 1, 0)


def overflow() -> tuple[bool, float]:
    """Step with gradients that are finite on each rank, but whose sum over ranks is not.

    Returns:
        True if the step was skipped, and its norm.
    """
    model = nn.Linear(512, 4, bias=False)
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, make_config(gradient_allreduce_op="sum")
    )
    before = shards(optimizer)
    (model(torch.ones(1, 512)) * 3e38).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, shards(optimizer)))
    return optimizer.step_was_skipped, optimizer.grad_norm or 0.0


def test_a_sum_that_overflows_is_skipped() -> None:
    for skipped, norm in run_ranks(2, overflow):
        assert skipped and norm - norm != 0


def large() -> tuple[bool, float]:
    """Step with finite gradients whose squares overflow float32; return True if the step was skipped, and the norm."""
    model = nn.Linear(512, 4, bias=False)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-30), model, make_config())
    (model(torch.ones(1, 512)) * 1e25).sum().backward()
    optimizer.step()
    return optimizer.step_was_skipped, optimizer.grad_norm or 0.0


def test_large_finite_gradients_are_not_skipped() -> None:
    for skipped, norm in run_ranks(2, large):
        assert not skipped
        assert norm == pytest.approx(1e25 * 2048**0.5, rel=1e-5)


def alone(value: float) -> tuple[int, bool]:
    model = Poisoned()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    before = shards(optimizer)
    model.value = value
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
    return optimizer.skipped_steps, all(map(torch.equal, before, shards(optimizer)))


def test_one_rank_without_a_process_group() -> None:
    assert run_ranks(1, alone, float("nan"), init=False) == [(2, True)]


def loop_reads() -> list[int]:
    """Return the host reads of four steps: plain, clipped by hand, with edited gradients, and with ``no_sync()``."""
    model = Routed()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    counts = []
    for how in ("plain", "clipped", "edited", "no_sync"):
        before = optimizer.step_sync.reads
        train(model, optimizer, 0, torch.float32)
        if how == "clipped":
            optimizer.clip_grad_norm_(0.1)
        if how == "edited":
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(2)
        if how == "no_sync":
            with optimizer.no_sync():
                model(torch.randn(3, 8)).square().mean().backward()
            model(torch.randn(3, 8)).square().mean().backward()
        optimizer.step()
        counts.append(optimizer.step_sync.reads - before)
    return counts


@pytest.mark.campaign
def test_one_host_read_a_step() -> None:
    assert run_ranks(2, loop_reads) == [[1, 1, 1, 1]] * 2


def unchecked(clipping: float) -> tuple[int, list[Tensor], list[Tensor]]:
    """Step with Inf on one rank and without the overflow check.

    Returns:
        Number of skipped steps, weights, and weights of plain torch.
    """
    torch.manual_seed(0)
    plain = Poisoned()
    model = copy.deepcopy(plain)
    bf16 = {"enabled": True, "check_grad_overflow": False}
    config = make_config(bf16=bf16, gradient_clipping=clipping)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, config)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for rank in range(2):
        x = torch.full((3, 8), 0.3 + 0.1 * rank)
        plain.value = float("inf") if rank == 1 else None
        (plain(x).square().mean() / 2).backward()
        if rank == dist.get_rank():
            model.value = plain.value
            optimizer.backward(model(x.bfloat16()).float().square().mean())
    optimizer.step()
    if clipping:
        nn.utils.clip_grad_norm_(plain.parameters(), clipping)
    other.step()
    assert optimizer.step_was_taken and not optimizer.step_was_skipped
    return optimizer.skipped_steps, list(zeropp.full_state(model).values()), list(plain.state_dict().values())


@pytest.mark.every(2)
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_step_that_nobody_checks_is_taken(clipping: float) -> None:
    """The same elements of the weights are not finite as in plain torch. With clipping these are all elements."""
    for skipped, own, wanted in run_ranks(2, unchecked, clipping):
        assert skipped == 0
        bad = [value.isfinite().logical_not() for value in wanted]
        assert all(torch.equal(o.isfinite().logical_not(), b) for o, b in zip(own, bad, strict=True))
        assert any(each.any() for each in bad) and (all(each.all() for each in bad) == (clipping > 0))


class Reads(TorchDispatchMode):
    """Counter of operations that read a number of a tensor on the host, called by any code."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def watched_reads(settings: dict[str, object]) -> list[tuple[list[str], list[str]]]:
    """Return, for each step, the host reads in forward and backward, and those in ``step()``.

    With one rank everything runs in this thread, so the counter sees all operations.
    """
    model = Routed()
    config = make_config(gradient_clipping=0.1, **settings)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, config)
    found = []
    for _ in range(3):
        with Reads() as passes:
            optimizer.backward(model(torch.randn(3, 8)).square().mean())
        with Reads() as step:
            optimizer.step()
            optimizer.zero_grad()
        found.append((passes.names, step.names))
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}, {"persist": 1000}], ids=str)
def test_no_read_in_forward_and_backward(settings: dict[str, object]) -> None:
    """Host reads are counted by a dispatch mode, and not by zeropp itself.

    ``step()`` may read twice: torch's norm reads its own result on a CPU, and one number is on the host already.
    """
    [steps] = run_ranks(1, watched_reads, settings, init=False)
    for passes, step in steps:
        assert passes == []
        assert len(step) <= 2, step


def nan_in_stray_gradients() -> tuple[list[str], int]:
    """Let the last rank have stray gradients with NaN, in a step in which no gradient is edited.

    Returns:
        Log messages on gradients that were scaled, and the number of skipped steps.
    """
    pair = Pair(Routed(), make_config(persist=1000))
    for _ in range(2):
        pair.train(chain(2, 3))
    pair.zero_grad()
    with logged() as messages:
        route = chain(4) if pair.rank == pair.world - 1 else chain(2, 3)
        (pair.model(pair.batch(pair.rank), route).square().mean() * torch.nan).backward()
        pair.optimizer.step()
    return [message for message in messages if "scaled" in message], pair.optimizer.skipped_steps


def test_nan_in_stray_gradients_is_not_taken_for_an_edit() -> None:
    for said, skipped in run_ranks(2, nan_in_stray_gradients):
        assert said == [] and skipped == 1
