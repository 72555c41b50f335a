"""Gradients that users clear, replace or edit in the ways torch's own optimizers allow, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.pair import Pair
from tests.distributed.routes import ALL
from tests.distributed.shapes import WIDTH, Routed, chain, make_config, worst

Clear = Callable[[nn.Module, torch.optim.Optimizer, Any], None]  # model, the plain optimizer, the one that steps


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
    """The others keep on accumulating."""
    for parameter in list(model.parameters())[:3]:
        parameter.grad = None


CLEARS: dict[str, Clear] = {
    clear.__name__: clear
    for clear in (by_wrapper, by_inner, by_inner_in_place, by_model, by_parameters, by_groups, by_some_parameters)
}


class Net(nn.Module):
    """Its last layer is left out now and then: without a gradient it must not move, momentum or not."""

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
    return [torch.randn(2 * world, 6, generator=generator, dtype=torch.float64) for _ in range(8)]


def share(batch: Tensor, rank: int) -> Tensor:
    return batch[2 * rank : 2 * rank + 2]


def drive(model: nn.Module, inner: torch.optim.Optimizer, optimizer: Any, data: list[Tensor], how: str) -> None:
    for index, batch in enumerate(data):
        CLEARS[how](model, inner, optimizer)
        model(batch, index % 3 != 2).backward()
        optimizer.step()


def cleared(how: str, persist: int) -> float:
    """Largest difference of a weight from plain torch."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain, sgd = model_and_sgd()
    drive(plain, sgd, sgd, batches(world), how)
    model, inner = model_and_sgd()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(persist=persist))
    drive(model, inner, optimizer, [share(batch, rank) for batch in batches(world)], how)
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.parametrize("persist", [0, 10_000])
@pytest.mark.parametrize("how", CLEARS)
def test_gradients_cleared(how: str, persist: int) -> None:
    assert max(run_ranks(2, cleared, how, persist)) < 1e-12


def looked_at(persist: int) -> float:
    """Between backward and step the model's own parameters are asked for their gradients, which they do not have."""
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


@pytest.mark.parametrize("persist", [0, 10_000])
def test_a_gradient_that_was_asked_for_is_not_lost(persist: int) -> None:
    assert max(run_ranks(2, looked_at, persist)) < 1e-12


def halve(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def replaced() -> float:
    """Each micro-batch's gradients are replaced before the next one adds to them."""
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
    """Between backward and step: one gradient taken away, one replaced, one changed in place; on every rank."""
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
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_edited_by_hand(world: int, clipping: float) -> None:
    run_ranks(world, edited_by_hand, clipping)


def looked_at_between_backwards(bound: float) -> None:
    """The norm is asked for, and gradients are clipped, before a second backward adds to them through other blocks."""
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
    """The norm is asked for, then gradients are edited, then the step clips; returns how many steps were skipped."""
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
        if step:  # of the first step the verdict stands
            # Edits through .data are noticed where the groups have been asked for since.
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
    """Tensors taken at the start are edited after a look at norms, perhaps before another one; (norm, its error)."""
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


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("edit", [scale_down, scale_down_unseen, make_nan])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_edited_between_looks_at_their_norms(again: bool, edit: Callable[[Tensor], None], stage: int) -> None:
    for norm, error in run_ranks(2, edited_between_looks, again, edit, stage):
        assert math.isnan(norm) == math.isnan(error) == (edit is make_nan)
        assert edit is make_nan or error < 1e-9 * norm


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("look", "edit"),
    # Not clip_grad_norm_ of a NaN, which makes every gradient NaN, as in torch.
    [("grad_norms", remove_nan), *product(LOOKS, [scale_down, scale_down_unseen, make_nan])],
)
def test_step_goes_by_gradients_as_they_are(look: str, edit: Callable[[Tensor], None], stage: int) -> None:
    skipped = {make_nan: 2, remove_nan: 1}.get(edit, 0)
    assert run_ranks(2, edited_after_a_look, look, edit, stage) == [skipped, skipped]


def asks_for_input_gradients(stage: int, how: str, always: bool) -> None:
    """Gradients of inputs are asked for before the backward, whose gradients are edited before the step."""
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
            if parameter.grad is not None:  # a stand-in has none
                parameter.grad.mul_(0.5)
        for parameter in pair.plain.parameters():
            parameter.grad.mul_(0.5)
        pair.step()
        assert pair.optimizer.step_was_taken
        pair.check()


