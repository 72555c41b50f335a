"""Loops over windows of micro-batches, each compared with the plain torch loop that has the same windows."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.parity import assert_close
from tests.support.rank_pool import RankFailure, run_ranks
from zeropp import ZeroOptimizer

STEPS = 4  # micro-batches in a window
EPOCHS = ((0, 10), (10, 16))  # (first, end) micro-batch of each epoch


class Net(nn.Module):
    """Model that returns two losses of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.body(x))
        return self.head(y).square().mean(), y.sin().mean()


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, 16, dtype=torch.float64, generator=generator)


class Loop:
    """A model with its optimizer, for the loops below.

    Attributes:
        taken: for each call of ``step()``, True if a step was taken.
    """

    def __init__(self, settings: dict[str, object]) -> None:
        torch.manual_seed(5)
        self.rank = dist.get_rank()
        self.model = Net().double()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        config = make_config(gradient_accumulation_steps=STEPS, **settings)
        self.optimizer = ZeroOptimizer(self.inner, self.model, config)
        self.taken: list[bool] = []

    def backward(self, number: int) -> Tensor:
        one, two = self.model(batch(number, self.rank))
        loss: Tensor = one + two
        self.optimizer.backward(loss)
        return loss

    def step(self, **given: Any) -> None:
        self.optimizer.step(**given)
        self.taken.append(self.optimizer.step_was_taken)


def every_time(loop: Loop) -> None:
    """Call backward, step and zero_grad for each micro-batch, as README's loop does."""
    for first, end in EPOCHS:
        for number in range(first, end):
            loop.backward(number)
            loop.step()
            loop.optimizer.zero_grad()


def cleared_before(loop: Loop) -> None:
    for first, end in EPOCHS:
        for number in range(first, end):
            loop.optimizer.zero_grad()
            loop.backward(number)
            loop.step()


def cleared_on_the_model(loop: Loop) -> None:
    for number in range(16):
        loop.backward(number)
        loop.step()
        loop.model.zero_grad()


def cleared_inside(loop: Loop) -> None:
    for number in range(16):
        loop.backward(number)
        loop.step()
        loop.inner.zero_grad()


def by_closure(loop: Loop) -> None:
    for number in range(16):
        given = []

        def closure(number: int = number, given: list[Tensor] = given) -> Tensor:
            loop.optimizer.zero_grad()
            given.append(loop.backward(number))
            return given[-1]

        assert loop.optimizer.step(closure) is given[0] and len(given) == 1
        loop.taken.append(loop.optimizer.step_was_taken)


def two_losses(loop: Loop) -> None:
    for number in range(16):
        one, two = loop.model(batch(number, loop.rank))
        loop.optimizer.backward(one, retain_graph=True)
        loop.optimizer.backward(two)
        loop.step()
        loop.optimizer.zero_grad()


def evaluated_between(loop: Loop) -> None:
    for number in range(16):
        one, two = loop.model(batch(number, loop.rank))
        with torch.no_grad():
            loop.model(batch(99, loop.rank))
        loop.optimizer.backward(one, retain_graph=True)
        with torch.no_grad():
            loop.model(batch(98, loop.rank))
        loop.optimizer.backward(two)
        loop.step()
        loop.optimizer.zero_grad()


def without_sync(loop: Loop) -> None:
    for number in range(16):
        with loop.optimizer.no_sync() if number % STEPS < STEPS - 1 else contextlib.nullcontext():
            loop.backward(number)
        loop.step()
        loop.optimizer.zero_grad()


def by_hand(loop: Loop) -> None:
    """Call ``step()`` at the end of each window, and ``step(now=True)`` at the end of an epoch, in a short window."""
    for first, end in EPOCHS:
        for number in range(first, end):
            loop.backward(number)
            if (number + 1 - first) % STEPS == 0 or number + 1 == end:
                loop.step(now=number + 1 == end)
                loop.optimizer.zero_grad()


def by_hand_told(loop: Loop) -> None:
    """Call ``step()`` without ``now`` at the end of each window and epoch.

    In a short window ``step()`` does nothing and warns, and the window's gradients are part of the next window.
    """
    for first, end in EPOCHS:
        for number in range(first, end):
            loop.backward(number)
            if (number + 1 - first) % STEPS == 0 or number + 1 == end:
                loop.step()
                loop.optimizer.zero_grad()


