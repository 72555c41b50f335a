"""What there is beside stepping: modes of schedule-free optimizers, averages, norms, reports, attributes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.models import MODELS
from tests.distributed.parity import Recipe, assert_close, build, micro_batch
from tests.distributed.shapes import Routed, make_config

PLACED: dict[str, dict[str, object]] = {
    "stage 3": {}, "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2}, "persistent": {"persist": 10**6},
}  # fmt: skip
RECIPE = Recipe()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return MODELS[RECIPE.model].loss(model, micro_batch(RECIPE, step, 0, rank))


def backward(model: nn.Module, step: int, world: int | None) -> None:
    """Of all of ``world`` ranks' batches, or of this rank's."""
    for rank in [dist.get_rank()] if world is None else range(world):
        (loss_of(model, step, rank) / (world or 1)).backward()


# Schedule-free optimizers.


def free_of_schedules(cls: str, settings: dict[str, object] | None, world: int | None) -> tuple[Any, ...]:
    """Losses in eval mode between steps, and weights in both modes; plain torch without settings."""
    model = build(RECIPE)
    optimizer: Any = getattr(schedulefree, cls)(model.parameters(), lr=0.05, warmup_steps=2)
    if settings is not None:
        optimizer = zeropp.ZeroOptimizer(optimizer, model, make_config(**settings))
    losses, states = [], []
    for step in range(6):
        optimizer.train()
        optimizer.train()
        optimizer.zero_grad()
        backward(model, step, world)
        optimizer.step()
        if step % 2:
            optimizer.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 50, 0).item())
            states.append(zeropp.full_state(model) if settings is not None else copy.deepcopy(model.state_dict()))
    optimizer.train()
    states.append(zeropp.full_state(model) if settings is not None else dict(model.state_dict()))
    return losses, states


@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("cls", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_schedule_free_optimizers_switch(cls: str, placement: str) -> None:
    losses, states = free_of_schedules(cls, None, 4)
    for found, own in run_ranks(4, free_of_schedules, cls, PLACED[placement], None, local_world_size=2):
        assert_close(found, losses, 1e-9, "losses in eval mode")
        for state, expected in zip(own, states, strict=True):
            for name, value in expected.items():
                assert_close(state[name], value, 1e-9, name)


def quiet() -> tuple[int, int]:
    """Bytes that train() sends where the mode changes, and where it does not."""
    model = Routed()
    inner = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    optimizer: Any = zeropp.ZeroOptimizer(inner, model, make_config(stage=1))
    sent = []
    for switch in (optimizer.train, optimizer.train):
        before = zeropp.comm_report(optimizer).total_bytes
        switch()
        with torch.no_grad():
            model(torch.ones(1, 8))
        sent.append(zeropp.comm_report(model).total_bytes - before)
    return sent[0], sent[1]


def test_a_mode_that_is_on_already_sends_nothing() -> None:
    for changed, same in run_ranks(2, quiet):
        assert changed > same == 0


def switched_alone() -> str:
    """The error of a rank that evaluates alone, or goes on."""
    model = Routed()
    inner = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    optimizer: Any = zeropp.ZeroOptimizer(inner, model, make_config(hang_timeout=3))
    optimizer.train()
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 0:
            optimizer.eval()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    return str(caught.value)


def test_a_mode_that_one_rank_switches_is_named() -> None:
    for message in run_ranks(2, switched_alone):
        assert message.startswith("rank 0 called eval() of the optimizer alone; it is collective"), message


# Averages.


def averaged(settings: dict[str, object]) -> tuple[Any, ...]:
    """Weights and a loss with the average applied, before and after a resume; weights afterwards; complaints."""
    model, wrong = build(RECIPE), []
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model, make_config(**settings))
    average = zeropp.ema(model, decay=0.8)
    sent = None
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step, None)
        optimizer.step()
        optimizer.engine.refresh.wait()  # what the step sends is not the average's
        before = zeropp.comm_report(model).total_bytes
        average.update()
        sent = zeropp.comm_report(model).total_bytes - before
    if sent:
        wrong.append(f"an update sent {sent} bytes")
    trained = zeropp.full_state(model)
    with average.applied():
        state = zeropp.full_state(model)
        with torch.no_grad():
            loss = loss_of(model, 50, 0).item()
        for call in (
            optimizer.step, average.update, average.applied().__enter__, optimizer.state_dict, average.state_dict,
            lambda: average.load_state_dict({}), lambda: zeropp.ema(model), lambda: model.requires_grad_(False),
            zeropp.zero.GatheredParameters(model, modifier_rank=0).__enter__,
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="applied"):
                call()
        with pytest.raises(RuntimeError, match="backward was called while an average"):
            backward(model, 9, None)
    if any(not torch.equal(value, trained[name]) for name, value in zeropp.full_state(model).items()):
        wrong.append("trained weights are not back")
    saved = copy.deepcopy(average.state_dict())
    again = zeropp.ema(model)
    again.load_state_dict(saved)
    with again.applied():
        same = all(torch.equal(value, state[name]) for name, value in zeropp.full_state(model).items())
    if not same or again.updates != 5 or again.decay != 0.8:
        wrong.append("a resumed average is another")
    with pytest.raises(ValueError, match="each rank loads what it has saved"):
        again.load_state_dict({**saved, "pieces": saved["pieces"][1:]})
    optimizer.zero_grad()
    backward(model, 5, None)
    optimizer.step()
    return state, loss, zeropp.full_state(model), wrong


@pytest.mark.parametrize("placement", PLACED)
def test_an_average_equals_torchs(placement: str) -> None:
    model = build(RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    average.update_parameters(model)  # torch's begins with the first update, ours with the weights there are
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step, 4)
        optimizer.step()
        if step < 5:
            average.update_parameters(model)
    with torch.no_grad():
        expected = loss_of(average.module, 50, 0).item()
    for state, loss, trained, wrong in run_ranks(4, averaged, PLACED[placement], local_world_size=2):
        assert wrong == []
        assert_close(loss, expected, 1e-9, "loss")
        for name, value in average.module.state_dict().items():
            assert_close(state[name], value, 1e-9, name)
        for name, value in model.state_dict().items():
            assert_close(trained[name], value, 1e-9, name)


def only_saved(settings: dict[str, object]) -> list[int]:
    """Refreshes sent before, while and after an average is applied and only saved, and by the forward after that."""
    model = Routed()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    average = zeropp.ema(model)

    def sent() -> int:
        optimizer.engine.refresh.wait()
        return sum(row.calls for row in optimizer.engine.comm.ledger.rows if row.kind == "refresh")

    found = [sent()]
    with average.applied():
        zeropp.full_state(model)
        found.append(sent())
    found.append(sent())
    with torch.no_grad():
        model(torch.ones(2, 8))
    return [*found, sent()]


@pytest.mark.parametrize("placement", ["hpz", "persistent", "stage 1"])
def test_an_average_that_is_only_saved_renews_nothing_before_the_next_forward(placement: str) -> None:
    for before, inside, after, forward in run_ranks(4, only_saved, PLACED[placement], local_world_size=2):
        assert 0 < before == inside == after < forward


def unfrozen() -> list[str]:
    """An average of a model of which a part is unfrozen later."""
    model = Routed()
    model.blocks[1].requires_grad_(False)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    average = zeropp.ema(model, decay=0.5)
    plain = zeropp.full_state(model)
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(True)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        average.update()
        now = zeropp.full_state(model)
        if step == 2:
            plain.update({name: value for name, value in now.items() if name.startswith("blocks.1.")})
        plain = {name: 0.5 * plain[name] + 0.5 * value for name, value in now.items()}
    with average.applied():
        state = zeropp.full_state(model)
    return [name for name, value in plain.items() if not torch.allclose(state[name], value, atol=1e-6)]


def test_an_average_takes_in_what_is_unfrozen() -> None:
    assert run_ranks(2, unfrozen) == [[], []]


def refusals() -> list[str]:
    model = Routed()
    with pytest.raises(ValueError, match="decay is 1"):
        zeropp.ema(model, decay=1)
    with pytest.raises(ValueError, match="not managed by zeropp"):
        zeropp.ema(model)
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    said = []
    for use in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(RuntimeError) as caught:
            use(model)
        said.append(str(caught.value))
    return said


def test_a_copy_is_refused_with_what_works() -> None:
    for said in run_ranks(1, refusals, init=False):
        assert all("AveragedModel" in text and "zeropp.ema(model, decay)" in text for text in said)


# Norms, reports, attributes.


def normed(settings: dict[str, object], clip: float | None) -> tuple[dict[str, float], float | None, dict[str, float]]:
    model = build(RECIPE)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, make_config(**settings))
    backward(model, 0, None)
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    norms = optimizer.grad_norms()
    optimizer.step()
    return norms, optimizer.grad_norm, optimizer.grad_norms()


@pytest.mark.parametrize("placement", PLACED)
def test_norms_of_each_gradient(placement: str) -> None:
    model = build(RECIPE)
    backward(model, 0, 4)
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for norms, total, after in run_ranks(4, normed, PLACED[placement], None, local_world_size=2):
        assert norms.keys() == expected.keys() and after == norms
        assert_close(list(norms.values()), [expected[name] for name in norms], 1e-9, "norms")
        assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, total, 1e-9, "all together")
    for norms, _, _ in run_ranks(4, normed, PLACED[placement], 0.01, local_world_size=2):
        assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, 0.01, 1e-3, "clipped")


def partly() -> list[dict[str, float]]:
    """Of a model of which a block is not used, and inside windows."""
    model = Routed()
    config = make_config(gradient_accumulation_steps=2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    found = []
    for _ in range(3):
        model(torch.ones(2, 8), ((0,), (2,))).square().mean().backward()
        found.append(optimizer.grad_norms())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_norms_are_of_parameters_that_have_a_gradient() -> None:
    for first, whole, inside in run_ranks(2, partly):
        assert first == {} and inside == whole
        assert set(whole) == {f"blocks.{i}.lin.{part}" for i in (0, 2) for part in ("weight", "bias")}


class TwoDtypes(nn.Module):
    """One unit, two flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.linspace(-1, 1, 700))
        self.long = nn.Parameter(torch.linspace(-2, 1, 900, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return (self.short.square().sum() + 3 * self.long.square().sum()) / 2


def of_two_dtypes() -> tuple[int, dict[str, float]]:
    model = TwoDtypes()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model().backward()
    return len(optimizer.engine.trainable_buffers), optimizer.grad_norms()


def test_norms_of_a_unit_with_two_buffers() -> None:
    expected = {"short": TwoDtypes().short.norm().item(), "long": 3 * TwoDtypes().long.norm().item()}
    for buffers, norms in run_ranks(2, of_two_dtypes):
        assert buffers == 2 and norms == pytest.approx(expected, rel=1e-6)


def single() -> tuple[bool, list[str], int]:
    """Of a model of one parameter: whether there is an average of it, its state, units that have sent something."""
    model = nn.Linear(8, 8, bias=False)
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model(torch.ones(1, 8)).sum().backward()
    with zeropp.ema(model).applied():
        state = zeropp.full_state(model)
    return (
        torch.equal(state["weight"], zeropp.full_state(model)["weight"]),
        list(state),
        len(zeropp.comm_report(model).rows),
    )


def test_a_model_of_one_parameter_is_found_like_any_other() -> None:
    for same, names, rows in run_ranks(2, single):
        assert same and names == ["weight"] and rows > 0


class Odd(torch.optim.SGD):
    """With attributes of its own."""

    schedule = "cosine"

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.rounds = 3
        self._secret = 4

    def describe(self) -> str:
        return f"{self.schedule} {self.rounds}"


def attributes() -> list[str]:
    model, wrong = Routed(), []
    optimizer = zeropp.ZeroOptimizer(Odd(model.parameters(), lr=0.1), model, make_config())
    if (optimizer.rounds, optimizer.schedule, optimizer.describe()) != (3, "cosine", "cosine 3"):
        wrong.append("attributes")
    for name in ("_secret", "_step_supports_amp_scaling", "train", "eval", "nothing"):
        if hasattr(optimizer, name):
            wrong.append(name)
    if str(zeropp.comm_report(optimizer)) != str(zeropp.comm_report(model)):
        wrong.append("comm_report")
    try:
        zeropp.comm_report(optimizer.inner)
    except ValueError as error:
        if "give the ZeroOptimizer" not in str(error):
            wrong.append(str(error))
    else:
        wrong.append("a plain optimizer has a report")
    return wrong


def test_public_attributes_of_the_wrapped_optimizer_are_readable() -> None:
    assert run_ranks(2, attributes) == [[], []]


def scheduled_before() -> list[str]:
    """Warnings of a scheduler that was made for the optimizer before it was wrapped."""
    model = nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    return [str(each.message) for each in caught]


def test_a_scheduler_made_before_wrapping_sees_steps() -> None:
    assert run_ranks(2, scheduled_before) == [[], []]
