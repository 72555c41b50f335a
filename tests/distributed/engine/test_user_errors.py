"""Errors of the user's code: training goes on if all ranks raise them, and stops with an error if one rank does."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branch_routes import ALL
from tests.support.branching_models import Block, Route, Routed, chain, make_config, shards
from tests.support.owned_memory import live_numel
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair


class Refusing(torch.autograd.Function):
    """An identity whose backward raises an error."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("told to fail in backward")


class Fragile(Routed):
    """Blocks that fail on demand.

    Attributes:
        fail: (how, number of the block); None for no failure. The error is raised "before" the block, "inside" it, in
            its "backward", or inside it and "caught" by the model, which goes on with the next block.
    """

    fail: tuple[str, int] | None = None

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            how, where = self.fail or ("", -1)
            if index == where and how == "before":
                raise ArithmeticError("told to fail before a block")
            if index == where and how == "caught":
                try:
                    block("no tensor")
                except TypeError:
                    continue
            x = block("no tensor" if index == where and how == "inside" else x)
            if index == where and how == "backward":
                x = Refusing.apply(x)
        return x


def fail_and_go_on(how: str, where: int, at: int, settings: dict[str, object]) -> None:
    """Train four steps, one of which begins with a pass that fails.

    The weights are compared with those of a plain model that runs no failing pass.

    Args:
        how: kind of the failure; see `Fragile`.
        where: number of the block.
        at: number of the step.
        settings: keys for ``make_config``.
    """
    pair = Pair(Fragile(), make_config(**settings))
    for step in range(4):
        if step == at:
            pair.model.fail = how, where
            pair.optimizer.zero_grad()
            with pytest.raises((ArithmeticError, TypeError)):
                pair.model(pair.batch(pair.rank)).square().mean().backward()
            pair.model.fail = None
            pair.optimizer.zero_grad()
            assert live_numel(pair.engine.units) == 0, "units are still gathered after the error"
        pair.train(None)
        pair.check()
    units = pair.engine.units
    assert live_numel(units) == sum(u.numel for u in units if u.index in pair.engine._schedule.live_units.planned)


FAILURES = [("before", 2), ("inside", 0), ("inside", 3), ("backward", 3), ("backward", 1)]