@pytest.mark.parametrize("always", [True, False], ids=["always", "first step"])
@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs=...)"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_backwards_without_gradients_of_parameters(stage: int, how: str, always: bool) -> None:
    run_ranks(2, asks_for_input_gradients, stage, how, always)


def edited_after_a_backward_over_more(stage: int) -> list[bool]:
    """A backward comes to two forwards where one of its kind came to the second alone; then gradients are halved."""
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


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_edited_after_a_backward_over_more_forwards(stage: int) -> None:
    assert run_ranks(2, edited_after_a_backward_over_more, stage) == [[True] * 3] * 2


class Detour(nn.Module):
    """Two layers; some data goes through the second alone."""

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
    """Where gradients are edited, those that come behind all of their unit that came before are sent in time."""
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


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_edited_in_every_step(stage: int) -> None:
    assert run_ranks(2, edited_in_every_step, stage) == [[True] * 4] * 2


class Headed(nn.Module):
    """A model of which, as one unit, the second of two ranks has slices of the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 60)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x + torch.tanh(self.second(x)) if both else x)


def head_apart(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Headed)
    groups = [{"params": [*model.first.parameters(), *model.second.parameters()]}, {"params": model.head.parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05)


def rows_of_six(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(31 * step + rank), dtype=torch.float64)


def without_a_group(stage: int, group: int, to_none: bool) -> list[float]:
    """In some steps no gradients of a group, as for the last layer in DINO; then a step in which a layer is unused."""
    settings = make_config(stage=stage, unit_min_blocks=128)
    pair, off = Pair(Headed(), settings, optimizer=head_apart, batch=rows_of_six), []
    for step, ways in enumerate([(True, True), (False, True), (True, True), (False, False), (False, True)]):
        pair.backward(*ways)
        for optimizer in (pair.optimizer, pair.plain_optimizer) if step in (1, 2) else ():
            for parameter in optimizer.param_groups[group]["params"]:
                parameter.grad = None
        pair.step()
        off.append(pair.difference())
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=to_none)
    return off


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_a_group_taken_away(stage: int, group: int, to_none: bool) -> None:
    for off in run_ranks(2, without_a_group, stage, group, to_none):
        assert max(off) < 1e-12, off


def by_names(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.named_parameters()), lr=0.1, momentum=0.9, weight_decay=0.05)


def take_away(pair: Pair, chosen: Callable[[str], bool]) -> None:
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if chosen(name):
                    parameter.grad = None


# Backwards, by whether each of two ranks uses the second layer; and what is done in between.
TAKEN_AWAY = {
    "a backward without it follows": [(True, True), "take away", (False, False), "step"],
    "two steps": [(True, True), "take away", "step", (False, False), "step"],
    "others are set to zero": [(True, True), "take away", "step", "to zero", (False, False), "step"],
    "taken away after the step": [(True, True), "step", "take away", "to zero", (False, False), "step"],
    "one rank had used it": [(False, True), "take away", (False, False), "step"],
    "the other rank had used it": [(True, False), "take away", (False, False), "step"],
    "one rank uses it again": [(True, True), "take away", (False, True), "step"],
    "the other rank uses it again": [(True, True), "take away", (True, False), "step"],
    "taken away twice": [(True, True), "take away", (False, True), "take away", (False, False), "step"],
    "all but one": [(True, True), "take away all but a bias", (False, False), "step"],
    "all, then backwards of one rank": [(True, True), "take away all", (False, True), "step", "take away all"],
    "all, then held backwards": [(True, True), "step", "take away all", "held", "held", (True, False), "step"],
    "before held backwards": [(True, True), "take away", "held", (False, False), "step"],
    "by the model": [(True, True), "model to none", (False, False), "step"],
    "by the model, from zeros": [(True, True), "step", "to zero", "model to none", "step"],
    "by the model, made by hand": [(True, True), "make", "model to none", "step"],
    "others by the model": [(True, True), "take away", "model to zero", (False, False), "step"],
    "made, then set to zero by the model": [(False, False), "make", "model to zero", "step"],
    "a look between": [(True, True), "take away", "look", (False, True), "look", "step"],
}


def by_the_model(pair: Pair, act: str) -> None:
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        if act == "model to zero":
            model.zero_grad(set_to_none=False)
        elif act == "model to none":
            for parameter in model.second.parameters():
                parameter.grad = None
        else:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if name.startswith("second"):
                        parameter.grad = 0.3 * parameter.detach()


def taken_away(stage: int, how: str, blocks: int) -> list[float]:
    """Gradients of the second layer, or others, are set to None; every step is compared with plain torch."""
    settings = make_config(stage=stage, unit_min_blocks=blocks)
    pair, off = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six), []
    for act in ["step", *TAKEN_AWAY[how], "zero", *TAKEN_AWAY[how], "zero", (True, True), "step"]:
        if isinstance(act, tuple):
            pair.backward(*act)
        elif act == "step":
            pair.step()
            off.append(pair.difference())
        elif act == "look":
            pair.optimizer.grad_norms()
        elif act == "held":
            with pair.optimizer.no_sync():
                pair.backward(True, True)
        elif act in ("zero", "to zero"):
            for each in (pair.optimizer, pair.plain_optimizer):
                each.zero_grad(set_to_none=act == "zero")
        elif act.startswith("model") or act == "make":
            by_the_model(pair, act)
        else:
            kept = {"take away": ("first", "head"), "take away all": ()}.get(act, ("first.bias",))
            take_away(pair, lambda name, kept=kept: not name.startswith(kept))  # type: ignore[misc]
    return off


@pytest.mark.parametrize("blocks", [0, 128])
@pytest.mark.parametrize("how", TAKEN_AWAY)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_taken_away_stay_away_until_a_rank_uses_them(stage: int, how: str, blocks: int) -> None:
    for off in run_ranks(2, taken_away, stage, how, blocks):
        assert max(off) < 1e-12, off


def clipped_by_layer(stage: int) -> float:
    """A loop over names and tensors of the groups clips each gradient by its own norm."""
    pair = Pair(Headed(), make_config(stage=stage), optimizer=by_names, batch=rows_of_six)
    for _ in range(2):
        pair.backward(True, True)
        norms = pair.optimizer.grad_norms()
        for group in pair.optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.grad.mul_(min(1, 0.02 / norms[name]))
        for parameter in pair.plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1, 0.02 / float(parameter.grad.norm())))
        pair.step()
        pair.zero_grad()
    with pytest.raises(KeyError):
        norms["no such name"]
    return pair.difference()


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_clipped_by_layer(stage: int) -> None:
    assert max(run_ranks(2, clipped_by_layer, stage)) < 1e-12


def made_beside_carried_errors() -> tuple[bool, float]:
    """The gradient of a bias, which one rank has, is set by hand and stepped; others carry errors of quantized sums."""
    settings = make_config(stage=2, zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8, "reset_T": 4})
    pair = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six)
    pair.backward(True, True)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    before = zeropp.full_state(pair.model)
    for group in pair.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name == "first.bias":
                parameter.grad = torch.ones_like(parameter)
    pair.optimizer.step()
    after = zeropp.full_state(pair.model)
    moved = not torch.equal(after.pop("first.bias"), before.pop("first.bias"))
    return moved, worst(after, before)


def test_gradients_made_beside_carried_errors() -> None:
    assert run_ranks(2, made_beside_carried_errors) == [(True, 0.0)] * 2


def taken_away_in_a_window(stage: int) -> list[bool]:
    """All gradients but a bias's are set to None after the first of two micro-batches; ranks step at the same call."""
    settings = make_config(stage=stage, gradient_accumulation_steps=2)
    pair, taken = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six, micros=2), []
    for _ in range(3):
        for micro in range(2):
            pair.backward(True, True)
            if micro == 0:
                take_away(pair, lambda name: name != "first.bias")
            pair.optimizer.step()
            taken.append(pair.optimizer.step_was_taken)
            pair.optimizer.zero_grad()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        pair.advance()
    pair.check()
    return taken


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_taken_away_in_a_window(stage: int) -> None:
    assert run_ranks(2, taken_away_in_a_window, stage) == [[False, True] * 3] * 2


