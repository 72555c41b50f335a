"""The five learning rate schedules that DeepSpeed's JSON names, as torch schedulers.

They count iterations from -1, which is how things are before the first step; `step()` after the first optimizer step
makes it iteration 0. So the first two steps of a schedule are taken with the rate that it begins with, as in DeepSpeed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["SCHEDULERS", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

PerGroup = float | Sequence[float]
"""A number for all parameter groups, or one for each."""


class _Schedule(LRScheduler):
    """A schedule whose rates follow from the number of an iteration.

    Args:
        optimizer: whose groups get the rates.
        last_batch_iteration: to go on from; -1 begins.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            # torch asks for it where a schedule goes on.
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The iteration whose rates are set."""
        # torch's own numbers begin with 0 when a schedule is made.
        return int(self.last_epoch) - 1

    @abstractmethod
    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration, from -1 on."""

    def get_lr(self) -> list[Any]:
        """Rates of the groups at this iteration."""
        return self.rates(self.last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Go to the next iteration, or to a given one."""
        if epoch is not None:
            self.last_epoch = epoch  # one more is added to it below
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """The number of the iteration, as DeepSpeed's schedules have it; all else is the configuration's."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a number; rates stay, since optimizers have saved theirs."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._last_lr = list(self.rates(self.last_batch_iteration))


class LRRangeTest(_Schedule):
    """Rates that grow from a least one, to find out which are too large (Smith, arXiv:1803.09820).

    Args:
        optimizer: whose groups get the rates.
        lr_range_test_min_lr: the first rate.
        lr_range_test_step_size: iterations in which a rate grows by ``lr_range_test_step_rate`` times the first.
        lr_range_test_step_rate: see there.
        lr_range_test_staircase: grow at once at the end of so many iterations.
        last_batch_iteration: to go on from; -1 begins.

    Raises:
        ValueError: a number is out of range, or a list is not as long as that of the groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.step_size = _count("lr_range_test_step_size", lr_range_test_step_size)
        self.min_lr = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See :class:`_Schedule`."""
        steps = (iteration + 1) / self.step_size
        if self.staircase:
            steps = math.floor(steps)
        return [least * (1 + self.step_rate * steps) for least in self.min_lr]


class OneCycle(_Schedule):
    """One rise and fall of the rate, and its decay afterwards; momentum falls and rises (Smith, arXiv:1803.09820).

    Args:
        optimizer: whose groups get rates and momentum.
        cycle_min_lr: rate at both ends of the cycle.
        cycle_max_lr: rate in the middle.
        decay_lr_rate: after the cycle the rate is ``cycle_min_lr / (1 + decay_lr_rate * n)`` after n times
            ``decay_step_size`` iterations.
        cycle_first_step_size: iterations of the rise.
        cycle_second_step_size: of the fall; None for as many.
        cycle_first_stair_count: in so many stairs; 0 for none.
        cycle_second_stair_count: likewise for the fall; None for as many.
        decay_step_size: iterations; 0 leaves out the decay.
        cycle_momentum: whether to change the first of an Adam's ``betas``; those of other optimizers stay.
        cycle_min_mom: momentum in the middle of the cycle.
        cycle_max_mom: at both ends.
        decay_mom_rate: after the cycle it is ``cycle_max_mom * (1 + decay_mom_rate * n)``.
        last_batch_iteration: to go on from; -1 begins.

    Raises:
        ValueError: a number is out of range, or a list is not as long as that of the groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0 or decay_step_size < 0:
            raise ValueError(
                f"cycle_first_step_size is {cycle_first_step_size}, cycle_second_step_size {second}, decay_step_size "
                f"{decay_step_size}; expected the first to be above 0, and the others at least 0"
            )
        self.first_size = cycle_first_step_size
        self.total_size = cycle_first_step_size + second
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = self.first_stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        # Of the others DeepSpeed says that it leaves them, too.
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See :class:`_Schedule`."""
        # One cycle, and then the decay: it does not begin again.
        if iteration >= self.total_size:
            return [least / (1 + self.decay_lr_rate * self._decays(iteration)) for least in self.min_lrs]
        height = self._height(iteration)
        return [least + (most - least) * height for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def momentums(self, iteration: int) -> list[float]:
        """The momentum of each group at an iteration."""
        if iteration >= self.total_size:
            return [most * (1 + self.decay_mom_rate * self._decays(iteration)) for most in self.max_moms]
        height = self._height(iteration)
        return [most - (most - least) * height for least, most in zip(self.min_moms, self.max_moms, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The ``betas`` of each group; None where they stay."""
        return [group["betas"] for group in self.optimizer.param_groups] if self.cycle_momentum else None

    def step(self, epoch: int | None = None) -> None:
        """Go to the next iteration, or to a given one."""
        super().step(epoch)
        if self.cycle_momentum:
            momentums = self.momentums(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
                group["betas"] = (momentum, *group["betas"][1:])

    def _decays(self, iteration: int) -> float:
        return (iteration - self.total_size + 1) / self.decay_size if self.decay_size else 0.0

    def _height(self, iteration: int) -> float:
        """The height in the cycle, from 0 to 1."""
        # The step before the first one, -1, is at the bottom.
        done = (iteration + 1) % self.total_size
        rises = done <= self.first_size
        left, size = (done, self.first_size) if rises else (self.total_size - done, self.total_size - self.first_size)
        stairs = self.first_stairs if rises else self.second_stairs
        # By whole numbers first: a quotient just below a stair would come out one lower.
        return math.floor(left * stairs / size) / stairs if stairs else left / size


class WarmupLR(_Schedule):
    """Rates that rise to the largest one, and stay there.

    Args:
        optimizer: whose groups get the rates.
        warmup_min_lr: to begin with.
        warmup_max_lr: at the end; None for the groups' own rates.
        warmup_num_steps: iterations in between; at least 2 are taken.
        warmup_type: in equal steps, or steps that grow smaller, by the logarithm of the iteration.
        last_batch_iteration: to go on from; -1 begins.

    Raises:
        ValueError: a number is out of range, a list is not as long as that of the groups, or the type is unknown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See :class:`_Schedule`."""
        part = self.warmup.part(iteration) if iteration < self.warmup.steps else self.after(iteration)
        return [least + (most - least) * part for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def after(self, iteration: int) -> float:
        """The part of the way from the least to the largest rate behind the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rates that rise to the largest one, and fall in a straight line to the least.

    Args:
        optimizer: whose groups get the rates.
        total_num_steps: iterations until the end of the fall.
        warmup_min_lr: to begin and to end with.
        warmup_max_lr: at the end of the warm-up; None for the groups' own rates.
        warmup_num_steps: iterations of the warm-up; at least 2 are taken.
        warmup_type: in equal steps, or steps that grow smaller, by the logarithm of the iteration.
        last_batch_iteration: to go on from; -1 begins.

    Raises:
        ValueError: a number is out of range, a list is not as long as that of the groups, or the type is unknown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _count("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def after(self, iteration: int) -> float:
        """See :class:`WarmupLR`."""
        # Behind the end it stays at the least rate; the line would go on below it.
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(_Schedule):
    """The groups' own rates times a factor, which rises to 1 and falls by half a wave of the cosine.

    Args:
        optimizer: whose groups get the rates.
        total_num_steps: iterations until the end of the fall.
        warmup_min_ratio: factor to begin with.
        warmup_num_steps: iterations of the warm-up; at least 2 are taken.
        cos_min_ratio: factor at the end, and behind it.
        warmup_type: in equal steps, or steps that grow smaller, by the logarithm of the iteration.
        last_batch_iteration: to go on from; -1 begins.

    Raises:
        ValueError: a number is out of range, or the type is unknown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _count("total_num_steps", total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See :class:`_Schedule`."""
        return [float(base) * self.get_lr_ratio(iteration) for base in self.base_lrs]

    def get_lr_ratio(self, iteration: int | None = None) -> float:
        """The factor at an iteration, by default at this one."""
        iteration = self.last_batch_iteration if iteration is None else iteration
        if iteration < self.warmup.steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup.part(iteration)
        done = (iteration - self.warmup.steps + 1) / max(1, self.total_num_steps - self.warmup.steps)
        # Behind the end it stays there; the cosine would rise again.
        wave = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * wave)


class _Warmup:
    """The part of a warm-up that is over at an iteration."""

    def __init__(self, steps: int, kind: str) -> None:
        count = _count("warmup_num_steps", steps)
        if kind not in ("log", "linear"):
            raise ValueError(f'warmup_type is {kind!r}; expected "log" or "linear"')
        self.steps = max(2, count)  # the logarithm of 1 is 0, by which nothing can be divided
        self.linear = kind == "linear"

    def part(self, iteration: int) -> float:
        if iteration < 0:
            # Before the first step, which the logarithm of 0 says nothing of.
            return 0.0
        return iteration / self.steps if self.linear else math.log(iteration + 1) / math.log(self.steps)


def _per_group(optimizer: Optimizer, name: str, value: Any) -> list[float]:
    # Kept as a list of each schedule's own: the JSON's would be shared with the configuration.
    groups = len(optimizer.param_groups)
    if isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected a number, or a list with one for each parameter group")
    if not isinstance(value, Sequence):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"{name} has {len(value)} numbers, and the optimizer {groups} parameter groups")
    return list(value)


def _count(name: str, value: object) -> int:
    """A number of iterations; JSON's 1e4 is a float."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    # True is an int, too.
    if not isinstance(whole, int) or isinstance(whole, bool) or whole <= 0:
        raise ValueError(f"{name} is {value!r}; expected a whole number above 0")
    return whole


SCHEDULERS: dict[str, type[LRScheduler]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""By the names that the JSON has for them."""
