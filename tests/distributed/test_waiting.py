"""Waiting: a word in time, errors that begin with the likely cause, and whose timeout counts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.shapes import Routed, logged, make_config

BATCH = torch.ones(2, 8)


def wrapped(**settings: object) -> tuple[Routed, zeropp.ZeroOptimizer]:
    model = Routed()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    for _ in range(2):
        train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    model(BATCH).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def late(seconds: float, warn_after: float | None) -> tuple[list[str], float]:
    """What a rank says of waiting for another that computes for long, twice; and how long its first wait took."""
    model, optimizer = wrapped(warn_after=warn_after)
    with logged() as messages:
        start = time.monotonic()
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(seconds)
            train(model, optimizer)
    return [message for message in messages if "waiting" in message], time.monotonic() - start


def test_a_rank_that_waits_says_so_once() -> None:
    (said, seconds), (silent, _) = run_ranks(2, late, 2.0, 0.4)
    assert len(said) == 2 and silent == [] and seconds < 10, said  # once for each of two waits
    for message in said:
        assert message.startswith("rank 0 has been waiting for 0.4 s, ")
        assert "in a forward with gradients; rank 1 waits for nobody. Perhaps rank 1 does not wait" in message


def test_a_wait_that_is_short_or_unwatched_is_not_told() -> None:
    assert [said for said, _ in run_ranks(2, late, 0.3, 30)] == [[], []]
    assert [said for said, _ in run_ranks(2, late, 1.0, None)] == [[], []]


def wraps_late(seconds: float) -> list[str]:
    """What a rank says of waiting for another that wraps the model later."""
    with logged() as messages, mock.patch("zeropp.comm.collective._SILENCE", 0.4):
        if dist.get_rank() == 1:
            time.sleep(seconds)
        wrapped()
    return [message for message in messages if "waiting" in message]


def test_a_rank_that_waits_to_wrap_says_so() -> None:
    said, silent = run_ranks(2, wraps_late, 1.0)
    assert silent == [] and len(said) == 1
    assert said[0].startswith("rank 0 has been waiting at preparing ZeroOptimizer for 0.4 s; some rank has not come")
    assert run_ranks(2, wraps_late, 0.0) == [[], []]


def both() -> tuple[list[str], str]:
    """Rank 0 saves alone while rank 1 trains on: what each says in time, and in the end."""
    model, optimizer = wrapped(warn_after=0.5, hang_timeout=4)
    with logged() as messages, pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 0:
            model.state_dict()
        train(model, optimizer)
    return messages, str(caught.value)


def test_ranks_that_wait_for_each_other_name_each_other_in_time() -> None:
    for rank, (messages, error) in enumerate(run_ranks(2, both, timeout=40)):
        said = [message for message in messages if "has been waiting" in message]
        assert len(said) == 1 and said[0].startswith(f"rank {rank} has been waiting for 0.5 s, "), messages
        cause = "rank 0 called state_dict() of a Routed alone; it is collective: every rank calls it"
        assert f"Perhaps {cause}" in said[0]
        accounts = "The ranks are no longer in step: rank 0 was at state_dict() of a Routed; rank 1 "
        assert error.startswith(f"{cause}. {accounts}")
        assert "hang_timeout, 4 s, was reached" in error


def alone_full_state(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    zeropp.full_state(model)


def alone_gathered(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    with zeropp.zero.GatheredParameters(model):
        pass


def alone_evaluation(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    model.eval()
    with torch.no_grad():
        model(BATCH)


def alone_step(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.step()


def nothing(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    time.sleep(6)


ALONE: dict[str, tuple[Callable[[nn.Module, zeropp.ZeroOptimizer], None], str]] = {
    "full_state": (alone_full_state, r"rank 0 called full_state\(\) alone; it is collective"),
    "GatheredParameters": (alone_gathered, "rank 0 called GatheredParameters of .* alone; it is collective"),
    "evaluation": (alone_evaluation, "different numbers of forwards.*: rank 0 in a forward without gradients, in eval"),
    "step": (alone_step, r"different numbers of forwards.*: rank 0 in step\(\), rank 1 in a forward with gradients"),
    "nothing": (nothing, "rank 0 does not wait for others: failed or ended"),
}


def alone(name: str) -> str:
    """The error of rank 1 when rank 0 does something else before it trains on."""
    model, optimizer = wrapped(hang_timeout=2, warn_after=None)
    if dist.get_rank() == 0:
        try:
            ALONE[name][0](model, optimizer)
        except RuntimeError as error:
            return str(error)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            train(model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("name", ALONE)
def test_the_error_begins_with_the_likely_cause(name: str) -> None:
    _, message = run_ranks(2, alone, name, timeout=40)
    assert re.match(f".*?{ALONE[name][1]}", message.split(". The ranks")[0]), message
    for noise in ("gloo", "transport", "('forward'", "Timed out", "0x"):
        assert noise not in message, message


def ended() -> str:
    """The error of a rank whose company has raised an error of its own."""
    model, optimizer = wrapped(hang_timeout=30, warn_after=None)
    if dist.get_rank() == 1:
        raise ValueError("of its own")
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            train(model, optimizer)
    return str(caught.value)


def test_hang_timeout_is_named_only_where_it_was_reached() -> None:
    message, failure = run_ranks(2, ended, catch=True, timeout=60)
    assert isinstance(failure, RankFailure) and isinstance(message, str)
    assert message.startswith("rank 1 does not wait for others: failed or ended") and "hang_timeout" not in message


def hasty(group_timeout: float | None, hang_timeout: float) -> tuple[str, float]:
    """The error of a wait, and how long it took, with a timeout of the user's own group."""
    given = {} if group_timeout is None else {"timeout": timedelta(seconds=group_timeout)}
    dist.init_process_group("gloo", **given)
    model, optimizer = wrapped(hang_timeout=hang_timeout, warn_after=None)
    if dist.get_rank() == 0:
        time.sleep(5)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(model, optimizer)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(("group", "own"), [(1.5, 60), (None, 1.5), (60, 1.5)])
def test_the_shorter_timeout_counts(group: float | None, own: float) -> None:
    _, (message, seconds) = run_ranks(2, hasty, group, own, init=False, timeout=40)
    assert "hang_timeout, 1.5 s, was reached" in message and seconds < 5, (message, seconds)
