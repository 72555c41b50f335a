"""Learning rate schedules of DeepSpeed's JSON: rates at each iteration, resuming, and refused arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from zeropp.deepspeed.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(groups: int = 1, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind([{"params": [torch.zeros(1, requires_grad=True)], "lr": 0.1} for _ in range(groups)], lr=0.1)


def rates(make: Callable[[torch.optim.Optimizer], LRScheduler], count: int) -> list[float]:
    """Return the learning rates of the first ``count`` steps."""
    inner, found = optimizer(), []
    scheduler = make(inner)
    for _ in range(count):
        found.append(inner.param_groups[0]["lr"])
        inner.step()
        scheduler.step()
    return found


def test_the_first_two_steps_of_a_warm_up_have_its_first_rate() -> None:
    """As in DeepSpeed, iteration 0 comes after the first step."""
    found = rates(lambda o: WarmupLR(o, 0.0, 1.0, 4, "linear"), 8)
    assert found == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1, 1])


def test_a_logarithmic_warm_up() -> None:
    found = rates(lambda o: WarmupLR(o, 0.1, 1.1, 8), 10)
    assert found[0] == 0.1
    assert found[1:9] == pytest.approx([0.1 + math.log(i + 1) / math.log(8) for i in range(8)])
    assert found[9] == pytest.approx(1.1)


def test_the_largest_rate_is_the_group_s_own() -> None:
    assert rates(lambda o: WarmupLR(o, 0.0, None, 2, "linear"), 4)[-1] == pytest.approx(0.1)


def test_a_straight_line_down() -> None:
    found = rates(lambda o: WarmupDecayLR(o, 6.0, 0.0, 1.0, 2, "linear"), 11)  # JSON may have 6e0, which is a float
    assert found == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0])


def test_half_a_wave_down_stays_at_its_end() -> None:
    found = rates(lambda o: WarmupCosineLR(o, 6, 0.2, 2, 0.1, "linear"), 12)
    waves = [0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)]
    # Factors of the group's own learning rate, which is 0.1.
    assert found == pytest.approx([0.1 * part for part in [0.2, 0.2, 0.6, *waves, 0.1, 0.1, 0.1, 0.1, 0.1]])


@pytest.mark.parametrize(("stairs", "wanted"), [(False, [1, 1.25, 1.5, 1.75, 2]), (True, [1, 1, 1, 1, 2])])
def test_a_range_test(stairs: bool, wanted: list[float]) -> None:
    assert rates(lambda o: LRRangeTest(o, 1.0, 4, 1.0, stairs), 5) == pytest.approx(wanted)


def test_one_cycle_with_momentum_and_decay() -> None:
    """The rate rises for four steps and falls for two. Then the minimum rate is divided by 2, 3, ...."""
    inner = optimizer()
    scheduler = OneCycle(
        inner, 1.0, 3.0, decay_lr_rate=1.0, cycle_first_step_size=4, cycle_second_step_size=2, decay_step_size=1,
        decay_mom_rate=0.01,
    )  # fmt: skip
    found, momentums = [], []
    for _ in range(9):
        found.append(inner.param_groups[0]["lr"])
        momentums.append(inner.param_groups[0]["betas"][0])
        inner.step()
        scheduler.step()
    assert found == pytest.approx([1, 1.5, 2, 2.5, 3, 2, 1, 0.5, 1 / 3])
    wanted = [0.9, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.01, 0.9 * 1.02]
    assert momentums == pytest.approx(wanted)
    assert inner.param_groups[0]["betas"][1] == 0.999  # beta2 keeps the user's value
    assert scheduler.get_mom() == [inner.param_groups[0]["betas"]]


def test_one_cycle_in_stairs() -> None:
    found = rates(lambda o: OneCycle(o, 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2), 9)
    assert found == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])


def test_momentum_of_other_optimizers_stays() -> None:
    inner = optimizer(kind=torch.optim.SGD)
    scheduler = OneCycle(inner, 0.0, 1.0)
    inner.step()
    scheduler.step()
    assert inner.param_groups[0]["momentum"] == 0 and scheduler.get_mom() is None


MADE: dict[str, Callable[..., Any]] = {
    "WarmupLR": lambda o, **k: WarmupLR(o, 0.0, 1.0, 5, **k),
    "WarmupDecayLR": lambda o, **k: WarmupDecayLR(o, 12, 0.0, 1.0, 5, **k),
    "WarmupCosineLR": lambda o, **k: WarmupCosineLR(o, 12, 0.0, 5, **k),
    "OneCycle": lambda o, **k: OneCycle(o, 0.0, 1.0, cycle_first_step_size=4, **k),
    "LRRangeTest": lambda o, **k: LRRangeTest(o, 0.1, 3, **k),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("how", ["state", "number"])
def test_going_on_is_as_if_it_had_not_ended(name: str, how: str) -> None:
    whole = rates(MADE[name], 12)
    inner = optimizer()
    scheduler = MADE[name](inner)
    found = []
    for step in range(12):
        if step == 6:
            state, groups = scheduler.state_dict(), inner.state_dict()
            assert state == {"last_batch_iteration": 5}
            inner = optimizer()
            inner.load_state_dict(groups)
            scheduler = MADE[name](inner, **({"last_batch_iteration": 5} if how == "number" else {}))
            if how == "state":
                scheduler.load_state_dict(state)
                inner.load_state_dict(groups)  # a checkpoint loader may load in either order
        found.append(inner.param_groups[0]["lr"])
        inner.step()
        scheduler.step()
    assert found == pytest.approx(whole) and scheduler.get_last_lr() == [inner.param_groups[0]["lr"]]


def test_each_group_has_its_own() -> None:
    inner = optimizer(groups=2)
    scheduler = WarmupLR(inner, [0.0, 0.5], [1.0, 2.0], 2, "linear")
    assert scheduler.get_last_lr() == [0.0, 0.5]
    with pytest.raises(ValueError, match="warmup_min_lr has 3 numbers, and the optimizer 2 parameter groups"):
        WarmupLR(inner, [0.0, 0.5, 1.0])
    with pytest.raises(ValueError, match="warmup_min_lr is 'abc'; expected a number, or a list"):
        WarmupLR(inner, "abc")  # type: ignore[arg-type]


def test_a_rate_in_a_tensor_stays_one() -> None:
    inner = optimizer()
    inner.param_groups[0]["lr"] = own = torch.tensor(0.1)
    scheduler = WarmupLR(inner, 0.0, 1.0, 2, "linear")
    for _ in range(3):
        inner.step()
        scheduler.step()
    assert inner.param_groups[0]["lr"] is own and float(own) == 1.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=0), "warmup_num_steps is 0; expected a whole number above 0"),
        (lambda o: WarmupLR(o, warmup_num_steps=2.5), "warmup_num_steps is 2.5; expected a whole number above 0"),
        (lambda o: WarmupLR(o, warmup_num_steps=True), "warmup_num_steps is True"),
        (lambda o: WarmupLR(o, warmup_type="cubic"), "warmup_type is 'cubic'"),
        (lambda o: WarmupDecayLR(o, 1.5), "total_num_steps is 1.5"),
        (lambda o: WarmupCosineLR(o, 0), "total_num_steps is 0"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "lr_range_test_step_size is 0"),
        (lambda o: OneCycle(o, 0.0, 1.0, cycle_first_step_size=0), "cycle_first_step_size is 0"),
        (lambda o: OneCycle(o, 0.0, [1.0, 2.0]), "cycle_max_lr has 2 numbers"),
    ],
)
def test_unusable_schedule_arguments_are_refused(make: Callable[[torch.optim.Optimizer], object], told: str) -> None:
    inner = optimizer()
    with pytest.raises(ValueError, match=told):
        make(inner)
    assert inner.param_groups[0]["lr"] == 0.1
