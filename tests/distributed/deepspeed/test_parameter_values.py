"""``safe_get_full_grad`` and related functions agree with plain torch, called between backward and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.gathered_model import data
from tests.support.model_and_twin import PLACES, TOLERANCE, Both, far, trained
from tests.support.rank_pool import run_ranks, some
from zeropp import training


def read(settings: dict[str, Any], folder: str) -> dict[str, float]:
    """Compare weights, gradients and states with plain torch's over two steps.

    Args:
        settings: configuration of the placement.
        folder: folder for offloaded files.

    Returns:
        The largest difference of each kind of value.
    """
    both = Both(settings, folder)
    worst: dict[str, float] = {}

    def note(what: str, distance: float) -> None:
        worst[what] = max(worst.get(what, 0.0), distance)

    for number in range(2):
        both.backward()
        for _, mine, plain in both.pairs():
            note("weights", far(training.safe_get_full_fp32_param(mine), trained(plain)))
            note("gradients", far(training.safe_get_full_grad(mine), plain.grad))
            for key in ("exp_avg", "exp_avg_sq"):
                wanted = both.plain_optimizer.state.get(plain, {}).get(key)
                note(key, far(training.safe_get_full_optimizer_state(mine, key), wanted))
            local = training.safe_get_local_grad(mine)
            assert (local is None) == (plain.grad is None)
        if number == 0:
            assert training.safe_get_full_optimizer_state(both.pairs()[0][1], "exp_avg") is None
        both.step()
        # Read right after step(): the call must wait for an optimizer that still steps on the host.
        for _, mine, plain in both.pairs():
            note("weights", far(training.safe_get_full_fp32_param(mine), trained(plain)))
    return worst


@pytest.mark.parametrize("name", some(sorted(PLACES, key="hpz".__ne__), 20))
def test_values_are_plain_torchs(name: str, tmp_path: Path) -> None:
    for worst in run_ranks(4, read, PLACES[name], str(tmp_path), local_world_size=2):
        assert worst.keys() == {"weights", "gradients", "exp_avg", "exp_avg_sq"}
        assert max(worst.values()) < TOLERANCE, worst


def written(settings: dict[str, Any], folder: str, local: bool) -> float:
    """Multiply weights, gradients and momenta by a factor per parameter, and train on.

    Args:
        settings: configuration of the placement.
        folder: folder for offloaded files.
        local: True to use the functions for this rank's part.

    Returns:
        Largest difference of weights from plain torch.
    """
    both = Both(settings, folder)
    both.backward()
    both.step()
    both.backward()
    for factor, (_, mine, plain) in enumerate(both.pairs(), 2):
        if plain.grad is None:
            continue
        change(mine, 1 / factor, local=local)
        with torch.no_grad():
            plain.mul_(1 / factor)
            plain.grad.mul_(1 / factor)
            both.plain_optimizer.state[plain]["exp_avg"].mul_(1 / factor)
    both.step()
    out = both.model(data(50, 0)), both.plain(data(50, 0))
    both.optimizer.zero_grad()
    both.plain_optimizer.zero_grad()
    assert far(*[each.detach() for each in out]) < TOLERANCE
    return max(far(training.safe_get_full_fp32_param(mine), trained(plain)) for _, mine, plain in both.pairs())


def change(parameter: nn.Parameter, factor: float, *, local: bool) -> None:
    if local:
        for get, put in (
            (training.safe_get_local_fp32_param, training.safe_set_local_fp32_param),
            (training.safe_get_local_grad, training.safe_set_local_grad),
        ):
            value = get(parameter)
            assert value is not None
            put(parameter, value * factor)
        state = training.safe_get_local_optimizer_state(parameter, "exp_avg")
        assert state is not None
        training.safe_set_local_optimizer_state(parameter, state * factor, "exp_avg")
        return
    weight, gradient = training.safe_get_full_fp32_param(parameter), training.safe_get_full_grad(parameter)
    state = training.safe_get_full_optimizer_state(parameter, "exp_avg")
    assert weight is not None and gradient is not None and state is not None
    training.safe_set_full_fp32_param(parameter, weight * factor)
    training.safe_set_full_grad(parameter, gradient * factor)
    training.safe_set_full_optimizer_state(parameter, state * factor, "exp_avg")


SET = [("in files", False), ("mics", True)]  # the default run; other rows run in the campaign
SET_RARELY = [(name, local) for name in PLACES for local in (False, True) if "micro" not in name]
SET_ROWS = [*SET, *(pytest.param(*row, marks=pytest.mark.campaign) for row in SET_RARELY if row not in SET)]


@pytest.mark.parametrize(("name", "local"), SET_ROWS)
def test_values_that_are_set_are_used_in_training(name: str, local: bool, tmp_path: Path) -> None:
    assert max(run_ranks(4, written, PLACES[name], str(tmp_path), local, local_world_size=2)) < TOLERANCE


def noisy(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]] | str:
    """Set a gradient drawn by each rank for itself, and take a step with a learning rate of 1.

    Returns:
        The change of each weight and the drawn gradient, or the error.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    config = make_config(stage=stage)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, config)
    optimizer.backward(model(torch.ones(2, 5)).mean())
    torch.manual_seed(1 + dist.get_rank())
    drawn = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    before = zeropp.full_state(model)
    try:
        for name, parameter in model.named_parameters():
            training.safe_set_full_grad(parameter, drawn[name])
    except ValueError as error:
        return str(error)
    optimizer.step()
    after = zeropp.full_state(model)
    return {name: before[name] - after[name] for name in after}, drawn