def by_hand_one_left(loop: Loop) -> None:
    for end in (4, 9, 14, 15, 16):
        for number in range({4: 0, 9: 4, 14: 9, 15: 14, 16: 15}[end], end):
            loop.backward(number)
        loop.step()
        loop.optimizer.zero_grad()


def step_now_last(loop: Loop) -> None:
    for first, end in EPOCHS:
        for number in range(first, end):
            loop.backward(number)
            loop.step()
            loop.optimizer.zero_grad()
        loop.step(now=True)
        loop.optimizer.zero_grad()


def nothing_left(loop: Loop) -> None:
    """Call ``step(now=True)`` after whole windows, where no gradients are left, so that no step is taken."""
    for first in (0, 8):
        for number in range(first, first + 8):
            loop.optimizer.zero_grad()
            loop.backward(number)
            loop.step()
        loop.step(now=True)


def resumed(loop: Loop) -> None:
    """Load a state inside an unfinished window, whose gradients are then discarded."""
    saved = copy.deepcopy(loop.optimizer.state_dict())
    for number in (20, 21):
        loop.backward(number)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.optimizer.load_state_dict(saved)
    every_time(loop)


def discarded(loop: Loop) -> None:
    for first, end in EPOCHS:
        for number in range(first, end):
            loop.backward(number)
            loop.step()
            loop.optimizer.zero_grad()
        loop.optimizer.zero_grad(now=True)


def left_out_once(loop: Loop) -> None:
    for number in range(8):
        loop.backward(number)
        if number != 1:
            loop.step()
            loop.optimizer.zero_grad()


def windows(*ends: int) -> list[range]:
    """Return the ranges of micro-batches up to the first end, from there to the second end, and so on."""
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


ODD = [False, False, False, True]
LOOPS: dict[str, tuple[Callable[[Loop], None], dict[str, object], list[range], list[bool]]] = {
    "every time": (every_time, {}, windows(4, 8, 12, 16), ODD * 4),
    "cleared before": (cleared_before, {}, windows(4, 8, 12, 16), ODD * 4),
    "cleared on the model": (cleared_on_the_model, {}, windows(4, 8, 12, 16), ODD * 4),
    "cleared inside": (cleared_inside, {}, windows(4, 8, 12, 16), ODD * 4),
    "closure": (by_closure, {}, windows(4, 8, 12, 16), ODD * 4),
    "two losses": (two_losses, {}, windows(4, 8, 12, 16), ODD * 4),
    "evaluated between": (evaluated_between, {}, windows(4, 8, 12, 16), ODD * 4),
    "no_sync": (without_sync, {}, windows(4, 8, 12, 16), ODD * 4),
    "by hand": (by_hand, {}, windows(4, 8, 10, 14, 16), [True] * 5),
    "by hand, told": (by_hand_told, {}, windows(4, 8, 14), [True, True, False, True, False]),
    "by hand, unmanaged": (
        by_hand_told, {"managed_gradient_accumulation": False}, windows(4, 8, 10, 14, 16), [True] * 5,
    ),
    "by hand, one more": (by_hand_one_left, {}, windows(4, 9, 14), [True, True, True, False, False]),
    "unmanaged": (every_time, {"managed_gradient_accumulation": False}, windows(*range(1, 17)), [True] * 16),
    "now": (step_now_last, {}, windows(4, 8, 10, 14, 16), [*ODD * 2, False, False, True, *ODD, False, False, True]),
    "nothing left": (nothing_left, {}, windows(4, 8, 12, 16), [*ODD * 2, False, *ODD * 2, False]),
    "resumed": (resumed, {}, windows(4, 8, 12, 16), ODD * 4),
    "discarded": (discarded, {}, [*windows(4, 8), range(10, 14)], [*ODD * 2, False, False, *ODD, False, False]),
    "left out once": (left_out_once, {}, windows(4, 8), [False, False, True, *ODD]),
}  # fmt: skip


def looped(name: str, settings: dict[str, object]) -> tuple[dict[str, Tensor], list[bool], list[str]]:
    """Return the weights after the loop, True for each ``step()`` that took a step, and the texts of warnings."""
    run, own, _, _ = LOOPS[name]
    loop = Loop({**settings, **own})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(loop)
    return zeropp.full_state(loop.model), loop.taken, [str(each.message) for each in caught]


