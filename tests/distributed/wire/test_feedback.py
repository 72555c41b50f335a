"""Error feedback adds the quantization error of a gradient to the next one, so sums over steps lose almost nothing."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.quantized_model import GRADIENTS, WEIGHTS, bound, tokens, wrapped
from tests.support.rank_pool import run_ranks, some

STEPS = 16


class Slopes(nn.Module):
    """A model whose gradients are its inputs, the same at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(60, 50)), nn.Parameter(torch.zeros(700))

    def forward(self, slopes: list[Tensor]) -> Tensor:
        return (self.matrix * slopes[0]).sum() + (self.vector * slopes[1]).sum()


def slopes(rank: int) -> list[Tensor]:
    """Return the gradients of a rank: of the matrix and of the vector."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(60, 50, generator=generator), torch.randn(700, generator=generator)]


def averaged(settings: dict[str, object]) -> dict[str, Tensor]:
    """Return the mean over steps of each gradient as SGD received it."""
    model = Slopes()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, make_config(**settings))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(slopes(dist.get_rank())).backward()
        optimizer.step()
    return {name: value / -STEPS for name, value in zeropp.full_state(model).items()}


@pytest.mark.every(5)
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"feedback": "both"},
        {"gradient_bits": {"local": 4, "cross": 4}, "feedback": "both"},
        {"mics_shard_size": 2},
        {"zeropp_loco_param": None},
    ],
    ids=str,
)
def test_over_steps_only_the_last_error_is_lost(settings: dict[str, Any], beta: float) -> None:
    """The errors of all steps add up to ``e / (1 - beta)``, where e is the stored error after the last step.

    The stored error itself is rounded to 8 bits, so each step loses up to 1/254 of it. Without feedback, errors exceed
    this bound.
    """
    bits = (4, 4) if "gradient_bits" in settings else (8, 4)
    zero = {**GRADIENTS, "zeropp_loco_param": {"err_beta": beta}, **settings}
    plain = [dict(zip(("matrix", "vector"), slopes(rank), strict=True)) for rank in range(4)]
    for found in run_ranks(4, averaged, zero, local_world_size=2):
        for name, value in found.items():
            mean = torch.stack([each[name] for each in plain]).mean(0)
            error, both = float((value - mean).abs().max()), bound(plain, name, 2, bits)
            carried = both * (1 / STEPS + 1 / 254) / (1 - beta)
            # By default intra-node hops have no feedback. MiCS gathers the sums to its replicas in 8 bits, also without
            # feedback.
            rest = 0.0 if settings.get("feedback") == "both" else bound(plain, name, 2, (8, 0))
            if "mics_shard_size" in settings:
                rest += float(mean.abs().max()) * 0.51 / 127
            held = error <= carried + rest
            assert held is (zero["zeropp_loco_param"] is not None), f"{name}: {error}, {carried} and {rest} carried"


def carried(settings: dict[str, object], steps: int) -> list[tuple[int, list[bool]]]:
    """Train, and return after each step the counted steps and, for each stored error, True if it is not zero."""
    model, optimizer = wrapped(make_config(**settings), 0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            optimizer.backward(model(tokens(10 * step + micro, dist.get_rank())))
        optimizer.step()
        saved = optimizer.state_dict()["zeropp"]["carried"]
        found.append((saved["steps"], [bool(error.any()) for error in saved["errors"].values()]))
    return found


@pytest.mark.parametrize("feedback", some(["both", "cross"], 2))
def test_errors_are_cleared_by_steps_and_all_at_once(feedback: str) -> None:
    """With ``reset_T`` 3 all errors are cleared after every third step, not after micro-batches."""
    settings = {**GRADIENTS, "zeropp_loco_param": {"reset_T": 3}, "feedback": feedback}
    settings["gradient_accumulation_steps"] = 2
    for found in run_ranks(4, carried, settings, 7, local_world_size=2):
        assert [steps for steps, _ in found] == [1, 2, 0, 1, 2, 0, 1]
        for steps, errors in found:
            assert errors and all(error is (steps > 0) for error in errors)


def trained_with(settings: dict[str, object], factors: list[float]) -> dict[str, Tensor]:
    """Train with the loss multiplied by each factor, and return the weights. A NaN loss is not followed by a step."""
    model, optimizer = wrapped(make_config(**settings), 1e-3)
    for factor in factors:
        optimizer.zero_grad()
        (model(tokens(int(factor == 1.0), dist.get_rank())) * factor).backward()
        if math.isfinite(factor):
            optimizer.step()
    return zeropp.full_state(model)


@pytest.mark.parametrize("feedback", some(["both", "cross"], 2))
def test_cleared_errors_stay_cleared_after_a_non_finite_gradient(feedback: str) -> None:
    """A NaN gradient between the clearing and the next step must not bring the cleared errors back."""
    settings = {**GRADIENTS, "zeropp_loco_param": {"reset_T": 1}, "feedback": feedback}
    without, found = (
        run_ranks(4, trained_with, settings, factors, local_world_size=2)
        for factors in ([64.0, 1.0], [64.0, math.nan, 1.0])
    )
    for one, other in zip(without, found, strict=True):
        assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def thrown_away(settings: dict[str, object], how: str | None, size: float) -> dict[str, Tensor]:
    """Train six steps, of which one discards a gradient that is NaN on rank 1.

    Args:
        settings: keys for ``make_config``.
        how: "skipped" if the optimizer skips the step, "by GradScaler" if GradScaler does, "forgotten" if no step is
            called. None to clear the errors instead of running the step.
        size: factor on the loss of all other ranks in this step.

    Returns:
        The weights after the last step.
    """
    model, optimizer = wrapped(make_config(**settings), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=how == "by GradScaler")
    for step in range(6):
        if step == 3:
            if how is None:
                optimizer.error_feedback.clear()
                continue
            factor = math.nan if dist.get_rank() == 1 else size
            scaler.scale(model(tokens(99, dist.get_rank())) * factor).backward()
            if how == "skipped":
                optimizer.step()
                assert optimizer.step_was_skipped
            elif how == "by GradScaler":
                scaler.step(optimizer)
                scaler.update()
        else:
            model(tokens(step, dist.get_rank())).backward()
            optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state(model)


def left_behind(settings: dict[str, object]) -> list[str]:
    """Return names of the weights that differ between a run with discarded gradients and one with cleared errors."""
    cleared, wrong = thrown_away(settings, None, 1.0), []
    for how, size in (("skipped", 1e8), ("forgotten", 1.0), ("by GradScaler", 1e8)):
        found = thrown_away(settings, how, size)
        wrong += [f"{how} {size} {name}" for name, value in found.items() if not torch.equal(value, cleared[name])]
    return wrong


@pytest.mark.parametrize("feedback", some(["both", "cross"], 2))
def test_gradients_that_no_step_takes_leave_nothing_behind(feedback: str) -> None:
    """The errors of a gradient scaled by 1e8 would be larger than the next gradient by orders of magnitude."""
    settings = {**GRADIENTS, "zeropp_loco_param": {}, "feedback": feedback}
    assert run_ranks(4, left_behind, settings, local_world_size=2) == [[]] * 4


def loaded_inside_a_window(settings: dict[str, object]) -> bool:
    """Load a state after a backward, which discards that backward's gradient.

    Returns:
        True if the loaded errors are not zero and are kept.
    """
    model, optimizer = wrapped(make_config(**settings), 0.1)
    model(tokens(0, dist.get_rank())).backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.zero_grad()
    model(tokens(1, dist.get_rank())).backward()
    optimizer.load_state_dict(state)
    again, before = optimizer.state_dict()["zeropp"]["carried"]["errors"], state["zeropp"]["carried"]["errors"]
    return any(error.any() for error in before.values()) and all(
        torch.equal(again[name], before[name]) for name in again
    )


def test_errors_that_are_loaded_stay_where_gradients_are_forgotten() -> None:
    """Discarding gradients clears their errors; the clearing must come before the load."""
    assert run_ranks(2, loaded_inside_a_window, {**GRADIENTS, "zeropp_loco_param": {}}) == [True] * 2


def resumed(settings: dict[str, object]) -> list[str]:
    """Return weights and step counts that differ between a run and one that was saved and loaded after three steps."""
    config = make_config(**settings)

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(tokens(step, dist.get_rank())).backward()
            optimizer.step()

    model, optimizer = wrapped(config, 0.1)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    train(model, optimizer, range(3, 5))
    other, again = wrapped(config, 0.1)
    train(other, again, range(7, 8))
    again.load_state_dict(state)
    train(other, again, range(3, 5))
    expected = zeropp.full_state(model)
    wrong = [name for name, value in zeropp.full_state(other).items() if not torch.equal(value, expected[name])]
    counted = [each.state_dict()["zeropp"]["carried"]["steps"] for each in (optimizer, again)]
    return wrong + [f"steps are {counted}"] * (counted != [5, 5])


@pytest.mark.parametrize("settings", some([{"feedback": "both", "hadamard": True}, {}], 2), ids=str)
def test_a_resumed_run_carries_its_errors_on(settings: dict[str, object]) -> None:
    whole = {**WEIGHTS, **GRADIENTS, "zeropp_loco_param": {}, **settings}
    assert run_ranks(4, resumed, whole, local_world_size=2) == [[]] * 4


def scaled(settings: dict[str, object], init: float | None) -> dict[str, Tensor]:
    """Train with losses scaled by GradScaler.

    Args:
        settings: keys for ``make_config``.
        init: first scale, which doubles every second step; None for no scaling.

    Returns:
        The weights after seven steps.
    """
    model, optimizer = wrapped(make_config(**settings), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=init or 1.0, growth_interval=2, enabled=init is not None)
    optimizer.grad_scaler = scaler
    for step in range(7):
        optimizer.zero_grad()
        scaler.scale(model(tokens(step, dist.get_rank()))).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 3:  # the scale has doubled after the last step
            optimizer.load_state_dict(optimizer.state_dict())
    assert init is None or scaler.get_scale() == init * 8
    return zeropp.full_state(model)


@pytest.mark.parametrize("feedback", some(["both", "cross"], 2))
def test_a_changing_loss_scale_does_not_change_stored_errors(feedback: str) -> None:
    """Scaling by powers of two is exact, so weights have the bits of a run without scaling."""
    settings = {**GRADIENTS, "zeropp_loco_param": {}, "feedback": feedback}
    plain = run_ranks(4, scaled, settings, None, local_world_size=2)
    for found, expected in zip(run_ranks(4, scaled, settings, 4.0, local_world_size=2), plain, strict=True):
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def steps_carried(settings: dict[str, object]) -> list[int]:
    """Return the number of steps since the errors were cleared, three times.

    They are the numbers after two steps with a GradScaler, after one step without, and after one with another
    GradScaler.
    """
    model, optimizer = wrapped(make_config(**settings), 0.01)
    found = []
    for scaler, steps in ((torch.amp.GradScaler("cpu"), 2), (None, 1), (torch.amp.GradScaler("cpu"), 1)):
        optimizer.grad_scaler = scaler
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(tokens(step, dist.get_rank()))
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        found.append(optimizer.state_dict()["zeropp"]["carried"]["steps"])
    return found


def test_errors_of_scaled_losses_are_cleared_where_nobody_scales_any_more() -> None:
    """Without a scaler, the scale of the next losses is unknown, so errors of scaled losses cannot be rescaled."""
    settings = {**GRADIENTS, "zeropp_loco_param": {}}
    assert run_ranks(2, steps_carried, settings) == [[2, 1, 2]] * 2


def old_state(settings: dict[str, object]) -> bool:
    """Load a state without errors, and return True if that gives a warning."""
    _model, optimizer = wrapped(make_config(**settings), 0.1)
    state = optimizer.state_dict()
    del state["zeropp"]["carried"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state)
    return any("carried errors" in str(each.message) for each in caught)


def warned(settings: dict[str, object], changed: dict[str, object]) -> list[str]:
    """Load the state of a run into a run with other settings.

    If there is a warning, all errors must be zero afterwards, and otherwise not.

    Returns:
        The first 14 characters of each warning.
    """
    model, optimizer = wrapped(make_config(**settings), 0.1)
    model(tokens(0, dist.get_rank())).backward()
    optimizer.step()
    _, other = wrapped(make_config(**{**settings, **changed}), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(optimizer.state_dict())
    carried = other.state_dict()["zeropp"]["carried"]["errors"].values()
    assert any(error.any() for error in carried) is not bool(caught)
    return [str(each.message)[:14] for each in caught]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "changed", [{}, {"hadamard": True}, {"feedback": "both"}, {"gradient_bits": {"local": 8, "cross": 8}}], ids=str
)
def test_errors_of_other_codecs_are_not_taken_over(changed: dict[str, object]) -> None:
    """An error is stored in the layout of its codec, so it fits no other codec."""
    settings = {**GRADIENTS, "zeropp_loco_param": {}}
    expected = ["carried errors"] if changed else []
    assert run_ranks(4, warned, settings, changed, local_world_size=2) == [expected] * 4


def test_a_state_that_carries_nothing_loads() -> None:
    """A run with error feedback warns, because it expects errors."""
    assert run_ranks(2, old_state, {}) == [False] * 2
    assert run_ranks(2, old_state, {**GRADIENTS, "zeropp_loco_param": {}}) == [True] * 2


def lost_on_one(settings: dict[str, object], change: str, who: int) -> tuple[int, bool, str]:
    """Load a state that is incomplete or from another step on one of two ranks.

    Args:
        settings: keys for ``make_config``.
        change: "lost" without errors, "age" with another number of steps, "of no unit" with an empty set of errors.
        who: the rank.

    Returns:
        Counted steps after loading, True if any error is not zero, and the text of the warning.
    """
    model, optimizer = wrapped(make_config(**settings), 0.1)
    model(tokens(0, dist.get_rank())).backward()
    optimizer.step()
    state = optimizer.state_dict()
    if dist.get_rank() == who and change == "lost":
        del state["zeropp"]["carried"]
    elif dist.get_rank() == who and change == "age":
        state["zeropp"]["carried"]["steps"] += 1
    elif dist.get_rank() == who:
        state["zeropp"]["carried"]["errors"] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state)
    carried = optimizer.state_dict()["zeropp"]["carried"]
    return carried["steps"], any(error.any() for error in carried["errors"].values()), str(caught[0].message)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "who", "cause"),
    [
        ("lost", 1, "of ranks [1] do not fit"),
        ("age", 1, "differ in step counts"),
        ("of no unit", 0, "of ranks [0] do not fit"),
        ("of no unit", 1, "of ranks [1] do not fit"),
    ],
)
def test_errors_that_one_rank_has_lost_begin_anew_on_all(change: str, who: int, cause: str) -> None:
    """All ranks must count the same steps, because they clear errors at the same step."""
    settings = {**GRADIENTS, "zeropp_loco_param": {}}
    for steps, anything, said in run_ranks(2, lost_on_one, settings, change, who):
        assert (steps, anything) == (0, False) and cause in said, said


class Unequal(nn.Module):
    """A unit of two parameters: ``huge`` has a large gradient and is not always used, ``small`` has a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.huge, self.small = nn.Parameter(torch.zeros(700)), nn.Parameter(torch.zeros(900))

    def forward(self, slopes: Tensor, with_huge: bool) -> Tensor:
        loss = (self.small * slopes[:900]).sum()
        return loss + (self.huge * slopes[900:]).sum() * 1e4 if with_huge else loss