def test_each_rank_may_draw_noise_of_its_own() -> None:
    """In stage 3 every element moves by the gradient that one of the ranks drew. Both ranks have the same weights."""
    (moved, first), (same, second) = run_ranks(2, noisy, 3)
    for name, by in moved.items():
        assert torch.equal(by, same[name])
        near = [(by - drawn[name]).abs() < 1e-6 for drawn in (first, second)]
        assert (near[0] | near[1]).all()
    assert any(not (by - first[name]).abs().lt(1e-6).all() for name, by in moved.items())
    # In stage 0 each rank has a copy of all weights. Different gradients would make the copies differ, so they are
    # refused.
    assert all("other values for" in found for found in run_ranks(2, noisy, 0))


def refused() -> list[str]:
    both = Both({}, "")
    parameter, messages = both.pairs()[0][1], []
    frozen = both.model.blocks[1].lin.weight
    plain = nn.Parameter(torch.ones(2))
    assert training.safe_get_full_fp32_param(plain) is None and training.safe_get_full_grad(plain) is None
    assert training.safe_get_full_grad(parameter) is None and training.safe_get_local_grad(frozen) is None
    for call in (
        lambda: training.safe_set_full_fp32_param(plain, plain.detach()),
        lambda: training.safe_set_full_fp32_param(parameter, torch.ones(3)),
        lambda: training.safe_set_full_fp32_param(parameter, torch.full(parameter.shape, float(dist.get_rank()))),
        lambda: training.safe_set_full_grad(parameter, torch.zeros(parameter.shape)),
        lambda: training.safe_set_full_optimizer_state(parameter, torch.zeros(parameter.shape), "exp_avg"),
        lambda: training.safe_set_local_fp32_param(parameter, torch.zeros(1 + dist.get_rank() * 10_000)),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_values_that_cannot_be_set_are_refused_on_every_rank() -> None:
    for found in run_ranks(2, refused):
        wanted = ["does not manage", "of shape", "other values for", "no rank has a gradient", "no state 'exp_avg'"]
        assert all(part in message for part, message in zip(wanted, found, strict=False))
        assert "local values of another size" in found[5]


def inside_a_window() -> str:
    both = Both({"gradient_accumulation_steps": 2}, "")
    both.optimizer.backward(both.model(data(0, 0)).square().mean())
    with pytest.raises(RuntimeError) as caught:
        training.safe_get_full_grad(both.pairs()[0][1])
    return str(caught.value)


def test_inside_a_window_gradients_are_not_complete() -> None:
    for message in run_ranks(2, inside_a_window):
        assert "ask after the last one" in message


def forgotten() -> list[bool]:
    """Return True for each parameter whose state reads as None after its entry is deleted, and not before."""
    both = Both({}, "")
    both.backward()
    both.step()
    found = []
    for _, mine, plain in both.pairs():
        if plain in both.plain_optimizer.state:
            before = training.safe_get_full_optimizer_state(mine, "exp_avg")
            del both.optimizer.state[mine]
            found.append(before is not None and training.safe_get_full_optimizer_state(mine, "exp_avg") is None)
    return found


def test_a_state_that_was_forgotten_is_none() -> None:
    for found in run_ranks(2, forgotten):
        assert found and all(found)


def in_16_bits() -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a gradient and a state, if main weights, gradients and states are bf16."""
    block = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(bf16=block))
    optimizer.backward(model(torch.ones(2, 5, dtype=torch.bfloat16)).float().mean())
    gradient = training.safe_get_full_grad(model.weight)
    optimizer.step()
    state = training.safe_get_full_optimizer_state(model.weight, "exp_avg")
    assert gradient is not None and state is not None
    return gradient.dtype, state.dtype


def test_values_have_the_dtype_that_they_are_kept_in() -> None:
    assert run_ranks(2, in_16_bits) == [(torch.bfloat16, torch.bfloat16)] * 2
