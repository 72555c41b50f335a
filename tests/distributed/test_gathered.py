"""GatheredParameters: whole values to read, and edits that reach the main weights of every rank."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.parity import assert_close
from tests.distributed.shapes import Block, make_config, worst
from zeropp.zero import GatheredParameters, register_external_parameter

PLACED: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 3": {},
    "small kept": {"persist": 100},
    "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2},
}


class Stack(nn.Module):
    """Three blocks and a channels_last weight; one frozen, and integers that nobody partitions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.conv(x.view(-1, 4, 2, 2)).flatten(1) * (1 + self.codes.repeat(4))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def wrapped(settings: dict[str, object], dtype: torch.dtype = torch.float64) -> tuple[Stack, Stack, Any]:
    model = Stack().to(dtype)
    plain = copy.deepcopy(model)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return model, plain, zeropp.ZeroOptimizer(inner, model, make_config(**settings))


def pickled() -> str:
    model, _, _ = wrapped({})
    with GatheredParameters(model):
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.save(whole, io.BytesIO())
        with pytest.raises(TypeError) as caught:
            torch.save(model.blocks[0].lin.weight, io.BytesIO())
    return str(caught.value)


def test_a_lent_parameter_cannot_be_pickled_and_says_what_can() -> None:
    for message in run_ranks(2, pickled):
        said = re.match(r"parameter .blocks.0.lin.weight. .* Save parameter.detach\(\).clone\(\) inside", message)
        assert said, message


def edit(model: Stack) -> None:
    """In every way that users have."""
    with torch.no_grad():
        model.blocks[0].lin.weight.mul_(1.5)
        model.conv.weight[0, 0].fill_(0.25)
    model.blocks[1].lin.weight.data.add_(0.1)
    model.blocks[2].lin.bias.data = torch.full_like(model.blocks[2].lin.bias, 0.5)
    nn.init.constant_(model.conv.bias, 0.75)


