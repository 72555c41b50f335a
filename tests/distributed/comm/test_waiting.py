"""Waits for other ranks: early warnings, errors that begin with the likely cause, and the smaller of two timeouts."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.branching_models import Routed, logged, make_config
from tests.support.rank_pool import RankFailure, run_ranks, some
from zeropp.comm.hops import Comm, Hop

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
    """Train two steps in which rank 1 computes for ``seconds`` before its forward.

    Args:
        seconds: seconds for which rank 1 sleeps.
        warn_after: seconds of waiting after which a warning is logged; None for no warning.

    Returns:
        Warnings of this rank about waiting, and seconds for both steps.
    """
    model, optimizer = wrapped(warn_after=warn_after)
    with logged() as messages:
        start = time.monotonic()
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(seconds)
            train(model, optimizer)
    return [message for message in messages if "waiting" in message], time.monotonic() - start


def test_a_rank_that_waits_says_so_once() -> None:
    (said, seconds), (silent, _) = run_ranks(2, late, 1.2, 0.4)
    assert len(said) == 2 and silent == [] and seconds < 10, said  # one warning for each of the two waits
    for message in said:
        assert message.startswith("rank 0 has been waiting for 0.4 s, ")
        assert (
            "in a forward with gradients; rank 1 is not waiting for other ranks. Perhaps rank 1 does not wait"
            in message
        )


def test_a_wait_that_is_short_or_unwatched_is_not_told() -> None:
    assert [said for said, _ in run_ranks(2, late, 0.3, 30)] == [[], []]
    assert [said for said, _ in run_ranks(2, late, 0.6, None)] == [[], []]


def wraps_late(seconds: float) -> list[str]:
    """Wrap a model later on rank 1 than on rank 0, and return this rank's warnings about waiting."""
    with logged() as messages, mock.patch("zeropp.comm.collective._SILENCE", 0.4):
        if dist.get_rank() == 1:
            time.sleep(seconds)
        wrapped()
    return [message for message in messages if "waiting" in message]


def test_a_rank_that_waits_to_wrap_says_so() -> None:
    said, silent = run_ranks(2, wraps_late, 0.8)
    assert silent == [] and len(said) == 1
    assert said[0].startswith("rank 0 has been waiting at preparing ZeroOptimizer for 0.4 s; some rank has not come")
    assert run_ranks(2, wraps_late, 0.0) == [[], []]


def both() -> tuple[list[str], str]:
    """Call state_dict() on rank 0 only, while rank 1 trains on.

    Returns:
        Messages that this rank logged, and this rank's error at the end.
    """
    model, optimizer = wrapped(warn_after=0.5, hang_timeout=2)
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
        assert "hang_timeout, 2 s, was reached" in error


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
    "evaluation": (
        alone_evaluation,
        "different forwards, backwards or steps.*: rank 0 in a forward without gradients, in eval",
    ),
    "step": (
        alone_step,
        r"different forwards, backwards or steps.*: rank 0 in step\(\), rank 1 in a forward with gradients",
    ),
    "nothing": (nothing, "rank 0 does not wait for others: failed or ended"),
}


def alone(name: str) -> str:
    """Return the error of this rank after rank 0 makes a call that rank 1 does not make.

    Args:
        name: key of ALONE, which names rank 0's call.
    """
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


@pytest.mark.campaign
@pytest.mark.parametrize("name", ALONE)
def test_the_error_begins_with_the_likely_cause(name: str) -> None:
    _, message = run_ranks(2, alone, name, timeout=40)
    assert re.match(f".*?{ALONE[name][1]}", message.split(". The ranks")[0]), message
    for noise in ("gloo", "transport", "('forward'", "Timed out", "0x"):
        assert noise not in message, message


def ended() -> str:
    """Return the error of rank 0, which waits for rank 1 after rank 1 has raised an error of its own."""
    model, optimizer = wrapped(hang_timeout=30, warn_after=None)
    if dist.get_rank() == 1:
        raise ValueError("of its own")
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            train(model, optimizer)
    return str(caught.value)


@pytest.mark.campaign
def test_hang_timeout_is_named_only_where_it_was_reached() -> None:
    message, failure = run_ranks(2, ended, catch=True, timeout=60)
    assert isinstance(failure, RankFailure) and isinstance(message, str)
    assert message.startswith("rank 1 does not wait for others: failed or ended") and "hang_timeout" not in message


