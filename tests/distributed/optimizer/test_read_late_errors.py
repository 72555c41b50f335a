"""Ranks that differ while no host waits for sums: all raise at the same later call; see [Note: sums read late]."""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.sums_read_late import ADAM, STATIC, Leaning, backward, numbers, wrapped
from zeropp import checkpoint
from zeropp.optimizer.step_sync import PendingSum


def left_over() -> tuple[str, bool]:
    """Let only rank 1 have an unsent gradient in the third step; return the error, and True if that step was taken."""
    optimizer = wrapped(True, **STATIC)
    gradient, before = optimizer.engine.gradients[0], list[Tensor]()
    for step in range(4):
        try:
            backward(optimizer, step)
            alone = step == 2 and dist.get_rank() == 1
            with mock.patch.object(gradient, "has_stray", lambda: True) if alone else contextlib.nullcontext():
                optimizer.step()
        except RuntimeError as raised:
            return f"step {step}: {raised}", not all(map(torch.equal, before, numbers(optimizer)))
        if step < 2:
            before = numbers(optimizer)
        optimizer.zero_grad()
    return "nothing", True


def test_a_gradient_that_one_rank_alone_has_left_is_a_broken_promise() -> None:
    """All ranks raise at their next step, also the rank that has waited for the sum, and no rank takes the bad step."""
    for told, stepped in run_ranks(2, left_over):
        assert told.startswith("step 3") and "static_graph rules out" in told and not stepped


def some_wait_apart() -> list[str]:
    """Return the error of each of four steps. Rank 1 waits for sums, and has another rate at the first step."""
    torch.manual_seed(3)
    model, found = Leaning(), []
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), **ADAM), model, make_config(**STATIC))
    optimizer.step_sync.defers_read = True
    for step in range(4):
        if step < 2 and dist.get_rank() == 1:
            optimizer.inner.param_groups[0]["lr"] = 0.05 if step else 0.01
        model(torch.ones(3, 8), dist.get_rank() != 1).square().mean().backward()
        try:
            optimizer.step()
            found.append("")
        except RuntimeError as raised:
            found.append(str(raised))
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    return found


def test_a_rank_that_waits_raises_where_the_others_do() -> None:
    """A rank that waits for sums raises at the same step as ranks that do not wait.

    Otherwise the rank that waits would be one step ahead, and no other rank would join its next sum.
    """
    for found in run_ranks(2, some_wait_apart, timeout=60):
        assert [bool(told) for told in found] == [False, True, False, False]
        assert "differed between ranks at the last step" in found[1]


def clips_twice(measures: str) -> list[str]:
    """Return the error of each of three measurements of gradients.

    At the first one the ranks have different learning rates, and no step follows it.

    Args:
        measures: method that measures, except for the first measurement, which is clip_grad_norm_.
    """
    torch.manual_seed(3)
    model, found = Leaning(), []
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), **ADAM), model, make_config(**STATIC))
    optimizer.step_sync.defers_read = True
    for step in range(3):
        if step < 2 and dist.get_rank() == 1:
            optimizer.inner.param_groups[0]["lr"] = 0.05 if step else 0.01
        model(torch.ones(3, 8), dist.get_rank() != 1).square().mean().backward()
        try:
            if step and measures == "grad_norms":
                optimizer.grad_norms()
            else:
                optimizer.clip_grad_norm_(1.0)
            found.append("")
        except RuntimeError as raised:
            found.append(str(raised))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("measures", ["clip_grad_norm_", "grad_norms"])
def test_a_sum_that_no_step_has_followed_is_read_on_every_rank(measures: str) -> None:
    for found in run_ranks(2, clips_twice, measures, timeout=60):
        assert [bool(told) for told in found] == [False, True, False]
        assert "differed between ranks at the last step" in found[1]


def out_of_step(disturb: Callable[[zeropp.ZeroOptimizer], None], asks: bool) -> tuple[str, bool]:
    """Disturb rank 1 before the third step; return the error, and True if weights are those of the second step.

    Args:
        disturb: function that makes rank 1 differ.
        asks: True to read ``skipped_steps`` right after the third step.
    """
    optimizer = wrapped(True, **STATIC)
    error = ""
    for step in range(4):
        backward(optimizer, step)
        if step == 2 and dist.get_rank() == 1:
            disturb(optimizer)
        if step == 2:
            before = copy.deepcopy(numbers(optimizer))
        try:
            optimizer.step()
            if step == 2 and asks:
                optimizer.skipped_steps  # noqa: B018
        except RuntimeError as raised:
            error = f"step {step}: {raised}"
            break
        optimizer.zero_grad()
    return error, all(map(torch.equal, before, numbers(optimizer)))


