"""GatheredParameters gives parameters their whole main weights; edits inside it reach every rank's main weights."""

from __future__ import annotations

import io
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.gathered_model import PLACED, Stack, data, lent
from tests.support.parity import assert_close
from tests.support.rank_pool import run_ranks
from zeropp.zero import GatheredParameters, register_external_parameter


def pickled() -> str:
    pair = lent({})
    model = pair.model
    with GatheredParameters(model):
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.save(whole, io.BytesIO())
        with pytest.raises(TypeError) as caught:
            torch.save(model.blocks[0].lin.weight, io.BytesIO())
    return str(caught.value)


def test_pickling_a_gathered_parameter_is_refused_with_the_remedy() -> None:
    for message in run_ranks(2, pickled):
        said = re.match(r"parameter .blocks.0.lin.weight. .* Save parameter.detach\(\).clone\(\) inside", message)
        assert said, message


def edit(model: Stack) -> None:
    """Edit parameters in each way that users do: in place, through .data, by assigning .data, and by nn.init."""
    with torch.no_grad():
        model.blocks[0].lin.weight.mul_(1.5)
        model.conv.weight[0, 0].fill_(0.25)
    model.blocks[1].lin.weight.data.add_(0.1)
    model.blocks[2].lin.bias.data = torch.full_like(model.blocks[2].lin.bias, 0.5)
    nn.init.constant_(model.conv.bias, 0.75)


def trained_with_edits(settings: dict[str, object], modifier: int | None) -> bool:
    """Train four steps with an edit before each, on the sharded model and on plain torch.

    Args:
        settings: placement of the model.
        modifier: rank whose edits are kept; None if all ranks make the same edits.

    Returns:
        True if each forward right after an edit equals plain torch's within 1e-9.
    """
    pair, same = lent(settings), True
    for step in range(4):
        with GatheredParameters(pair.model.parameters(), modifier_rank=modifier):
            if modifier is None or pair.rank == modifier:
                edit(pair.model)
            elif step % 2:
                # An edit on a rank other than modifier_rank, which must be discarded.
                pair.model.conv.bias.data.fill_(99.0)
        edit(pair.plain)
        same &= torch.allclose(pair.model(data(9, 0)), pair.plain(data(9, 0)), rtol=0, atol=1e-9)
        pair.train()
    pair.check(1e-9)
    return same


@pytest.mark.every(14)
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("modifier", [0, 3, None])
def test_edits_are_everyones_and_training_goes_on_from_them(name: str, modifier: int | None) -> None:
    found = run_ranks(4, trained_with_edits, PLACED[name], modifier, local_world_size=2)
    assert found == [True] * 4, "a forward after an edit used older weights"


def read(settings: dict[str, object]) -> list[str]:
    """Gather the model, a list, one parameter and a generator of parameters.

    Returns:
        Names of requested parameters whose values, strides or type differ from the plain model's.
    """
    pair = lent(settings, torch.float32)
    model, plain = pair.model, pair.plain
    wrong = []
    first = list(model.parameters())[:3]
    ways = ((model, model.parameters()), (first, first), (model.conv.weight, [model.conv.weight]),
            ((p for p in model.conv.parameters()), model.conv.parameters()))  # fmt: skip
    for given, requested in ways:
        chosen = {id(p) for p in requested}
        with GatheredParameters(given):
            for (key, p), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
                if id(p) not in chosen:
                    continue
                if not (torch.equal(p, whole) and p.stride() == whole.stride() and type(p) is nn.Parameter):
                    wrong.append(key)
        if settings.get("stage", 3) == 3:
            with pytest.raises(RuntimeError, match="GatheredParameters"):
                model.conv.weight.sum()
        else:
            assert torch.equal(model.conv.weight, plain.conv.weight)  # readable between passes below stage 3
    return wrong