def plain(expected: list[range], world: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for numbers in expected:
        for number in numbers:
            for rank in range(world):
                (sum(model(batch(number, rank))) / (STEPS * world)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def check(name: str, settings: dict[str, object], world: int = 2, local: int | None = None) -> None:
    _, _, expected, steps = LOOPS[name]
    reference = plain(expected, world)
    for rank, (state, taken, said) in enumerate(run_ranks(world, looped, name, settings, local_world_size=local)):
        assert taken == steps, f"rank {rank}"
        for key, value in reference.items():
            assert_close(state[key], value, 1e-9, f"rank {rank}: {key}")
        # The warning comes once, and on rank 0 only.
        warned = [text for text in said if "step() did nothing" in text]
        assert len(warned) == (rank == 0 and not all(steps)), said
        remedies = ("step(now=True)", '{"managed_gradient_accumulation": false}')
        assert all(remedy in text for text in warned for remedy in remedies), said


@pytest.mark.every(4)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_equals_plain_torch(name: str) -> None:
    check(name, {})


PLACED: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "mics": {"mics_shard_size": 2},
    "deferred": {"defer_cross_reduction": True},
}  # fmt: skip


@pytest.mark.every(16)
@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("name", ["every time", "two losses", "by hand", "now", "discarded"])
def test_a_loop_equals_plain_torch_in_every_placement(name: str, placement: str) -> None:
    """The placements differ in the level at which gradients are held until the last micro-batch."""
    check(name, PLACED[placement], world=4, local=2)


def observed() -> list[str]:
    """Return texts on wrong norms, hook calls, steps and learning rates, inside windows and at their ends."""
    loop, wrong, hooks = Loop({}), [], []
    optimizer = loop.optimizer
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    last = 0.0
    for number in range(12):
        loop.backward(number)
        norm = float(optimizer.clip_grad_norm_(1e-3))
        whole = number % STEPS == STEPS - 1
        if not whole and norm != last:
            wrong.append(f"{number}: clipping inside a window returns {norm}, the last norm was {last}")
        if whole and not 0 < float(optimizer.clip_grad_norm_(1e9)) <= 1e-3 * (1 + 1e-6) < norm:
            wrong.append(f"{number}: norm {norm} was not clipped")
        before = list(hooks)
        optimizer.step_result.step_was_taken = True  # as if left by an earlier step: step() must reset it
        loop.step()
        if hooks[len(before) :] != (["before", "after"] if whole else []):
            wrong.append(f"{number}: hooks {hooks[len(before) :]}")
        if whole:
            last = optimizer.grad_norm or 0.0
        if optimizer.step_was_taken:
            scheduler.step()
        optimizer.zero_grad()
    if scheduler.get_last_lr() != [0.05 / 8]:
        wrong.append(f"learning rate {scheduler.get_last_lr()}")
    loop.backward(12)
    norms = [float(optimizer.clip_grad_norm_(bound, now=True)) for bound in (1e-3, 1e9)]
    if not 0 < norms[1] <= 1e-3 * (1 + 1e-6) < norms[0]:
        wrong.append(f"clip_grad_norm_(now=True) is to clip what is there: {norms}")
    optimizer.step(now=True)
    if not optimizer.step_was_taken:
        wrong.append("step(now=True) was not taken")
    return wrong


def test_hooks_norms_and_schedulers_follow_the_steps() -> None:
    assert run_ranks(2, observed) == [[], []]


def scaled(managed: bool, how: str) -> tuple[str, bool, list[float]]:
    """Call torch's GradScaler after the first of four micro-batches, and step at the end of the window.

    Args:
        managed: ``managed_gradient_accumulation`` of the configuration.
        how: call after the first micro-batch: "step" or "unscale_".

    Returns:
        The error of the refused call, True if the last step was taken, and the scale after it.
    """
    loop = Loop({"managed_gradient_accumulation": managed})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    refused = ""
    for number in range(STEPS):
        one, two = loop.model(batch(number, loop.rank))
        scaler.scale((one + two) / STEPS).backward()
        try:
            if number == 0 and how == "unscale_":
                scaler.unscale_(loop.optimizer)
            if (number == 0 and how == "step") or number == STEPS - 1:
                scaler.step(loop.optimizer)
        except RuntimeError as error:
            refused = str(error)
            # GradScaler's attributes must be removed, or a later step() of the user would count as GradScaler's.
            assert not {"found_inf", "grad_scale"} & loop.optimizer.__dict__.keys()
    if how == "unscale_":
        return refused, False, []
    scaler.update()
    return refused, loop.optimizer.step_was_taken, [scaler.get_scale()]


def test_grad_scaler_steps_where_a_window_ends() -> None:
    """zeropp recognizes GradScaler by torch's protocol: GradScaler sets ``grad_scale`` and ``found_inf`` for a step."""
    for refused, taken, scales in run_ranks(2, scaled, True, "step"):
        assert re.search(r"step\(\) was called after 1 of gradient_accumulation_steps 4 micro-batches", refused), (
            refused
        )
        assert taken and scales == [8.0]


@pytest.mark.parametrize("managed", [True, False])
def test_gradients_that_were_unscaled_in_part_are_refused(managed: bool) -> None:
    for refused, *_ in run_ranks(2, scaled, managed, "unscale_"):
        assert "optimizer.param_groups was read before the last backward" in refused


def unscaled_with_a_scheduler() -> float:
    """Return the scale after steps whose gradients are set to None by hand, while a scheduler reads the groups."""
    loop = Loop({"managed_gradient_accumulation": False})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1)
    for number in range(3):
        scaler.scale(sum(loop.model(batch(number, loop.rank)))).backward()
        scaler.unscale_(loop.optimizer)
        scaler.step(loop.optimizer)
        scaler.update()
        scheduler.step()
        for parameter in loop.model.parameters():
            parameter.grad = None
    return float(scaler.get_scale())


