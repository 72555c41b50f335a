"""Gradients that users clear, replace or edit in the ways that torch's optimizers allow, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branch_routes import ALL
from tests.support.branching_models import WIDTH, Routed, chain, make_config, worst
from tests.support.rank_pool import run_ranks, some, spread
from tests.support.sharded_and_plain import Pair

Clear = Callable[[nn.Module, torch.optim.Optimizer, Any], None]  # model, torch's optimizer, optimizer that steps


def by_wrapper(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    optimizer.zero_grad()


def by_inner(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    inner.zero_grad()


def by_inner_in_place(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    inner.zero_grad(set_to_none=False)


def by_model(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    model.zero_grad()


def by_parameters(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def by_groups(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def by_some_parameters(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any) -> None:
    """Clear the gradients of the first three parameters; the other gradients go on accumulating."""
    for parameter in list(model.parameters())[:3]:
        parameter.grad = None


CLEARS: dict[str, Clear] = {
    clear.__name__: clear
    for clear in (by_wrapper, by_inner, by_inner_in_place, by_model, by_parameters, by_groups, by_some_parameters)
}


class Net(nn.Module):
    """Model whose last layer is unused in some forwards. It must not move without a gradient, even with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 6)])

    def forward(self, x: Tensor, last: bool = True) -> Tensor:
        for layer in self.layers[: 3 if last else 2]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def model_and_sgd() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2 * world, 6, generator=generator, dtype=torch.float64) for _ in range(6)]


def share(batch: Tensor, rank: int) -> Tensor:
    return batch[2 * rank : 2 * rank + 2]


def drive(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any, data: list[Tensor], how: str) -> None:
    for index, batch in enumerate(data):
        CLEARS[how](model, inner, optimizer)
        model(batch, index % 3 != 2).backward()
        optimizer.step()


def cleared(how: str, persist: int) -> float:
    """Return the largest weight difference from plain torch."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain, sgd = model_and_sgd()
    drive(plain, sgd, sgd, batches(world), how)
    model, inner = model_and_sgd()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(persist=persist))
    drive(model, inner, optimizer, [share(batch, rank) for batch in batches(world)], how)
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.parametrize(("how", "persist"), spread(CLEARS, [0, 10_000], 2))
def test_gradients_cleared(how: str, persist: int) -> None:
    assert max(run_ranks(2, cleared, how, persist)) < 1e-12


class RemovingGradients(torch.optim.SGD):
    """SGD whose own step sets all gradients to None."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        by_groups(nn.Module(), self, self)


def cleared_before_another_order(how: str) -> list[bool]:
    """Clear gradients, then run the blocks in another order than before, so that gradients come late in backward.

    Returns:
        True for each step that was taken.
    """
    kind = RemovingGradients if how == "in the step" else torch.optim.SGD
    make = lambda model: kind(model.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    pair, taken = Pair(Routed(), make_config(), optimizer=make), []
    for route in (*[chain(4)] * 3, chain(3, 1, 2, 0), chain(4), chain(0, 3, 1), chain(4)):
        pair.backward(route)
        pair.step()
        taken.append(pair.optimizer.step_was_taken)
        pair.check()
        if how != "in the step":
            CLEARS[how](pair.model, pair.optimizer.inner, pair.optimizer)
            CLEARS[how](pair.plain, pair.plain_optimizer, pair.plain_optimizer)
    return taken


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["by_parameters", "by_groups", "by_wrapper", "in the step"])
@pytest.mark.parametrize("world", [2, 1])
def test_gradients_cleared_before_another_order(world: int, how: str) -> None:
    assert run_ranks(world, cleared_before_another_order, how) == [[True] * 7] * world


def numbers_waited_for(how: str) -> int:
    """Return how many times the host waited for a step's numbers in four steps."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, inner = model_and_sgd()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    for batch in batches(world)[:4]:
        CLEARS[how](model, inner, optimizer)
        model(share(batch, rank)).backward()
        optimizer.step()
    return optimizer.step_sync.reads


@pytest.mark.parametrize("how", some(["by_groups", *(how for how in CLEARS if how != "by_groups")], len(CLEARS)))
def test_clearing_gradients_adds_no_round(how: str) -> None:
    assert run_ranks(2, numbers_waited_for, how) == [4, 4]


def looked_at(persist: int) -> float:
    """Read the gradients of the model's own parameters between backward and step, which raises an error.

    Returns:
        The largest weight difference from plain torch, whose gradients are not read.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain, sgd = model_and_sgd()
    model, inner = model_and_sgd()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(persist=persist))
    for batch in batches(world):
        for each, stepper, part in ((plain, sgd, batch), (model, optimizer, share(batch, rank))):
            stepper.zero_grad()
            each(part).backward()
            for parameter in model.parameters() if each is model else ():
                with pytest.raises(RuntimeError, match="in memory of the optimizer and not in"):
                    _ = parameter.grad
            stepper.step()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(2)