@pytest.mark.parametrize(
    "settings",
    [{}, {"bf16": {"enabled": True}}, pytest.param({"stage": 1}, marks=pytest.mark.campaign)],
    ids=["fp32", "bf16", "stage 1"],
)
def test_values_are_those_of_the_main_weights(settings: dict[str, object]) -> None:
    """Gathered values equal the float32 main weights bit for bit, even if the model computes in bfloat16."""
    assert run_ranks(2, read, settings) == [[], []]


def precise(_: int) -> tuple[bool, bool]:
    """Edit one bias inside GatheredParameters in a bf16 model.

    Returns:
        True if the weights that were not edited keep their float32 bits, and True if the edited bias is 1/3 in float32.
    """
    pair = lent({"bf16": {"enabled": True}}, torch.float32)
    model, plain = pair.model, pair.plain
    with GatheredParameters(model, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            model.blocks[0].lin.bias.fill_(1 / 3)
    state = zeropp.full_state(model)
    untouched = all(torch.equal(state[k], v) for k, v in plain.state_dict().items() if k != "blocks.0.lin.bias")
    return untouched, bool((state["blocks.0.lin.bias"] == torch.tensor(1 / 3)).all())


def test_edited_and_unedited_weights_keep_float32_precision() -> None:
    assert run_ranks(2, precise, 0) == [(True, True)] * 2


def averages(settings: dict[str, object]) -> tuple[list[Tensor], list[Tensor]]:
    """Compute an exponential moving average of the weights inside GatheredParameters, and the same on plain torch.

    Returns:
        The average of the sharded model's weights, and the average of the plain model's weights.
    """
    pair = lent(settings)
    mean = [p.detach().clone().double() for p in pair.plain.parameters()]
    expected = [m.clone() for m in mean]
    for _ in range(2):
        pair.train()
        with GatheredParameters(pair.model.parameters()), torch.no_grad():
            for own, p in zip(mean, pair.model.parameters(), strict=True):
                own.lerp_(p.detach().double(), 0.1)
        for own, p in zip(expected, pair.plain.parameters(), strict=True):
            own.lerp_(p.detach().double(), 0.1)
    return mean, expected


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["hpz", "stage 1", "stage 3"])
def test_a_moving_average_of_weights(name: str) -> None:
    for mean, expected in run_ranks(4, averages, PLACED[name], local_world_size=2):
        for index, (a, b) in enumerate(zip(mean, expected, strict=True)):
            assert_close(a, b, 1e-9, f"average {index}")


def gathered_inside(given: str) -> tuple[set[str], set[str]]:
    """Enter GatheredParameters in a hook before the last block of a forward.

    Args:
        given: "module" gathers the whole model, "parameter" one weight of the first block.

    Returns:
        Names of the parameters without values before GatheredParameters is entered, and inside it.
    """
    pair = lent({"reuse": 0, "prefetch": 0})
    model = pair.model
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


@pytest.mark.every(2)
@pytest.mark.parametrize("given", ["module", "parameter"])
def test_inside_a_pass_they_are_there_before_any_is_used(given: str) -> None:
    unit = {"blocks.0.lin.weight", "blocks.0.lin.bias"}
    for before, inside in run_ranks(2, gathered_inside, given):
        assert before > unit and inside == (set() if given == "module" else before - unit)


def harmless(_: int) -> int:
    free = nn.Linear(3, 3)
    with GatheredParameters(free.parameters(), modifier_rank=0):
        free.weight.data.fill_(2.0)
    pair = lent({})
    model = pair.model
    with (
        GatheredParameters(model, modifier_rank=0, enabled=False),
        pytest.raises(RuntimeError, match="keeps its values elsewhere"),
    ):
        model.conv.weight.sum()
    with GatheredParameters([]), GatheredParameters(model.codes):
        pass
    with pytest.raises(TypeError, match="a Linear and a str"):
        register_external_parameter(free, "weight")  # type: ignore[arg-type]
    return int(free.weight.sum())


def test_parameters_that_are_not_partitioned_are_left_alone() -> None:
    assert run_ranks(2, harmless, 0) == [18, 18]