def hasty(group_timeout: float | None, hang_timeout: float) -> tuple[str, float]:
    """Wait for rank 0 with a given timeout of the user's process group.

    Args:
        group_timeout: timeout of the process group in seconds; None for torch's default.
        hang_timeout: timeout of the configuration in seconds.

    Returns:
        The error of rank 1, and seconds until it; ("", 0) on rank 0.
    """
    given = {} if group_timeout is None else {"timeout": timedelta(seconds=group_timeout)}
    dist.init_process_group("gloo", **given)
    model, optimizer = wrapped(hang_timeout=hang_timeout, warn_after=None)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        # The explicit limit replaces the store's own timeout, which is the group's.
        store.wait(["told"], timedelta(seconds=30))
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(model, optimizer)
    seconds = time.monotonic() - start
    store.set("told", "")
    return str(caught.value), seconds


@pytest.mark.every(8)
@pytest.mark.parametrize(("group", "own"), [(1.0, 60), (None, 1.0), (60, 1.0)])
def test_the_shorter_timeout_counts(group: float | None, own: float) -> None:
    _, (message, seconds) = run_ranks(2, hasty, group, own, init=False, timeout=40)
    assert "hang_timeout, 1 s, was reached" in message and seconds < 5, (message, seconds)


# Errors of collectives: they name the activity of the ranks at the time of the failure.