def test_groups_that_are_read_between_steps_are_not_taken_for_an_early_unscale() -> None:
    assert run_ranks(2, unscaled_with_a_scheduler) == [32.0, 32.0]


def scaled_where_gradients_wait(settings: dict[str, Any], how: str) -> tuple[str, bool, float]:
    """Call GradScaler's ``step`` while gradients wait in a short window or in ``no_sync()``.

    In the short window, only rank 1 has a non-finite gradient.

    Args:
        settings: settings of the configuration.
        how: "no_sync"; "short" for a short window with ``now=True``; "unmanaged" for a short window without ``now``.

    Returns:
        The error ("stepped" for none), True if weights are unchanged, and the scale after a whole window afterwards.
    """
    loop = Loop(settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    before = zeropp.full_state(loop.model)
    for number in range(STEPS if how == "no_sync" else 1):
        factor = float("inf") if how == "short" and loop.rank == 1 else 1.0
        with loop.optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext():
            scaler.scale(sum(loop.model(batch(number, loop.rank))) * factor).backward()
    try:
        scaler.step(loop.optimizer, **({"now": True} if how == "short" else {}))
    except RuntimeError as error:
        refused = str(error)
    else:
        refused = "stepped"
    same = all(torch.equal(value, before[name]) for name, value in zeropp.full_state(loop.model).items())
    loop.optimizer.zero_grad(now=True)
    for number in range(STEPS):
        scaler.scale(sum(loop.model(batch(number, loop.rank)))).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    return refused, same, scaler.get_scale()


WAITING: dict[str, tuple[dict[str, Any], str]] = {
    "stage 3, short": ({}, "short"),
    "stage 1, short, unmanaged": ({"stage": 1, "managed_gradient_accumulation": False}, "unmanaged"),
    "no_sync": ({}, "no_sync"),
}


@pytest.mark.parametrize("name", WAITING)
def test_grad_scaler_is_refused_where_gradients_wait(name: str) -> None:
    """GradScaler cannot check gradients that wait, or not on every rank.

    Without the error, a step would use gradients times the scale, or ranks would decide differently.
    """
    for refused, same, scale in run_ranks(2, scaled_where_gradients_wait, *WAITING[name], timeout=60):
        assert "some gradients wait for further ones" in refused and same and scale == 8.0


def skipped_by_scaler() -> list[bool]:
    """Return ``step_was_taken`` after each of three steps with GradScaler, the second of which overflows."""
    model = nn.Linear(4, 4)
    optimizer = ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    scaler, told = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 4), float("inf") if step == 1 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        told.append(optimizer.step_was_taken)
    return told


def test_a_step_that_the_scaler_skips_was_not_taken() -> None:
    assert run_ranks(2, skipped_by_scaler) == [[True, False, True]] * 2


def uneven() -> None:
    """Train with one micro-batch less on rank 1, which ends first."""
    loop = Loop({"hang_timeout": 3})
    for number in range(STEPS - loop.rank):
        loop.backward(number)
        loop.step()


def test_a_rank_with_less_data_is_named() -> None:
    first, second = run_ranks(2, uneven, catch=True, timeout=40)
    assert isinstance(first, RankFailure) and second is None
    assert "no longer in step" in first.message