@pytest.mark.every(6)
@pytest.mark.parametrize("at", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize(("how", "where"), FAILURES)
def test_an_error_on_every_rank_and_the_next_step(how: str, where: int, at: int) -> None:
    run_ranks(2, fail_and_go_on, how, where, at, {})


@pytest.mark.campaign
@pytest.mark.parametrize("settings", [{"reuse": 0, "prefetch": 0}, {"persist": 1000}, {"overlap_comm": False}])
@pytest.mark.parametrize(("how", "where"), FAILURES)
def test_an_error_on_every_rank_and_the_next_step_settings(how: str, where: int, settings: dict[str, object]) -> None:
    run_ranks(4, fail_and_go_on, how, where, 2, settings, local_world_size=2)


def caught_inside() -> None:
    """Train four steps. In two of them, the model catches the error of a block and goes on."""
    pair = Pair(Fragile(), make_config())
    for fail in (None, ("caught", 1), ("caught", 1), None):
        pair.model.fail = pair.plain.fail = fail
        pair.train(None)
        pair.check()


def test_an_error_that_the_model_catches() -> None:
    run_ranks(2, caught_inside)


def kept_gradients() -> None:
    """Let the backward of a second micro-batch fail after the gradients of the first one were reduced.

    ``zero_grad`` must drop the gradients of both before the next step.
    """
    pair = Pair(Fragile(), make_config(gradient_accumulation_steps=2, managed_gradient_accumulation=False))
    pair.train(None)
    pair.check()
    pair.zero_grad()
    pair.model(pair.batch(pair.rank)).square().mean().backward()
    pair.model.fail = "backward", 1
    with pytest.raises(ArithmeticError):
        pair.model(pair.batch(pair.rank)).square().mean().backward()
    pair.model.fail = None
    pair.train(None)
    pair.check()


def test_an_error_in_a_later_micro_batch() -> None:
    run_ranks(2, kept_gradients)


class Uneven(nn.Module):
    """Blocks of different sizes, so that the messages of ranks that are out of step differ in size.

    Attributes:
        spoil: True to raise an error in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (8, 32, 8, 48))
        self.spoil = False

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for block in self.blocks:
            x = block(torch.ones(1, block.lin.in_features) * total)
            total = total + x.sum()
            if self.spoil and block is self.blocks[1]:
                total.register_hook(_raise)
        return total


def _raise(gradient: Tensor) -> None:
    raise ValueError("a bad batch")


def skip_bad_batches(settings: dict[str, object], ranks: list[int]) -> str:
    """Train six steps. On some ranks the backward of step 3 fails, and these ranks skip the step.

    Args:
        settings: keys for ``make_config``.
        ranks: ranks that fail.

    Returns:
        The error that ends training, or "done".
    """
    model = Uneven()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, make_config(**settings))
    try:
        for step in range(6):
            model.spoil = step == 3 and dist.get_rank() in ranks
            optimizer.zero_grad()
            try:
                model(torch.ones(1)).backward()
            except ValueError:
                continue
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("stage", [pytest.param(n, marks=() if n == 1 else pytest.mark.campaign) for n in range(4)])
def test_a_batch_that_one_rank_skips_is_an_error_and_not_the_end_of_the_process(stage: int) -> None:
    for said in run_ranks(2, skip_bad_batches, {"stage": stage, "hang_timeout": 2}, [1]):
        assert "no longer in step" in said
    assert run_ranks(2, skip_bad_batches, {"stage": stage}, [0, 1]) == ["done", "done"]


def try_again(settings: dict[str, object], fail: bool) -> dict[str, Tensor]:
    """Train five steps.

    Args:
        settings: keys for ``make_config``.
        fail: True to let one more forward fail on rank 1 before each of the last three steps.

    Returns:
        Full weights.
    """
    torch.manual_seed(1)
    model = Uneven()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, make_config(**settings))
    for step in range(5):
        optimizer.zero_grad()
        if fail and step > 1 and dist.get_rank() == 1:
            with pytest.raises(AttributeError):
                model(None)
        model(torch.ones(1)).backward()
        optimizer.step()
    return zeropp.full_state(model)


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{"persist": 10_000}, {"stage": 1}, {"stage": 2}], ids=str)
def test_a_forward_without_gathers_may_fail_on_one_rank_and_be_tried_again(settings: dict[str, object]) -> None:
    """The failed forward does not count, so the next backward has the same kind on all ranks."""
    settings = {**settings, "hang_timeout": 5}
    expected, _ = run_ranks(2, try_again, settings, False)
    for found in run_ranks(2, try_again, settings, True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def skip_edits(ranks: list[int]) -> str:
    """Train six steps. In step 3, a hook on some ranks edits a weight and raises an error; these ranks skip the step.

    The engine then releases the units of the failed forward, and finds the edit, which is a second error.

    Args:
        ranks: ranks that fail.

    Returns:
        The error that ends training, or the warnings of the failed forward.
    """
    model = Uneven()
    config = make_config(hang_timeout=2, prefetch=0)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, config)
    said = []

    def edit_and_fail(block: nn.Module, *_: object) -> None:
        if bad:
            with torch.no_grad():
                block.lin.weight.mul_(2.0)  # the unit stays gathered for backward
            raise ValueError("a bad batch")

    model.blocks[1].register_forward_hook(edit_and_fail)
    try:
        for step in range(6):
            bad = step == 3 and dist.get_rank() in ranks
            optimizer.zero_grad()
            try:
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    model(torch.ones(1)).backward()
            except ValueError:
                said += [str(each.message) for each in found]
                continue
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return " ".join(said)


def test_an_error_upon_an_error_on_every_rank_is_named() -> None:
    for said in run_ranks(2, skip_edits, [0, 1]):
        assert "edited in place" in said and "no longer in step" not in said


@pytest.mark.campaign
def test_an_error_upon_an_error_on_one_rank_is_not_the_end_of_the_process() -> None:
    """A second error while units are released after the first must not hide that this rank is out of step."""
    for said in run_ranks(2, skip_edits, [1]):
        assert "no longer in step" in said


def strict() -> tuple[str, bool]:
    pair = Pair(Routed(), make_config(ignore_unused_parameters=False))
    pair.train(ALL, chain(0, 1))
    pair.check()
    before = shards(pair.optimizer)
    pair.zero_grad()
    pair.backward(chain(0, 1), chain(1, 2))
    with pytest.raises(RuntimeError) as caught:
        pair.optimizer.step()
    unchanged = all(map(torch.equal, before, shards(pair.optimizer)))
    pair.train(ALL)
    pair.plain_optimizer.zero_grad()
    pair.check()
    return str(caught.value), unchanged


def test_unused_parameters_stop_training_by_name() -> None:
    for message, unchanged in run_ranks(2, strict):
        assert "blocks.3.lin.weight" in message and "blocks.3.lin.bias" in message
        assert "blocks.2" not in message  # rank 1 used this block
        assert "ignore_unused_parameters" in message
        assert unchanged
