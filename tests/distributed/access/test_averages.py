"""zeropp.ema equals torch's AveragedModel, includes unfrozen parameters, and refuses training while it is applied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.default_recipe import PLACED, RECIPE, backward, loss_of
from tests.support.parity import assert_close, build
from tests.support.rank_pool import run_ranks


def averaged(settings: dict[str, object]) -> tuple[Any, ...]:
    """Train five steps with an average, and apply, save and resume the average.

    Returns:
        The averaged state dict, the loss with averaged weights, the trained state dict after one more step, and a list
        of errors.
    """
    model, wrong = build(RECIPE), []
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model, make_config(**settings))
    average = zeropp.ema(model, decay=0.8)
    sent = None
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step, None)
        optimizer.step()
        # Wait, so that the bytes of the step's own refresh are not counted as bytes of the update.
        optimizer.engine.wait_for_refresh()
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
    with pytest.raises(ValueError, match="each rank must load the state that it saved"):
        again.load_state_dict({**saved, "pieces": saved["pieces"][1:]})
    optimizer.zero_grad()
    backward(model, 5, None)
    optimizer.step()
    return state, loss, zeropp.full_state(model), wrong


@pytest.mark.every(12)
@pytest.mark.parametrize("placement", PLACED)
def test_an_average_equals_torchs(placement: str) -> None:
    model = build(RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    # torch's average starts at its first update, zeropp's at the weights when ema() is called.
    average.update_parameters(model)
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
    """Apply an average in order to save it, without a forward inside.

    Returns:
        Total number of refresh collectives so far: before the average is applied, inside, after it is removed, and
        after the next forward.
    """
    model = Routed()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    average = zeropp.ema(model)

    def sent() -> int:
        optimizer.engine.wait_for_refresh()
        return sum(row.calls for row in optimizer.engine.comm.ledger.rows if row.kind == "refresh")

    found = [sent()]
    with average.applied():
        zeropp.full_state(model)
        found.append(sent())
    found.append(sent())
    with torch.no_grad():
        model(torch.ones(2, 8))
    return [*found, sent()]


@pytest.mark.every(5)
@pytest.mark.parametrize("placement", ["hpz", "persistent", "stage 1"])
def test_an_average_that_is_only_saved_renews_nothing_before_the_next_forward(placement: str) -> None:
    for before, inside, after, forward in run_ranks(4, only_saved, PLACED[placement], local_world_size=2):
        assert 0 < before == inside == after < forward


def unfrozen() -> list[str]:
    """Update an average while a frozen block is unfrozen at step 2.

    Returns:
        Names of parameters whose average differs from one computed from full_state. A block's average starts with its
        weights at the first update after unfreezing.
    """
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


def test_an_average_includes_unfrozen_parameters() -> None:
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


def test_copying_the_model_is_refused_with_the_remedy() -> None:
    for said in run_ranks(1, refusals, init=False):
        assert all("AveragedModel" in text and "zeropp.ema(model, decay)" in text for text in said)