def uses_gradients(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    model(BATCH).square().mean().backward()
    optimizer.grad_norms()


def clips_by_hand(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    model(BATCH).square().mean().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def edits(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    with zeropp.zero.GatheredParameters(model, modifier_rank=0):
        pass


def resumes(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def loads(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    model.load_state_dict(Routed().state_dict())


def adds(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.add_param_group({"params": []})


def saves(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    model.state_dict()


def averages(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    train(model, optimizer)
    with zeropp.ema(model).applied():
        pass


def twice(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    train(model, optimizer)
    train(model, optimizer)


SHOWN: dict[str, object] = {"stage": 1, "overlap_comm": True}
STOPPED: dict[str, object] = {"overlap_comm": False}
LOSSLESS: dict[str, object] = {"stage": 1, "weight_codec": "lossless", "bf16": {"enabled": True}, **STOPPED}
GATHER, EXCHANGE, SUM = (Hop, "all_gather"), (Hop, "all_to_all"), (Comm, "sum")
INTS, OBJECTS = (Comm, "all_gather_ints"), (Comm, "all_gather_sized")
FORWARD = "in a forward with gradients"
EVALUATION = "a forward without gradients, in eval mode"
Use = Callable[[nn.Module, zeropp.ZeroOptimizer], None]
# By name: the calls, their settings, the collective that fails, how many such collectives succeed before, and the
# activity that the error must name.
STRUCK: dict[str, tuple[Use, dict[str, object], tuple[type, str], int, str]] = {
    "gather": (train, {}, GATHER, 0, f"waiting for the gather of unit 'blocks.0' {FORWARD}"),
    "gather at once": (train, STOPPED, GATHER, 0, f"gathering blocks.0 {FORWARD}"),
    "reduction": (train, {}, EXCHANGE, 0, "waiting for a gradient to be reduced in a backward"),
    "reduction at once": (train, STOPPED, EXCHANGE, 0, "reducing blocks.3 in a backward"),
    "refresh": (averages, SHOWN, GATHER, 0, "waiting for the refresh of unit 'blocks.0'"),
    "refresh at a use": (twice, SHOWN, GATHER, 0, f"waiting for the refresh of unit 'blocks.0' {FORWARD}"),
    "refresh at once": (train, {"stage": 1, **STOPPED}, GATHER, 0, "refreshing blocks.0"),
    "sizes": (train, LOSSLESS, (Comm, "largest"), 0, "agreeing on the sizes of refreshes"),
    "overflow": (train, {}, SUM, 0, "sharing whether gradients are finite in a backward"),
    "flags": (train, {}, SUM, 1, "adding up norms and flags in step()"),
    "norms": (uses_gradients, {}, SUM, 2, "adding up norms of parameters"),
    "settings": (clips_by_hand, {}, INTS, 0, "comparing the settings of parameter groups"),
    "edits": (edits, {}, (Comm, "broadcast"), 0, "sharing edits made inside GatheredParameters"),
    "state": (alone_full_state, {}, GATHER, 0, "gathering unit 'blocks.0' for a state dict"),
    "call": (alone_full_state, {}, INTS, 0, "at full_state()"),
    "saving": (saves, {}, INTS, 0, "at state_dict() of a Routed"),
    "loading": (loads, {}, INTS, 0, "at load_state_dict() of a Routed"),
    "resuming": (resumes, {}, INTS, 0, "at load_state_dict() of the ZeroOptimizer"),
    "states": (resumes, {}, INTS, 1, "checking saved states"),
    "groups of states": (resumes, {}, INTS, 3, "checking saved states"),
    "carried errors": (resumes, {}, INTS, 4, "checking carried errors"),
    "a group": (adds, {}, INTS, 0, "at add_param_group()"),
    "leaving": (edits, {}, INTS, 1, "leaving GatheredParameters"),
    "an average": (averages, {}, INTS, 0, "at applied() of an average"),
    "a new pass": (alone_evaluation, {}, INTS, 0, f"starting {EVALUATION}"),
    "a round": (alone_evaluation, {}, INTS, 1, f"asking for unit 'blocks.0' in {EVALUATION}"),
    "the last round": (alone_evaluation, {}, INTS, 5, f"at the end of {EVALUATION}"),
    "what was learned": (alone_evaluation, {}, OBJECTS, 0, f"at the end of {EVALUATION}"),
    "state at once": (alone_full_state, STOPPED, GATHER, 0, "gathering blocks.0"),
}


def struck(names: list[str]) -> dict[str, str]:
    """Let one collective fail in each case.

    Args:
        names: keys of STRUCK.

    Returns:
        The error message of each case.
    """
    found = {}
    for name in names:
        use, settings, (cls, method), passing, _ = STRUCK[name]
        model, optimizer = wrapped(warn_after=None, **settings)
        # A refresh may still run on a comm stream, and must not be counted as a collective of the case.
        optimizer.engine.wait_for_refresh()
        working, calls = getattr(cls, method), itertools.count()

        def fail(*args: Any, working: Any = working, calls: Any = calls, passing: int = passing, **kwargs: Any) -> Any:
            if next(calls) >= passing:
                raise RuntimeError("the wire is cut\nin several places")
            return working(*args, **kwargs)

        with mock.patch.object(cls, method, fail):
            try:
                use(model, optimizer)
            except RuntimeError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("part", some(range(3), 3))
def test_an_error_of_a_collective_names_its_purpose(part: int) -> None:
    names = list(STRUCK)[part::3]
    for said in run_ranks(2, struck, names):
        wrong = {
            name: said.get(name, "")
            for name in names
            if f"The ranks are no longer in step: ranks 0 and 1 were {STRUCK[name][-1]} (the wire is cut). "
            + ("This rank has stepped" if "refresh" in name or name == "sizes" else "No weight")
            not in said.get(name, "")
        }
        assert not wrong, wrong


def cut_while_stepping() -> tuple[str, bool, str]:
    """Let a collective fail after the optimizer's update, and another before it.

    Returns:
        The first error, True if that step changed weights, and the second error.
    """
    model, optimizer = wrapped(stage=1, overlap_comm=False)
    before = [buffer.shard.clone() for buffer in optimizer.engine.buffers]
    model(BATCH).square().mean().backward()
    cut = RuntimeError("the wire is cut")
    with mock.patch.object(Hop, "all_gather", side_effect=cut), pytest.raises(RuntimeError) as behind:
        optimizer.step()
    changed = any(not torch.equal(a, b.shard) for a, b in zip(before, optimizer.engine.buffers, strict=True))
    model, optimizer = wrapped(stage=1, overlap_comm=False)
    with mock.patch.object(Hop, "all_to_all", side_effect=cut), pytest.raises(RuntimeError) as ahead:
        model(BATCH).square().mean().backward()
    return str(behind.value), changed, str(ahead.value)


def test_an_error_says_whether_weights_were_stepped() -> None:
    for behind, changed, ahead in run_ranks(2, cut_while_stepping):
        assert changed and "has stepped weights" in behind and "No weight was changed" not in behind, behind
        assert "No weight was changed by this step" in ahead, ahead