def _issue(optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.engine._issue_hash.add(0, 1, 2)


def _set_rate(optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.inner.param_groups[0]["lr"] = 0.01


@pytest.mark.every(2)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(
    ("disturb", "message"),
    [(_issue, "comparing what was gathered and reduced"), (_set_rate, "differed between ranks")],
)
def test_ranks_out_of_step_change_no_weight_and_raise_at_the_next_read(
    disturb: Callable[[zeropp.ZeroOptimizer], None], message: str, asks: bool
) -> None:
    for error, unchanged in run_ranks(2, out_of_step, disturb, asks):
        assert unchanged and message in error and error.startswith("step 2" if asks else "step 3")


def asks_alone() -> str:
    """Let only rank 0 read the result of a step for which the ranks had different settings.

    Returns:
        The error of the next step on this rank.
    """
    optimizer = wrapped(True, **STATIC)
    backward(optimizer, 0)
    if dist.get_rank() == 1:
        _set_rate(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"differed between ranks at the last step.* group 0 lr is 0.05"):
                optimizer.step_was_taken  # noqa: B018
        _set_rate(optimizer)
    # Rank 1 is in its next pass by now, and raises at its next step. Rank 0 raises there, too.
    backward(optimizer, 1)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    # The ranks are in step again, and have the same learning rate.
    for step in (2, 3):
        backward(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.step_was_taken and not optimizer.step_was_skipped
    return str(caught.value)


def test_one_rank_may_ask_alone() -> None:
    first, second = run_ranks(2, asks_alone)
    assert "group 0 lr is 0.05" in first and "group 0 lr is 0.01" in second


def loads_after(folder: Path, who: str) -> None:
    """Save and load states after a step at which the ranks had different rates, and train on.

    The states must be those before that step.

    Args:
        folder: directory of the checkpoint.
        who: ranks that read the error before they save: "all", "one" (rank 0), or "none".
    """
    optimizer: Any = wrapped(True, **STATIC)
    backward(optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        _set_rate(optimizer)
    backward(optimizer, 1)
    before = numbers(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if who == "all" or (who == "one" and dist.get_rank() == 0):
        with pytest.raises(RuntimeError, match="differed between ranks"):
            optimizer.step_was_taken  # noqa: B018
    saved = optimizer.state_dict()
    checkpoint.save(folder, optimizer.model, optimizer)
    for load in (lambda: optimizer.load_state_dict(saved), lambda: checkpoint.load(folder, optimizer.model, optimizer)):
        load()
        assert all(map(torch.equal, before, numbers(optimizer)))
        assert not optimizer.step_was_taken and optimizer.skipped_steps == 0
        # A checkpoint restores rank 0's learning rate on every rank, so set the same rate for both loads.
        optimizer.inner.param_groups[0]["lr"] = 0.05
        for step in (2, 3):
            backward(optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.step_was_taken


@pytest.mark.every(2)
@pytest.mark.parametrize("who", ["all", "one", "none"])
def test_an_error_of_a_step_stands_in_the_way_of_no_state(who: str, tmp_path: Path) -> None:
    """States can be saved while the error is pending, whichever ranks have read it. Loading clears it on every rank."""
    run_ranks(2, loads_after, tmp_path / "here", who)


def asks_often() -> tuple[int, bool]:
    """Raise one error three times; return the number of different traceback depths, and True if nothing is kept alive.

    The step's result must be freed without the garbage collector.
    """
    optimizer = wrapped(True, **STATIC)
    backward(optimizer, 0)
    if dist.get_rank() == 1:
        _set_rate(optimizer)
    optimizer.step()
    step_result, depths = optimizer.step_result, set[int]()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            try:
                step_result.wait_for_result()
            except RuntimeError as raised:
                depths.add(len(traceback.extract_tb(raised.__traceback__)))
        held = weakref.ref(step_result)
        del step_result, optimizer.step_result
        return len(depths), held() is None
    finally:
        gc.enable()


def test_an_error_that_is_kept_keeps_nothing_else() -> None:
    assert run_ranks(2, asks_often) == [(1, True)] * 2


def saves_after_a_loss(how: str) -> str:
    """Return the error of ``state_dict()`` when the sum of the step before does not arrive.

    Args:
        how: "lost" if the sum never arrives, "interrupted" if the user interrupts the wait.
    """
    optimizer = wrapped(True, **STATIC, hang_timeout=5.0)
    for step in range(3):
        backward(optimizer, step)
        optimizer.step()
    agreement, read = optimizer.engine.agreement, PendingSum.read_sum

    def in_vain(unread: PendingSum, _: object) -> list[float]:
        if how == "interrupted":
            raise KeyboardInterrupt
        agreement.hang_timeout = 2.0  # seconds; the sum never arrives, so a short wait is enough
        agreement.wait_for_event(lambda seconds: False, agreement.watching("waiting for the sum of norms and flags"))
        return []

    PendingSum.read_sum = in_vain  # type: ignore[method-assign]
    try:
        optimizer.state_dict()
    except (KeyboardInterrupt, RuntimeError) as error:
        told = str(error)
    finally:
        PendingSum.read_sum = read  # type: ignore[method-assign]
    if how == "interrupted":
        # The sum is still pending, so this rank can go on with the others.
        assert optimizer.step_sync._pending_sum is not None and optimizer.step_was_taken
    return told


def test_saving_after_ranks_have_lost_each_other() -> None:
    """Some ranks may have taken the step and others not, so the parts that they save would not fit together."""
    for told in run_ranks(2, saves_after_a_loss, "lost"):
        assert "waiting for the sum of norms and flags" in told and "stepped weights that others may not have" in told


def test_an_interrupt_does_not_take_a_sum() -> None:
    assert run_ranks(2, saves_after_a_loss, "interrupted") == ["", ""]