@pytest.mark.parametrize("persist", [0, 10_000])
def test_a_gradient_that_was_asked_for_is_not_lost(persist: int) -> None:
    assert max(run_ranks(2, looked_at, persist)) < 1e-12


def halve(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def replaced() -> float:
    """Halve gradients by replacement between micro-batches; return the largest weight difference from plain torch."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain, sgd = model_and_sgd()
    model, inner = model_and_sgd()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    for batch in batches(world):
        for part in (batch, batch.flip(0) * 0.5):
            plain(part).backward()
            halve(plain.parameters())
            model(share(part, rank)).backward()
            halve(parameter for group in optimizer.param_groups for parameter in group["params"])
        for each in (sgd, optimizer):
            each.step()
            each.zero_grad()
    return worst(zeropp.full_state(model), plain.state_dict())


def test_gradients_replaced_between_micro_batches() -> None:
    assert max(run_ranks(2, replaced)) < 1e-12


def edited_by_hand(clipping: float) -> None:
    """Between backward and step, remove one gradient, replace one, and edit one in place, on every rank."""
    pair = Pair(Routed(3), make_config(persist=9, gradient_clipping=clipping))
    for _ in range(3):
        pair.zero_grad()
        pair.backward(ALL[:3])
        plain = dict(pair.plain.named_parameters())
        plain["blocks.0.lin.weight"].grad = None
        plain["blocks.1.lin.weight"].grad.mul_(3)
        plain["blocks.2.lin.bias"].grad.mul_(2)
        for piece in pair.optimizer.slices.stepped:
            if piece.name == "blocks.0.lin.weight":
                piece.parameter.grad = None
            if piece.name == "blocks.1.lin.weight":
                piece.parameter.grad = piece.parameter.grad * 3
            if piece.name == "blocks.2.lin.bias":
                piece.parameter.grad.mul_(2)
        norm = nn.utils.clip_grad_norm_(pair.plain.parameters(), clipping or math.inf)
        pair.step()
        pair.check()
        assert pair.optimizer.grad_norm == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize("clipping", [0.0, 0.01])
@pytest.mark.parametrize("world", some([2, 1], 2))
def test_gradients_edited_by_hand(world: int, clipping: float) -> None:
    run_ranks(world, edited_by_hand, clipping)


def looked_at_between_backwards(bound: float) -> None:
    """Read the norm and clip gradients before a second backward adds to them through other blocks."""
    pair = Pair(Routed(4), make_config())
    pair.train(chain(4))
    for _ in range(3):
        pair.zero_grad()
        pair.backward(chain(0, 1))
        found, plain = pair.optimizer.clip_grad_norm_(bound), nn.utils.clip_grad_norm_(pair.plain.parameters(), bound)
        assert float(found) == pytest.approx(float(plain), rel=1e-9)
        pair.backward(chain(1, 3))
        norm = nn.utils.get_total_norm([p.grad for p in pair.plain.parameters() if p.grad is not None])
        pair.step()
        pair.check()
        assert pair.optimizer.grad_norm == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.every(2)
@pytest.mark.parametrize("bound", [1e-3, math.inf])
def test_gradients_looked_at_between_backwards(bound: float) -> None:
    run_ranks(2, looked_at_between_backwards, bound)


def scale_down(gradient: Tensor) -> None:
    gradient.mul_(0.01)


def scale_down_unseen(gradient: Tensor) -> None:
    gradient.data.mul_(0.01)


def make_nan(gradient: Tensor) -> None:
    gradient[:1].fill_(math.nan)


def remove_nan(gradient: Tensor) -> None:
    gradient.nan_to_num_(0.25)


LOOKS: dict[str, Callable[[zeropp.ZeroOptimizer], object]] = {
    "grad_norms": lambda optimizer: optimizer.grad_norms(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1e6),
}


def edited_after_a_look(look: str, edit: Callable[[Tensor], None], stage: int) -> int:
    """Read norms, then edit gradients, then step with clipping; return the number of skipped steps.

    Args:
        look: key of LOOKS, the call that reads norms.
        edit: in-place edit of a gradient.
        stage: ZeRO stage.
    """
    pair = Pair(Routed(3), make_config(stage=stage, gradient_clipping=0.05))
    for step in range(3):
        pair.zero_grad()
        pair.backward(ALL[:3])
        groups = pair.optimizer.param_groups
        if edit is remove_nan:
            for name, parameter in pair.plain.named_parameters():
                if name == "blocks.0.lin.bias":
                    parameter.grad.fill_(math.nan)
            for piece in pair.optimizer.slices.stepped:
                if piece.name == "blocks.0.lin.bias":
                    piece.parameter.grad.fill_(math.nan)
        LOOKS[look](pair.optimizer)
        if step:  # no edit follows in the first step, so its statistics stay valid
            # Edits through .data are noticed only if the groups were read after the norms.
            asked = step == 1 or edit is scale_down_unseen
            for group in pair.optimizer.param_groups if asked else groups:
                for parameter in group["params"]:
                    edit(parameter.grad)
            for parameter in pair.plain.parameters():
                edit(parameter.grad)
        if edit is make_nan and step:
            pair.optimizer.step()
            assert pair.optimizer.step_was_skipped
            pair.advance()
            continue
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        if edit is remove_nan and not step:
            pair.optimizer.step()
            assert pair.optimizer.step_was_skipped
            pair.advance()
            continue
        pair.step()
        pair.check()
    pair.check()
    return pair.optimizer.skipped_steps


def edited_between_looks(again: bool, edit: Callable[[Tensor], None], stage: int) -> tuple[float, float]:
    """Edit tensors that were taken from the groups at the start, after norms were read.

    Args:
        again: True to read norms a second time after the edit.
        edit: in-place edit of a gradient.
        stage: ZeRO stage.

    Returns:
        Plain torch's norm, and the difference of the step's norm from it.
    """
    pair = Pair(Routed(3), make_config(stage=stage, gradient_clipping=0.05))
    taken = [parameter for group in pair.optimizer.param_groups for parameter in group["params"]]
    pair.backward(ALL[:3])
    pair.optimizer.grad_norms()
    for parameter in [*taken, *pair.plain.parameters()]:
        edit(parameter.grad)
    norm = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05).item()
    if again:
        found = math.hypot(*pair.optimizer.grad_norms().values())
        assert found == pytest.approx(norm, nan_ok=True)
    if math.isfinite(norm):
        pair.step()
        pair.check()
    else:
        pair.optimizer.step()
        assert pair.optimizer.step_was_skipped
    return norm, abs(pair.optimizer.grad_norm - norm)


@pytest.mark.every(6)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("edit", [scale_down, scale_down_unseen, make_nan])
@pytest.mark.parametrize("again", [True, False])
def test_gradients_edited_between_looks_at_their_norms(again: bool, edit: Callable[[Tensor], None], stage: int) -> None:
    for norm, error in run_ranks(2, edited_between_looks, again, edit, stage):
        assert math.isnan(norm) == math.isnan(error) == (edit is make_nan)
        assert edit is make_nan or error < 1e-9 * norm


@pytest.mark.every(5)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("look", "edit"),
    # remove_nan is not combined with clip_grad_norm_: clipping a NaN norm makes every gradient NaN, as in torch.
    [("grad_norms", remove_nan), *product(LOOKS, [scale_down, scale_down_unseen, make_nan])],
)
def test_step_goes_by_gradients_as_they_are(look: str, edit: Callable[[Tensor], None], stage: int) -> None:
    skipped = {make_nan: 2, remove_nan: 1}.get(edit, 0)
    assert run_ranks(2, edited_after_a_look, look, edit, stage) == [skipped, skipped]


def asks_for_input_gradients(stage: int, how: str, always: bool) -> None:
    """Compute gradients of inputs before the backward, and halve the parameters' gradients before the step."""
    pair = Pair(Routed(3), make_config(stage=stage, gradient_accumulation_steps=2), micros=2)
    for step in range(3):
        pair.zero_grad()
        for _ in range(2):
            for half in pair.halves:
                for rank in half.ranks:
                    x = half.batch(half.steps, half.micro, rank).requires_grad_()
                    loss = half.model(x, ((0,), (1,), (1,), (2,))).square().mean()
                    if always or step == 0:
                        if how == "autograd.grad":
                            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
                        else:
                            loss.backward(inputs=[x], retain_graph=True)
                            found = x.grad
                        assert float(found.abs().max()) > 0
                    half.call(loss / half.divisor)
        for parameter in (p for group in pair.optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:  # on a rank without slices, the group has a stand-in without a gradient
                parameter.grad.mul_(0.5)
        for parameter in pair.plain.parameters():
            parameter.grad.mul_(0.5)
        pair.step()
        assert pair.optimizer.step_was_taken
        pair.check()


@pytest.mark.every(5)
@pytest.mark.parametrize("always", [True, False], ids=["always", "first step"])
@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs=...)"])
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_backwards_without_gradients_of_parameters(stage: int, how: str, always: bool) -> None:
    run_ranks(2, asks_for_input_gradients, stage, how, always)


def edited_after_a_backward_over_more(stage: int) -> list[bool]:
    """Halve gradients after a backward over two forwards, where an earlier backward covered one forward.

    Returns:
        True for each step that was taken.
    """
    pair = Pair(Net(), make_config(stage=stage))
    x, taken = torch.arange(18, dtype=torch.float64).reshape(3, 6) / 18, []
    for together in (False, True, True):
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
            first, second = model(x), model(x * 2)
            if together:
                (first + second).backward()
            else:
                second.backward()
                first.backward()
            halve(parameter for group in optimizer.param_groups for parameter in group["params"])
            optimizer.step()
            optimizer.zero_grad()
        taken.append(pair.optimizer.step_was_taken)
        pair.check()
    return taken


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_edited_after_a_backward_over_more_forwards(stage: int) -> None:
    assert run_ranks(2, edited_after_a_backward_over_more, stage) == [[True] * 3] * 2


class Detour(nn.Module):
    """Two layers; some inputs go through the second layer only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.second(torch.tanh(self.first(x)) if both else x)


class Detours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Detour(), Detour()])

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x, both)), both)


def edited_in_every_step(stage: int) -> list[bool]:
    """Halve gradients in every step. Stray gradients of later backwards are reduced before the edit, so none misses it.

    Returns:
        True for each step that was taken.
    """
    pair, taken = Pair(Detours(), make_config(stage=stage)), []
    for ways in ((False, False), (False, True), (True, True), (True, False)):
        pair.zero_grad()
        pair.backward(*ways)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            halve(parameter for group in optimizer.param_groups for parameter in group["params"])
        pair.step()
        taken.append(pair.optimizer.step_was_taken)
        pair.check()
    return taken


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [3, 1])
def test_gradients_edited_in_every_step(stage: int) -> None:
    assert run_ranks(2, edited_in_every_step, stage) == [[True] * 4] * 2


def edited_after_a_look_at_held(stage: int, look: str) -> float:
    """Hold all gradients by ``no_sync()``; reading norms or clipping reduces and shows them; then halve them.

    Returns:
        The largest weight difference from plain torch.
    """
    pair = Pair(Detours(), make_config(stage=stage))
    with pair.optimizer.no_sync():
        pair.backward(True)
    if look == "norms":
        pair.optimizer.grad_norms()
    else:
        pair.optimizer.clip_grad_norm_(0.05)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        halve(parameter for group in optimizer.param_groups for parameter in group["params"])
    pair.step()
    return pair.difference()


@pytest.mark.campaign
@pytest.mark.parametrize("look", ["norms", "clip"])
@pytest.mark.parametrize("stage", [3, 1, 0])
def test_gradients_edited_after_held_ones_were_reduced(stage: int, look: str) -> None:
    assert max(run_ranks(2, edited_after_a_look_at_held, stage, look)) < 1e-12


def clipped_beside_a_late_one(again: bool) -> tuple[float, bool, bool]:
    """Edit gradients for the first time in a step with a stray gradient, which the edit misses; then clip and step.

    Args:
        again: True to edit and clip a second time.

    Returns:
        The norm from the last clipping, True if the step changed no weight, and True if the next step was taken.
    """
    pair = Pair(Detours(), make_config(stage=1))
    for ways in ((False, False), (False, False), (False, True)):
        pair.zero_grad()
        before = zeropp.full_state(pair.model)
        pair.backward(*ways)
    for _ in range(1 + again):
        halve(parameter for group in pair.optimizer.param_groups for parameter in group["params"])
        norm = float(pair.optimizer.clip_grad_norm_(0.01))
    pair.optimizer.step()
    same = worst(zeropp.full_state(pair.model), before) == 0.0
    pair.zero_grad()
    pair.backward(True)
    pair.optimizer.step()
    return norm, same, pair.optimizer.step_was_taken


@pytest.mark.every(2)
@pytest.mark.parametrize("again", [False, True])
def test_clipping_tells_of_an_edit_that_missed_a_gradient(again: bool) -> None:
    for norm, same, taken in run_ranks(2, clipped_beside_a_late_one, again):
        assert math.isnan(norm) and same and taken
