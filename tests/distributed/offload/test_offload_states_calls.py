"""``offload_states`` and ``reload_states``: work that goes on in between, and ranks that make different calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.all_parameter_kinds import Mixed
from tests.support.branching_models import WIDTH, Routed, make_config
from tests.support.offload_pairs import Run, run, same, states_of
from tests.support.owned_memory import owned_bytes
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from tests.support.states_off_device import BF16, Place, StateType, made, rows, told, train
from zeropp.offload.parked import Parked
from zeropp.optimizer.host_step import HostStep
from zeropp.params.flat_buffer import FlatBuffer

# Kinds that OpenRLHF and open-instruct keep off the device while they generate experience.
ASLEEP = [StateType.optim_states, StateType.contiguous_grad_buffer, StateType.hp_params]


def differs(model: nn.Module, optimizer: Any, other: nn.Module, plain: Any) -> list[str]:
    """Return the names of weights and states in which two trainings differ by a bit or more."""
    one, two = zeropp.full_state(model), zeropp.full_state(other)
    wrong = [name for name in one if not torch.equal(one[name], two[name])]
    own, others = states_of(optimizer), states_of(plain)
    return wrong + [f"{n} {k}" for n in own for k in own[n] if not torch.equal(own[n][k], others[n][k])]


# Work while states are off the device.


def asleep(settings: dict[str, Any]) -> list[str]:
    """Evaluate and read a model while ASLEEP is off the device, and read it while everything is.

    Returns:
        Texts on wrong results.
    """
    model, optimizer = made(**settings)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    with torch.no_grad():
        before = model(rows()).clone()
    weights, saved = zeropp.full_state(model), {name: value.clone() for name, value in model.state_dict().items()}
    before_bytes = owned_bytes(optimizer)
    optimizer.offload_states(include=ASLEEP, device=Place.cpu, pin_memory=True, non_blocking=True)
    optimizer.empty_partition_cache()
    wrong = [] if optimizer.engine.parking.kinds <= {"optim_states", "hp_params"} else ["more is away"]
    wrong += _misread(model, weights, saved)
    with torch.no_grad():
        wrong += [] if torch.equal(model(rows()), before) else ["it computes something else"]
    # Move everything else, too. Reads of weights then come from the host.
    optimizer.offload_states(pin_memory=False)
    wrong += _misread(model, weights, saved)
    optimizer.offload_states()
    optimizer.reload_states(non_blocking=True)
    optimizer.reload_states()
    after = owned_bytes(optimizer)
    return wrong + ([] if after == {**before_bytes, "gathered": 0} else [f"{after}, before {before_bytes}"])


def _misread(model: nn.Module, weights: dict[str, Tensor], saved: dict[str, Tensor]) -> list[str]:
    whole, state = zeropp.full_state(model), model.state_dict()
    wrong = [f"full_state {name}" for name in whole if not torch.equal(whole[name], weights[name])]
    wrong += [f"state_dict {name}" for name in state if not torch.equal(state[name], saved[name])]
    with zeropp.zero.GatheredParameters(model.parameters()):
        read = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return wrong + [f"gathered {name}" for name in read if not torch.equal(read[name], weights[name])]


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [{}, BF16, {"persist": 1000, **BF16}, {"stage": 1, **BF16}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_models_are_evaluated_and_read_while_states_are_away(world: int, settings: dict[str, Any]) -> None:
    """Models compute without the kinds in ASLEEP, and whole weights can be read with all kinds off the device."""
    assert run_ranks(world, asleep, settings) == [[]] * world


def exported(folder: str) -> list[str]:
    """Return names of weights with wrong values in a file that was exported while all memory was on the host.

    Frozen weights are stored as codes.
    """
    model = Mixed(torch.float32)
    settings = make_config(zero_quantized_nontrainable_weights=True, persist=100)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    optimizer = zeropp.ZeroOptimizer(inner, model, settings)
    before = zeropp.full_state(model)
    optimizer.offload_states()
    zeropp.checkpoint.export(folder, model)
    away = zeropp.full_state(model)
    optimizer.reload_states()
    zeropp.checkpoint.load_safetensors(model, folder)
    after = zeropp.full_state(model)
    return [n for n in before if not (torch.equal(before[n], away[n]) and torch.equal(before[n], after[n]))]


def test_whole_weights_are_exported_from_the_host(tmp_path: Any) -> None:
    assert run_ranks(2, exported, str(tmp_path / "out")) == [[], []]


def across() -> list[str]:
    """Return the differences after memory is moved to the host and back between two forwards and their backwards."""
    model, optimizer = made(persist=WIDTH, **BF16)
    other, plain = made(persist=WIDTH, **BF16)
    for step in range(2):
        for each, steps in ((model, optimizer), (other, plain)):
            steps.zero_grad()
            losses = [each(rows(step)).square().mean(), each(rows(step + 5)).square().mean()]
            for loss in losses:
                if each is model:
                    with torch.inference_mode():  # RLHF rollouts run in inference mode
                        steps.offload_states()
                        steps.reload_states()
                loss.backward()
            steps.step()
    return differs(model, optimizer, other, plain)


@pytest.mark.parametrize("world", [1, 2])
def test_graphs_from_before_are_good_afterwards(world: int) -> None:
    assert run_ranks(world, across) == [[]] * world


class Shifted(nn.Module):
    """Model whose backward the engine notices by a gradient only.

    Its forward returns a function, so the engine finds no output tensor to hook. Its last operation adds a bias, whose
    gradient is the first event of the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = Routed(2)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        y = self.body(x) + self.shift
        return lambda: y