def edited_after_a_look_at_held(stage: int, look: str) -> float:
    """All backwards are held by no_sync(); a look sends them, and what it sent is shown."""
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


@pytest.mark.parametrize("look", ["norms", "clip"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_edited_after_a_look_at_what_was_held(stage: int, look: str) -> None:
    assert max(run_ranks(2, edited_after_a_look_at_held, stage, look)) < 1e-12


def clipped_beside_a_late_one(again: bool) -> tuple[float, bool, bool]:
    """A first edit misses a late gradient: the norm says so, and no step is taken, also after a second edit."""
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


@pytest.mark.parametrize("again", [False, True])
def test_clipping_tells_of_an_edit_that_missed_a_gradient(again: bool) -> None:
    for norm, same, taken in run_ranks(2, clipped_beside_a_late_one, again):
        assert math.isnan(norm) and same and taken


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def made_by_hand(stage: int, how: str) -> float:
    """Gradients that no backward has brought, of all parameters or of some, are stepped as in plain torch."""
    pair = Pair(Headed(), make_config(stage=stage, unit_min_blocks=0), optimizer=head_apart, batch=rows_of_six)
    both = (pair.optimizer, pair.plain_optimizer)
    kept = [parameters_of(optimizer) for optimizer in both]  # as helpers do that take them once
    for step in range(4):
        pair.backward(how != "merged" and step % 2 == 0)
        for optimizer, parameters in zip(both, kept, strict=True):
            gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
            if how != "a term":
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for group in optimizer.param_groups if how == "given again" else ():
                for parameter in group["params"]:
                    parameter.grad = None
            for parameter, gradient in zip(parameters, gradients, strict=True):
                term = 0.1 * parameter.detach()
                if how == "merged":
                    parameter.grad = term if gradient is None else 0.7 * gradient + term
                elif how == "a term":
                    parameter.grad = term if parameter.grad is None else parameter.grad + term
                else:
                    parameter.grad = term
        pair.step()
        pair.zero_grad()
    return pair.difference()


@pytest.mark.parametrize("how", ["merged", "a term", "alone", "given again"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_made_by_hand(stage: int, how: str) -> None:
    assert max(run_ranks(2, made_by_hand, stage, how)) < 1e-12


def clipped_by_hand(stage: int, without_backward: bool) -> float:
    """Gradients that were put in the place of ours are clipped by the whole model's norm."""
    pair = Pair(Headed(), make_config(stage=stage), optimizer=head_apart, batch=rows_of_six)
    for _ in range(3):
        if not without_backward:
            pair.backward(True)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            for parameter in parameters_of(optimizer):
                parameter.grad = parameter.detach().clone() if parameter.grad is None else parameter.grad * 2
        pair.optimizer.clip_grad_norm_(0.05)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        pair.step()
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad()
    return pair.difference()


@pytest.mark.parametrize("without_backward", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_put_in_place_are_clipped(stage: int, without_backward: bool) -> None:
    assert max(run_ranks(2, clipped_by_hand, stage, without_backward)) < 1e-7


def some_taken_away(stage: int, how: str) -> float:
    """All gradients but one parameter's, or those that are zero; a layer is frozen; all are set to zero."""
    settings = make_config(stage=stage, unit_min_blocks=128)
    pair = Pair(Headed(), settings, optimizer=named_apart, batch=rows_of_six)
    both = (pair.optimizer, pair.plain_optimizer)
    for _ in range(3):
        pair.backward(True)
        for optimizer in both:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    zero = parameter.grad is None or not (parameter.grad != 0).any()
                    unwanted = name != "head.bias" if how == "all but one" else zero
                    if how in ("all but one", "zeros") and unwanted:
                        parameter.grad = None
                    elif how == "frozen" and parameter.requires_grad and name.startswith("first"):
                        parameter.grad = parameter.detach().clone()
            if how == "set to zero":
                for parameter in parameters_of(optimizer):
                    parameter.grad = parameter.detach().clone()
                optimizer.zero_grad(set_to_none=False)
        pair.step()
        for optimizer in both:
            optimizer.zero_grad()
        for model in (pair.model, pair.plain) if how == "frozen" else ():
            model.get_submodule("first").requires_grad_(False)
    return pair.difference()


def named_apart(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.named_parameters()), lr=0.1, momentum=0.9, weight_decay=0.05)


@pytest.mark.parametrize("how", ["all but one", "zeros", "frozen", "set to zero"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_some_gradients_taken_away(stage: int, how: str) -> None:
    assert max(run_ranks(2, some_taken_away, stage, how)) < 1e-12


class Scaled(nn.Module):
    """Two blocks, a unit each, and a scale of which one rank has the only element."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        for block in self.blocks if whole else ():
            x = x + torch.tanh(block(x))
        return x * self.scale


def added_to_nothing(stage: int) -> float:
    """A term is added to all gradients where a backward brought no gradient of this rank's slices."""
    pair = Pair(Scaled(), make_config(stage=stage), batch=rows_of_six)
    for step in range(3):
        pair.backward(step == 1)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            for parameter in parameters_of(optimizer):
                term = 0.3 * parameter.detach()
                parameter.grad = term if parameter.grad is None else parameter.grad + term
        pair.step()
        pair.zero_grad()
    return pair.difference()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_term_where_no_gradient_has_come(stage: int) -> None:
    assert max(run_ranks(2, added_to_nothing, stage)) < 1e-12
