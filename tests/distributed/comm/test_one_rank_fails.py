"""An exception on one rank reaches the other ranks within seconds.

An exception on all ranks does not count as a loss.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks, some
from zeropp.comm import watch
from zeropp.comm.hops import Comm, Hop

SOON = 20.0  # seconds in which the error must reach the other ranks; far below hang_timeout
# Seconds for which a rank is late. In this time a waiting rank asks for failures several times, and would treat a
# stopped rank as lost.
SLOW = 6.0


@contextlib.contextmanager
def asking_often() -> Iterator[None]:
    """Make waiting ranks ask for failures of other ranks every second instead of every five seconds."""
    with mock.patch.object(watch, "ASKING", 1.0):
        yield


class Fails(nn.Module):
    """A module that raises out-of-memory errors in one of its passes, on the given ranks, while ``armed`` is True.

    Args:
        where: "forward", "late forward" (at the end of forward), "backward", or any other text for no error in a pass.
        ranks: ranks that raise.
    """

    def __init__(self, where: str, ranks: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.where, self.ranks, self.armed = where, ranks, False
        self.kind: type[BaseException] = torch.OutOfMemoryError

    def error(self, *args: object) -> None:
        if self.armed and dist.get_rank() in self.ranks:
            raise self.kind("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1 and self.where == "forward":
                self.error()
            if number == 1 and self.where == "backward":
                x.register_hook(self.error)
        if self.where == "late forward":
            self.error()
        return x


@asking_often()
def wrapping() -> tuple[str, float]:
    """Wrap a model while rank 1 runs out of memory as it receives broadcast values.

    Returns:
        The error of this rank, and seconds until the error.
    """
    original, taken = Comm.broadcast, 0

    def short(self: Comm, *args: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == 3 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        original(self, *args)

    begun = time.monotonic()
    model = Fails("", [])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(Comm, "broadcast", short), pytest.raises(RuntimeError) as caught:
        zeropp.ZeroOptimizer(inner, model, make_config(hang_timeout=120))
    seconds = time.monotonic() - begun
    if dist.get_rank() == 1:
        await_word(begun)
    dist.distributed_c10d._get_default_store().set("heard", "")
    return str(caught.value), seconds


def test_memory_that_runs_out_while_wrapping() -> None:
    (other, seconds), (own, _) = run_ranks(2, wrapping)
    assert "CUDA out of memory" in own
    assert "rank 1 failed: OutOfMemoryError: CUDA out of memory" in other
    assert "receiving the values of rank 0" in other
    assert seconds < SOON


def await_word(begun: float) -> None:
    """Keep this process alive until another rank has set the key "heard" in the store.

    A process that ends closes its connections, which would end the other ranks' waits in another way.

    Args:
        begun: time.monotonic() at which the waiting starts to count; it ends after 2 * SOON seconds at the latest.
    """
    store = dist.distributed_c10d._get_default_store()
    while not store.check(["heard"]) and time.monotonic() - begun < 2 * SOON:
        time.sleep(0.2)


@asking_often()
def trained(
    where: str, ranks: list[int], settings: dict[str, Any], *, wrapper: bool, pause: float, common: bool = False
) -> tuple[list[str], float]:
    """Train five steps, with an error in the third.

    Args:
        where: pass or step in which the error is raised: see ``Fails``; or "step".
        ranks: ranks that raise.
        settings: configuration.
        wrapper: True to call optimizer.backward(loss), False to call loss.backward().
        pause: seconds for which rank 0 sleeps after an error.
        common: True if all ranks raise in the second step, too, and go on.

    Returns:
        The errors of this rank, and seconds until the last error.
    """
    torch.manual_seed(0)
    model = Fails(where, ranks)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(hang_timeout=120, **settings))
    if where == "step":
        inner.register_step_pre_hook(model.error)
    errors, begun = [], time.monotonic()
    for number in range(5):
        model.armed = number == 2
        model.ranks = [0, 1] if common and number == 1 else ranks
        model.armed |= common and number == 1
        try:
            loss = model(torch.ones(2, 64)).square().mean()
            if wrapper:
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))
            if "no longer in step" in str(error) or len(model.ranks) == 1:
                seconds = time.monotonic() - begun
                if dist.get_rank() in ranks:
                    # The failed rank lives on, like a program that writes a report or waits for a tracker before it
                    # ends.
                    await_word(begun)
                dist.distributed_c10d._get_default_store().set("heard", "")
                return errors, seconds
            time.sleep(pause if dist.get_rank() == 0 else 0)
        optimizer.zero_grad()
    return errors, time.monotonic() - begun


HEARD = [("backward", False), ("forward", True), ("forward", False), ("late forward", True), ("late forward", False),
         ("step", True), ("backward", True), ("step", False)]  # fmt: skip


@pytest.mark.every(8)
@pytest.mark.parametrize(("where", "wrapper"), HEARD)
def test_others_hear_of_it(where: str, wrapper: bool) -> None:
    settings: dict[str, Any] = {"stage": 3, "prefetch": 0, "reuse": 0}
    # common=True: all ranks have an error of the same kind in the step before. That error must not be taken for the
    # present one.
    (mine, _), (others, seconds) = run_ranks(2, trained, where, [0], settings, wrapper=wrapper, pause=0.0, common=True)
    assert [text.split(".")[0] for text in mine] == ["CUDA out of memory"] * 2
    assert others.pop(0).startswith("CUDA out of memory")
    # An exception inside loss.backward() does not pass through zeropp's code, so only the fact of the failure is known.
    seen = wrapper or where != "backward"
    failed = "OutOfMemoryError: CUDA out of memory" if seen else "its backward failed"
    assert len(others) == 1 and f"rank 0 failed: {failed}" in others[0], others
    assert seconds < SOON


@asking_often()
def inside(hop: str) -> tuple[str, float]:
    """Let rank 1 run out of memory in a collective, and live on.

    Args:
        hop: name of the method of ``Hop`` that raises.

    Returns:
        The error of this rank, and seconds until the error.
    """
    torch.manual_seed(0)
    model = Fails("", [])
    config = make_config(hang_timeout=120, prefetch=0, reuse=0)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    original = getattr(Hop, hop)

    taken = 0

    def short(self: Hop, *args: Any, **kwargs: Any) -> object:
        if taken == 2 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *args, **kwargs)

    begun = time.monotonic()
    with mock.patch.object(Hop, hop, short), pytest.raises(RuntimeError) as caught:
        for taken in range(4):  # noqa: B007  # `short` reads it
            optimizer.backward(model(torch.ones(2, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.monotonic() - begun
    if dist.get_rank() == 1:
        await_word(begun)
    dist.distributed_c10d._get_default_store().set("heard", "")
    return str(caught.value), seconds


@pytest.mark.parametrize("hop", some(["all_gather", "all_to_all"], 2))
def test_memory_that_runs_out_in_a_collective(hop: str) -> None:
    for text, seconds in run_ranks(2, inside, hop):
        assert "rank 1 failed: OutOfMemoryError: CUDA out of memory" in text
        assert seconds < SOON


def actor_and_critic() -> tuple[Fails, Fails, zeropp.ZeroOptimizer]:
    """Return an actor and a critic that have learned their orders in two steps, and the actor's optimizer.

    Rank 0 raises at the end of the actor's forward if ``actor.armed`` is True.
    """
    torch.manual_seed(0)
    models, optimizers = (Fails("late forward", [0]), Fails("", [])), []
    for model in models:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers.append(zeropp.ZeroOptimizer(inner, model, make_config(hang_timeout=120)))
        for _ in range(2):
            optimizers[-1].backward(model(torch.ones(2, 64)).square().mean())
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    return *models, optimizers[0]


@asking_often()
def in_another() -> tuple[str, float]:
    """Let rank 0 fail in the actor's forward and live on, while rank 1 goes on to the critic and waits there.

    Returns:
        The error of this rank, and seconds until the error.
    """
    actor, critic, _ = actor_and_critic()
    begun = time.monotonic()
    actor.armed = True
    with pytest.raises(RuntimeError) as caught:
        actor(torch.ones(2, 64))
        critic(torch.ones(2, 64))
    seconds = time.monotonic() - begun
    if dist.get_rank() == 0:
        await_word(begun)
    dist.distributed_c10d._get_default_store().set("heard", "")
    return str(caught.value), seconds


@pytest.mark.campaign
def test_a_rank_that_waits_in_another_model_hears_of_it() -> None:
    (own, _), (other, seconds) = run_ranks(2, in_another)
    assert own.startswith("CUDA out of memory")
    assert "rank 0 failed: OutOfMemoryError: CUDA out of memory" in other
    assert "rank 0 was using another model, in a forward" in other
    assert seconds < SOON


@asking_often()
def going_on(how: str) -> tuple[str, float]:
    """Let rank 0 fail alone and go on with another call, while rank 1 waits in the actor.

    Args:
        how: call with which rank 0 goes on: "critic", "evaluation" or "step" after an error in the actor's forward;
            "next batch" after an error in the optimizer's step.

    Returns:
        The error of this rank, and seconds until the error.
    """
    actor, critic, optimizer = actor_and_critic()
    begun = time.monotonic()
    actor.armed = how != "next batch"
    with pytest.raises(RuntimeError) as caught:
        if how == "next batch":
            optimizer.inner.register_step_pre_hook(actor.error)
            optimizer.backward(actor(torch.ones(2, 64)).square().mean())
            actor.armed = True
            with contextlib.suppress(torch.OutOfMemoryError):
                optimizer.step()
            actor.armed = False
        try:
            loss = actor(torch.ones(2, 64)).square().mean()
        except torch.OutOfMemoryError:
            actor.armed = False
            if how == "step":
                optimizer.step()
            else:
                model = actor if how == "evaluation" else critic
                with torch.no_grad():
                    model(torch.ones(2, 64))
                model(torch.ones(2, 64))
        optimizer.backward(loss)
    return str(caught.value), time.monotonic() - begun


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["critic", "evaluation", "step", "next batch"])
def test_a_rank_that_fails_alone_and_goes_on(how: str) -> None:
    """The other rank gets an error, because it waits for collectives that rank 0 will not issue."""
    (own, first), (other, second) = run_ranks(2, going_on, how)
    assert "rank 0 failed: OutOfMemoryError: CUDA out of memory" in other
    assert "no longer in step" in own
    assert max(first, second) < 1.5 * SOON


@asking_often()
def exchanging() -> tuple[str, float]:
    """Let rank 1 lose the other ranks and live on, while ranks 0 and 2 wait for it in an exchange.

    Returns:
        The error of this rank, and seconds until the error.
    """
    torch.manual_seed(0)
    model = Fails("", [])
    config = make_config(hang_timeout=120)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        error = optimizer.engine.agreement.failure("waiting for the gather of unit 'a'")
        await_word(begun)
        return str(error), 0.0
    with pytest.raises(RuntimeError) as caught:
        optimizer.engine.agreement.require_same_call("state_dict()")
    seconds = time.monotonic() - begun
    dist.distributed_c10d._get_default_store().set("heard", "")
    return str(caught.value), seconds


def test_a_rank_that_has_lost_the_others_ends_their_exchanges() -> None:
    """Rank 1 has raised no exception that it could report.

    Its closed connections end the exchanges of the other ranks.
    """
    for number, (text, seconds) in enumerate(run_ranks(3, exchanging)):
        assert "rank 1 was waiting for the gather of unit 'a'" in text
        assert number == 1 or "until its connections were closed" in text
        assert seconds < SOON


@asking_often()
def interrupted(stage: int) -> tuple[str, float]:
    """Interrupt rank 0's forward by KeyboardInterrupt, and let rank 0 recover while rank 1 waits.

    Args:
        stage: ZeRO stage.

    Returns:
        The error of this rank, and seconds until the error.
    """
    torch.manual_seed(0)
    model = Fails("forward", [0])
    config = make_config(stage=stage, hang_timeout=120, prefetch=0, reuse=0)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    begun = time.monotonic()
    model.armed, model.kind = True, KeyboardInterrupt
    with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
        optimizer.backward(model(torch.ones(2, 64)).square().mean())
    seconds = time.monotonic() - begun
    if dist.get_rank() == 0:
        optimizer.engine.recover()
        await_word(begun)
    dist.distributed_c10d._get_default_store().set("heard", "")
    return str(caught.value), seconds


@pytest.mark.parametrize("stage", some([1, 3], 2))
def test_ctrl_c_in_a_forward(stage: int) -> None:
    """torch calls no hook after a KeyboardInterrupt.

    In stage 1 the main thread of the other rank waits in a collective.
    """
    _, (other, seconds) = run_ranks(2, interrupted, stage)
    assert "rank 0 failed: its forward was interrupted" in other
    assert seconds < SOON


@asking_often()
def repeated() -> list[float]:
    """Train three steps of stage 1. Rank 0's forward of the second step runs out of memory and is repeated slowly.

    Returns:
        The losses of the three steps.
    """
    torch.manual_seed(0)
    model = Fails("forward", [0])
    config = make_config(stage=1, hang_timeout=60)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    losses = []
    for number in range(3):
        model.armed = number == 1
        try:
            loss = model(torch.ones(2, 64)).square().mean()
        except torch.OutOfMemoryError:
            model.armed = False
            handle = model.layers[2].register_forward_pre_hook(lambda *args: time.sleep(SLOW))
            loss = model(torch.ones(2, 64)).square().mean()
            handle.remove()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.campaign
def test_a_forward_that_is_repeated_is_no_loss() -> None:
    first, second = run_ranks(2, repeated)
    assert first == second and len(first) == 3


@asking_often()
def alone() -> list[str]:
    """Train three steps of stage 1.

    Before the second step, rank 0 alone evaluates for SLOW seconds in forwards that raise.

    Returns:
        Errors of training.
    """
    torch.manual_seed(0)
    model = Fails("forward", [0])
    config = make_config(stage=1, hang_timeout=60)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    errors = []
    for number in range(3):
        until = time.monotonic() + SLOW
        while number == 1 and dist.get_rank() == 0 and time.monotonic() < until:
            model.armed = True
            with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
                model(torch.ones(2, 64))
            model.armed = False
            time.sleep(0.5)
        try:
            optimizer.backward(model(torch.ones(2, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            errors.append(str(error))
            break
    return errors


@pytest.mark.campaign
def test_an_evaluation_on_one_rank_is_no_loss() -> None:
    assert run_ranks(2, alone) == [[], []]


@pytest.mark.parametrize("where", some(["forward", "late forward", "step"], 3))
def test_an_error_of_all_ranks_is_no_loss(where: str) -> None:
    """An error that all ranks have does not count as a loss, even if rank 0 takes SLOW seconds to go on."""
    for errors, _ in run_ranks(2, trained, where, [0, 1], {"stage": 3}, wrapper=True, pause=SLOW):
        assert len(errors) == 1 and errors[0].startswith("CUDA out of memory"), errors