def trained_with_edits(settings: dict[str, object], modifier: int) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Weights after steps with an edit between them, those of plain torch, and whether outputs agreed at once."""
    model, plain, optimizer = wrapped(settings)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    rank, world, same = dist.get_rank(), dist.get_world_size(), True
    for step in range(4):
        with GatheredParameters(model.parameters(), modifier_rank=modifier):
            if rank == modifier:
                edit(model)
            elif step % 2:
                model.conv.bias.data.fill_(99.0)  # of no consequence
        edit(plain)
        same &= torch.allclose(model(data(9, 0)), plain(data(9, 0)), rtol=0, atol=1e-9)
        optimizer.zero_grad()
        reference.zero_grad()
        model(data(step, rank)).square().mean().backward()
        for other in range(world):
            (plain(data(step, other)).square().mean() / world).backward()
        optimizer.step()
        reference.step()
    return zeropp.full_state(model), plain.state_dict(), same


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("modifier", [0, 3])
def test_edits_are_everyones_and_training_goes_on_from_them(name: str, modifier: int) -> None:
    for found, expected, same in run_ranks(4, trained_with_edits, PLACED[name], modifier, local_world_size=2):
        assert same, "a forward after an edit used older weights"
        for key, value in expected.items():
            assert_close(found[key], value, 1e-9, key)


def read(settings: dict[str, object]) -> list[str]:
    """What is not as it should be while the parameters are gathered, and after."""
    model, plain, _ = wrapped(settings, torch.float32)
    wrong = []
    for chosen in (model, list(model.parameters())[:3], model.conv.weight, (p for p in model.conv.parameters())):
        with GatheredParameters(chosen):
            for (key, p), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
                asked = chosen is model or chosen is p
                if asked and not (torch.equal(p, whole) and p.stride() == whole.stride() and type(p) is nn.Parameter):
                    wrong.append(key)
        with pytest.raises(RuntimeError, match="GatheredParameters"):
            model.conv.weight.sum()
    return wrong


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}, {"stage": 1}], ids=["fp32", "bf16", "stage 1"])
def test_values_are_those_of_the_main_weights(settings: dict[str, object]) -> None:
    """To the bit, in float32 also where the model computes in bfloat16; whatever was asked for and how."""
    assert run_ranks(2, read, settings) == [[], []]


def precise(_: int) -> tuple[bool, bool]:
    """Whether untouched weights keep bits that bfloat16 has not, and an edit has all of its own."""
    model, plain, _ = wrapped({"bf16": {"enabled": True}}, torch.float32)
    with GatheredParameters(model, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            model.blocks[0].lin.bias.fill_(1 / 3)
    state = zeropp.full_state(model)
    untouched = all(torch.equal(state[k], v) for k, v in plain.state_dict().items() if k != "blocks.0.lin.bias")
    return untouched, bool((state["blocks.0.lin.bias"] == torch.tensor(1 / 3)).all())


def test_edits_and_what_is_not_edited_keep_float32_precision() -> None:
    assert run_ranks(2, precise, 0) == [(True, True)] * 2


def without_modifier(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model):
        if dist.get_rank() == 1:
            model.conv.weight.data[0, 0, 0, 0] += 1


def in_the_model(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model.conv):
        model(data(0, 0))


def around_a_step(model: Stack, optimizer: Any) -> None:
    model(data(0, 0)).sum().backward()
    with GatheredParameters(model.conv):
        optimizer.step()


def backward_inside(model: Stack, optimizer: Any) -> None:
    loss = model(data(0, 0)).sum()
    with GatheredParameters(model.conv):
        loss.backward()


def twice(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model.blocks), GatheredParameters(model.conv), GatheredParameters(model.conv.bias):
        pass


def no_such_rank(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model, modifier_rank=7):
        pass


def no_parameters(model: Stack, optimizer: Any) -> None:
    GatheredParameters("conv.bias")  # type: ignore[arg-type]


def other_shape(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model, modifier_rank=0):
        model.conv.bias.data = torch.zeros(7, dtype=torch.float64)


def editing_inside_a_pass(model: Stack, optimizer: Any) -> None:
    def hook(*_: object) -> None:
        with GatheredParameters(model.conv, modifier_rank=0):
            pass

    handle = model.blocks[1].register_forward_hook(hook)
    try:
        model(data(0, 0))
    finally:
        handle.remove()


def failing_body(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model, modifier_rank=0):
        model.conv.bias.data.fill_(5.0)
        raise KeyError("the user's own")


REFUSED: dict[str, tuple[Callable[[Stack, Any], None], str]] = {
    "an edit that nobody keeps": (without_modifier, r"ranks \[1\] are lost.*modifier_rank=0"),
    "the model inside": (in_the_model, "the model was called inside GatheredParameters"),
    "a step inside": (around_a_step, "step was called inside GatheredParameters"),
    "a backward inside": (backward_inside, "backward was called inside GatheredParameters"),
    "gathered already": (twice, r"\['conv.bias'\] are gathered already"),
    "no such rank": (no_such_rank, r"modifier_rank is 7; expected one of the model's ranks \[0, 1\]"),
    "no parameters": (no_parameters, "params holds 'c', a str; expected a module"),
    "another shape": (other_shape, r"conv.bias of shape \(4,\) was given \(7,\)"),
    "an edit inside a pass": (editing_inside_a_pass, "modifier_rank 0 inside a forward or backward"),
    "the user's error": (failing_body, "the user's own"),
}


def refuse(name: str) -> list[str]:
    """What is wrong with the refusal on this rank, and with the model after it."""
    model, plain, optimizer = wrapped({})
    work, message = REFUSED[name]
    wrong = []
    with pytest.raises((RuntimeError, ValueError, KeyError, TypeError), match=message):
        work(model, optimizer)
    optimizer.zero_grad()
    if not torch.allclose(model(data(1, 0)), plain(data(1, 0)), rtol=0, atol=1e-12):
        wrong.append("output differs afterwards")
    state = zeropp.full_state(model)
    return wrong + [key for key, value in plain.state_dict().items() if not torch.equal(state[key], value)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_on_every_rank_and_nothing_is_changed(name: str) -> None:
    assert run_ranks(2, refuse, name) == [[], []]


def alone(_: int) -> None:
    model, _, _ = wrapped({"hang_timeout": 3})
    if dist.get_rank() == 0:
        with GatheredParameters(model):
            pass
    else:
        model(data(0, 0))


def test_a_rank_that_gathers_alone_is_told_so() -> None:
    for failure in run_ranks(2, alone, 0, catch=True, timeout=40):
        assert isinstance(failure, RankFailure) and "no longer in step" in failure.message


def averages(settings: dict[str, object]) -> tuple[list[Tensor], list[Tensor]]:
    """An exponential moving average of the weights on rank 0, beside one of plain torch."""
    model, plain, optimizer = wrapped(settings)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    mean = [p.detach().clone().double() for p in plain.parameters()]
    expected = [m.clone() for m in mean]
    for step in range(4):
        for zero, whole, its in ((model, plain, optimizer),):
            its.zero_grad()
            reference.zero_grad()
            zero(data(step, dist.get_rank())).square().mean().backward()
            for other in range(dist.get_world_size()):
                (whole(data(step, other)).square().mean() / dist.get_world_size()).backward()
            its.step()
            reference.step()
        with GatheredParameters(model.parameters()), torch.no_grad():
            for own, p in zip(mean, model.parameters(), strict=True):
                own.lerp_(p.detach().double(), 0.1)
        for own, p in zip(expected, plain.parameters(), strict=True):
            own.lerp_(p.detach().double(), 0.1)
    return mean, expected


@pytest.mark.parametrize("name", ["stage 1", "stage 3", "hpz"])
def test_a_moving_average_of_weights(name: str) -> None:
    for mean, expected in run_ranks(4, averages, PLACED[name], local_world_size=2):
        for index, (a, b) in enumerate(zip(mean, expected, strict=True)):
            assert_close(a, b, 1e-9, f"average {index}")


class Borrowing(nn.Module):
    """A module that uses a weight of another unit, as untied heads of old models do."""

    def __init__(self, say: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.reader = nn.Identity()
        self.reader.forward = lambda x: nn.functional.linear(x, self.blocks[0].lin.weight).sum(-1)  # type: ignore
        if say == "before":
            register_external_parameter(self.reader, self.blocks[0].lin.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.reader(x)


def borrow(say: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    model = Borrowing(say).double()
    plain = Borrowing("never").double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    if say == "after":
        register_external_parameter(model.reader, model.blocks[0].lin.weight)
        register_external_parameter(model.reader, model.blocks[0].lin.weight)
    touched = 0
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = model(data(step, dist.get_rank())).square().mean()
        touched += bool(optimizer.engine._backward._whole)
        loss.backward()
        for other in range(dist.get_world_size()):
            (plain(data(step, other)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        reference.step()
    return zeropp.full_state(model), plain.state_dict(), touched


@pytest.mark.parametrize("say", ["before", "after", "never"])
def test_external_parameters_may_be_registered_and_need_not_be(say: str) -> None:
    for found, expected, touched in run_ranks(2, borrow, say):
        for key, value in expected.items():
            assert_close(found[key], value, 1e-9, key)
        assert touched == (4 if say == "never" else 0), "announced uses need no fetch for the whole backward"


class LateSayer(nn.Module):
    """Says in its own forward that it uses another block's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

        def forward(x: Tensor) -> Tensor:
            register_external_parameter(self.blocks[2], self.blocks[0].lin.weight)
            return self.blocks[2].lin(x) @ self.blocks[0].lin.weight.T

        self.blocks[2].forward = forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def say_late(settings: dict[str, object]) -> tuple[float, list[int]]:
    model, plain = LateSayer().double(), LateSayer().double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        model(data(step, dist.get_rank())).square().mean().backward()
        for other in range(dist.get_world_size()):
            (plain(data(step, other)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        reference.step()
    return worst(zeropp.full_state(model), plain.state_dict()), [unit.users for unit in optimizer.engine.units]


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_an_external_parameter_may_be_registered_while_it_runs(name: str) -> None:
    for off, holds in run_ranks(2, say_late, PLACED[name]):
        assert off <= 1e-12 and set(holds) == {0}


def gathered_inside(given: str) -> tuple[set[str], set[str]]:
    """Parameters that are away when the last block is entered, and while they are gathered there."""
    model, _, _ = wrapped({"reuse": 0, "prefetch": 0})
    seen: list[set[str]] = []

    def look() -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
        seen.append({name for name, p in named if type(p) is not nn.Parameter})

    def enter(*_: object) -> None:
        look()
        with GatheredParameters(model if given == "module" else model.blocks[0].lin.weight):
            look()

    model.blocks[-1].register_forward_pre_hook(enter)
    model(data(0, 0))
    return seen[0], seen[1]


@pytest.mark.parametrize("given", ["module", "parameter"])
def test_inside_a_pass_they_are_there_before_any_is_used(given: str) -> None:
    unit = {"blocks.0.lin.weight", "blocks.0.lin.bias"}
    for before, inside in run_ranks(2, gathered_inside, given):
        assert before > unit and inside == (set() if given == "module" else before - unit)


def harmless(_: int) -> int:
    free = nn.Linear(3, 3)
    with GatheredParameters(free.parameters(), modifier_rank=0):
        free.weight.data.fill_(2.0)
    model, _, _ = wrapped({})
    with GatheredParameters(model, modifier_rank=0, enabled=False), pytest.raises(RuntimeError, match="partitioned"):
        model.conv.weight.sum()
    with GatheredParameters([]), GatheredParameters(model.codes):
        pass
    with pytest.raises(TypeError, match="a Linear and a str"):
        register_external_parameter(free, "weight")  # type: ignore[arg-type]
    return int(free.weight.sum())


def test_what_is_not_partitioned_is_left_alone() -> None:
    assert run_ranks(2, harmless, 0) == [18, 18]