def left_alone(settings: dict[str, Any], frozen: bool) -> list[tuple[float, float, float]]:
    """Train with ``huge`` used or trained in the first two steps only.

    Args:
        settings: keys for ``make_config``.
        frozen: True to freeze ``huge`` after two steps; False to leave it unused.

    Returns:
        For each later step, the norm before clipping, the change of ``small``, and the change of ``huge``.
    """
    model = Unequal()
    config = make_config(**settings, gradient_clipping=1.0)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for step in range(5):
        if frozen and step == 2:
            model.huge.requires_grad_(False)
        optimizer.zero_grad()
        model(torch.randn(1600, generator=generator), step < 2).backward()
        before = zeropp.full_state(model)
        optimizer.step()
        moved = {name: value - before[name] for name, value in zeropp.full_state(model).items()}
        found.append((float(optimizer.grad_norm), float(moved["small"].norm()), float(moved["huge"].norm())))
    return found[2:]


@pytest.mark.every(4)
@pytest.mark.parametrize("frozen", [False, True], ids=["unused", "frozen"])
@pytest.mark.parametrize("settings", [{}, {"feedback": "both"}, {"stage": 1}, {"hadamard": True}], ids=str)
def test_stored_errors_of_a_parameter_without_gradient_are_no_gradient(settings: dict[str, Any], frozen: bool) -> None:
    """Stored errors of ``huge`` must not count as a gradient.

    They would be much larger than the gradient of ``small``, and clipping would scale that gradient to almost zero.
    """
    zero = {**GRADIENTS, "zeropp_loco_param": {}, **settings}
    plain = [torch.Generator().manual_seed(rank) for rank in range(4)]
    means = [torch.stack([torch.randn(1600, generator=each) for each in plain]).mean(0)[:900] for _ in range(5)]
    for found in run_ranks(4, left_alone, zero, frozen, local_world_size=2):
        for (norm, small, huge), mean in zip(found, means[2:], strict=True):
            assert norm == pytest.approx(float(mean.norm()), rel=0.2)
            assert small == pytest.approx(1.0, rel=1e-3)
            assert huge == 0.0