class Hidden:
    """Entry like those of MODELS, for :class:`Shifted`."""

    build = Shifted

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(3, WIDTH, generator=generator),)

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch)().sum()


def refused_backward(name: str) -> tuple[str, list[str]]:
    """Return the error of a backward without its weights, and the differences of the training that goes on."""
    runs, trait = [], MODELS.get(name, Hidden)
    for early in (True, False):
        torch.manual_seed(1)
        model = trait.build()
        inner = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config(persist=40))
        error = ""
        for step in range(3):
            loss = trait.loss(model, trait.batch(torch.Generator().manual_seed(step)))
            if early and step == 1:
                optimizer.offload_states()
                error = told(loss.backward)
                optimizer.reload_states()
                loss = trait.loss(model, trait.batch(torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((error, model, optimizer))
    return runs[0][0], differs(runs[0][1], runs[0][2], runs[1][1], runs[1][2])


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["gpt", "loss inside", "gpt, blocks reentrant", "hidden"])
def test_a_backward_that_is_refused_leaves_nothing_behind(name: str) -> None:
    for error, wrong in run_ranks(2, refused_backward, name):
        assert "call optimizer.reload_states() first" in error and not wrong


def pending() -> tuple[list[str], int]:
    """Move memory while steps run on the host; return differences in results, and the number of steps of units."""
    options = Run({"offload_optimizer": {"device": "cpu"}, "persist": 1000, **BF16}, paused=_away_and_back)
    plain, seen = HostStep._step, [0]

    def late(*arguments: Any) -> None:
        time.sleep(0.01)
        plain(*arguments)
        seen[0] += 1

    with mock.patch.object(HostStep, "_step", late):
        found = run(options)
    return same(run(Run(options.settings)), found), seen[0]


def refreshing() -> tuple[list[str], int]:
    """Move memory while refreshes read main weights; return differences in results, and the number of refreshes."""
    options = Run({"persist": 1000, **BF16}, paused=_away_and_back)
    plain, seen = FlatBuffer.refresh, [0]

    def late(buffer: FlatBuffer, differs: Any) -> Iterator[None]:
        time.sleep(0.02)
        yield from plain(buffer, differs)
        seen[0] += 1

    with mock.patch.object(FlatBuffer, "refresh", late):
        found = run(options)
    return same(run(Run(options.settings)), found), seen[0]


def _away_and_back(model: nn.Module, optimizer: Any, when: str) -> None:
    optimizer.offload_states()
    optimizer.reload_states()


@pytest.mark.parametrize("work", [pending, refreshing])
def test_a_step_and_a_refresh_under_way_are_waited_for(work: Callable[[], tuple[list[str], int]]) -> None:
    for wrong, seen in run_ranks(2, work):
        assert not wrong and seen > 0


# Ranks that make different calls.


def forgotten(reminded: bool) -> list[str]:
    """Return this rank's errors when rank 1 trains on without ``reload_states()``.

    Args:
        reminded: True to call ``reload_states()`` on rank 1 afterwards, and to train on.
    """
    model, optimizer = made(hang_timeout=3)
    train(model, optimizer, 0)
    optimizer.offload_states()
    errors = [told(lambda: train(model, optimizer, 1))] if dist.get_rank() == 1 else []
    if dist.get_rank() == 0 or reminded:
        errors.append(told(optimizer.reload_states))
    if reminded:
        errors.append(told(lambda: train(model, optimizer, 1)))
    return errors


def test_a_rank_that_forgot_to_reload_leaves_the_others_an_error() -> None:
    first, second = run_ranks(2, forgotten, False)
    assert len(second) == 1 and "call optimizer.reload_states() first" in second[0]
    assert len(first) == 1 and "rank 1 failed: RuntimeError: the model needs weights" in first[0]
    assert "rank 0 was at reload_states()" in first[0] and "rank 1 was in the beginning of a forward" in first[0]


def test_a_rank_that_is_reminded_goes_on_with_the_others() -> None:
    first, second = run_ranks(2, forgotten, True)
    assert first == ["", ""] and second[1:] == ["", ""] and second[0]


def without_room(number: int) -> tuple[list[str], list[str]]:
    """Let rank 1 run out of host memory in ``offload_states`` and out of device memory in ``reload_states``.

    Args:
        number: storage, counted from 1, at which rank 1 has no room.

    Returns:
        Errors of both calls and of a training step after each, and the differences in results at the end.
    """
    model, optimizer = made(**BF16)
    other, plain = made(**BF16)
    for each, steps in ((model, optimizer), (other, plain)):
        train(each, steps, 0, 1)
    errors = []
    for name, call in (("__init__", optimizer.offload_states), ("bring_back", optimizer.reload_states)):
        with mock.patch.object(Parked, name, _failing(getattr(Parked, name), number if dist.get_rank() == 1 else -1)):
            errors.append(told(call))
        errors.append(told(lambda: train(model, optimizer, 2)))
        call()
    for each, steps in ((model, optimizer), (other, plain)):
        train(each, steps, 2, 3)
    return errors, differs(model, optimizer, other, plain)


def _failing(plain: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function that calls ``plain`` and raises MemoryError at its ``number``-th call."""
    count = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            raise MemoryError("no room")
        return plain(*args, **kwargs)

    return call


@pytest.mark.parametrize("number", [1, 3])
def test_all_ranks_hear_of_one_that_has_no_room(number: int) -> None:
    """Every rank raises if rank 1 has no room for its first or third storage, and a repeated call succeeds."""
    for rank, (errors, wrong) in enumerate(run_ranks(2, without_room, number)):
        out, first, back, second = errors
        said = "MemoryError: no room"
        assert said in out and said in back and ("failed on rank 1" in out) is (rank == 0)
        # Both ranks refuse to train. A rank that still has all memory would otherwise wait for the other rank.
        assert "reload_states() first" in first and "reload_states() first" in second
        assert not wrong


def nothing_here() -> tuple[int, str]:
    """Return the number of this rank's slices of a tiny model, and the error of a step without states."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, make_config(hang_timeout=3))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    count = len(optimizer.slices.all)
    optimizer.offload_states(["optim_states"])
    return count, told(optimizer.step)


def test_a_rank_that_has_nothing_is_refused_with_the_others() -> None:
    (some, first), (none, second) = run_ranks(2, nothing_here)
    assert some and not none and "(optim_states)" in first and first == second


def apart() -> str:
    """Return the error of ``offload_states`` when ranks pass different kinds."""
    _, optimizer = made(hang_timeout=3)
    return told(lambda: optimizer.offload_states(["lp_grads"] if dist.get_rank() else ["hp_params"]))


def test_ranks_give_the_same_names() -> None:
    for error in run_ranks(2, apart):
        assert "rank 0 called offload_states(['hp_params']) and rank 1 called offload_states(['lp_grads'])" in error
