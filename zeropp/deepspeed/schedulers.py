"""The five learning rate schedules that DeepSpeed's JSON configuration can name, as torch schedulers.

A new schedule is at iteration -1, and the first optimizer step uses the rates of iteration -1. The schedule's `step()`
then goes to iteration 0. A warm-up has its start rate at both iterations, so the first two optimizer steps use the
start rate, as in DeepSpeed.
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
"""One number for all parameter groups, or a sequence with one number for each."""


class _Schedule(LRScheduler):
    """Base class of schedules whose rates depend only on the number of the iteration.

    Args:
        optimizer: optimizer whose parameter groups get the rates.
        last_batch_iteration: iteration to continue from; -1 starts a new schedule.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            # torch requires this entry if a schedule continues from an earlier iteration.
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The current iteration, whose rates the optimizer has; -1 for a new schedule."""
        # torch's last_epoch is 0 for a new schedule.
        return int(self.last_epoch) - 1

    @abstractmethod
    def rates(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration >= -1."""

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group at the current iteration."""
        return self.rates(self.last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Go to the next iteration, or to a given one."""
        if epoch is not None:
            self.last_epoch = epoch  # super().step() adds 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the current iteration under DeepSpeed's key; all other settings come from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved iteration. The optimizer's rates stay, because its own state dict restores them."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._last_lr = list(self.rates(self.last_batch_iteration))


class LRRangeTest(_Schedule):
    """Learning rate range test: rates that grow from a minimum, to find the largest usable one.

    See Smith, arXiv:1803.09820. With n = (iteration + 1) / lr_range_test_step_size, the rate is
    ``lr_range_test_min_lr * (1 + lr_range_test_step_rate * n)``.

    Args:
        optimizer: optimizer whose parameter groups get the rates.
        lr_range_test_min_lr: first rate.
        lr_range_test_step_size: iterations in which n grows by 1.
        lr_range_test_step_rate: growth of the rate for each 1 of n, as a multiple of the first rate.
        lr_range_test_staircase: True to round n down, so that the rate grows in steps.
        last_batch_iteration: iteration to continue from; -1 starts a new schedule.

    Raises:
        ValueError: a number is out of range, or a list does not have one number for each parameter group.
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
        """Return the learning rate of each parameter group at an iteration >= -1."""
        steps = (iteration + 1) / self.step_size
        if self.staircase:
            steps = math.floor(steps)
        return [least * (1 + self.step_rate * steps) for least in self.min_lr]


class OneCycle(_Schedule):
    """One-cycle schedule: the rate rises and falls once and then decays; momentum moves the opposite way.

    See Smith, arXiv:1803.09820. After the cycle, n counts intervals of ``decay_step_size`` iterations.

    Args:
        optimizer: optimizer whose parameter groups get rates and momentum.
        cycle_min_lr: rate at both ends of the cycle.
        cycle_max_lr: rate in the middle of the cycle.
        decay_lr_rate: decay of the rate after the cycle, which is ``cycle_min_lr / (1 + decay_lr_rate * n)``.
        cycle_first_step_size: iterations of the rise.
        cycle_second_step_size: iterations of the fall; None for as many as the rise.
        cycle_first_stair_count: number of stairs of the rise; 0 for a continuous rise.
        cycle_second_stair_count: number of stairs of the fall; None for as many as the rise.
        decay_step_size: iterations in which n grows by 1; 0 for no decay.
        cycle_momentum: True to change the first of the optimizer's ``betas``. No effect if some group has no ``betas``.
        cycle_min_mom: momentum in the middle of the cycle.
        cycle_max_mom: momentum at both ends of the cycle.
        decay_mom_rate: growth of momentum after the cycle, which is ``cycle_max_mom * (1 + decay_mom_rate * n)``.
        last_batch_iteration: iteration to continue from; -1 starts a new schedule.

    Raises:
        ValueError: a number is out of range, or a list does not have one number for each parameter group.
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
        # DeepSpeed also leaves optimizers without betas unchanged.
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """Return the learning rate of each parameter group at an iteration >= -1."""
        # The cycle is not repeated: after it only the decay follows.
        if iteration >= self.total_size:
            return [least / (1 + self.decay_lr_rate * self._decays(iteration)) for least in self.min_lrs]
        height = self._height(iteration)
        return [least + (most - least) * height for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def momentums(self, iteration: int) -> list[float]:
        """Return the momentum of each parameter group at an iteration >= -1."""
        if iteration >= self.total_size:
            return [most * (1 + self.decay_mom_rate * self._decays(iteration)) for most in self.max_moms]
        height = self._height(iteration)
        return [most - (most - least) * height for least, most in zip(self.min_moms, self.max_moms, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the ``betas`` of each parameter group; None if this schedule does not change them."""
        return [group["betas"] for group in self.optimizer.param_groups] if self.cycle_momentum else None

    def step(self, epoch: int | None = None) -> None:
        """Go to the next iteration, or to a given one."""
        super().step(epoch)
        if self.cycle_momentum:
            momentums = self.momentums(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momentums, strict=True):
                group["betas"] = (momentum, *group["betas"][1:])

    def _decays(self, iteration: int) -> float:
        """Return n, the decay intervals since the end of the cycle; 0 without decay."""
        return (iteration - self.total_size + 1) / self.decay_size if self.decay_size else 0.0

    def _height(self, iteration: int) -> float:
        """Return the height in the cycle: 0 at both ends, 1 in the middle."""
        # Iteration -1 is at the bottom.
        done = (iteration + 1) % self.total_size
        rises = done <= self.first_size
        left, size = (done, self.first_size) if rises else (self.total_size - done, self.total_size - self.first_size)
        stairs = self.first_stairs if rises else self.second_stairs
        # Multiply before dividing: left / size may be rounded down, and floor() would then give one stair less.
        return math.floor(left * stairs / size) / stairs if stairs else left / size


class WarmupLR(_Schedule):
    """Warm-up: rates rise from a minimum to a maximum and stay there.

    Args:
        optimizer: optimizer whose parameter groups get the rates.
        warmup_min_lr: rate at the start.
        warmup_max_lr: rate at the end of the warm-up; None for the rates that the parameter groups have.
        warmup_num_steps: iterations of the warm-up; 1 counts as 2.
        warmup_type: "linear" for equal steps, or "log" for steps that follow the logarithm of the iteration.
        last_batch_iteration: iteration to continue from; -1 starts a new schedule.

    Raises:
        ValueError: a number is out of range, a list does not have one number for each parameter group, or
            ``warmup_type`` is unknown.
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
        """Return the learning rate of each parameter group at an iteration >= -1."""
        part = self.warmup.part(iteration) if iteration < self.warmup.steps else self.after(iteration)
        return [least + (most - least) * part for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def after(self, iteration: int) -> float:
        """Return the factor f after the warm-up, where the rate is ``min + f * (max - min)``: always 1."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm-up and linear decay: rates rise from a minimum to a maximum, and then fall linearly to the minimum.

    Args:
        optimizer: optimizer whose parameter groups get the rates.
        total_num_steps: iterations until the end of the fall.
        warmup_min_lr: rate at the start and at the end.
        warmup_max_lr: rate at the end of the warm-up; None for the rates that the parameter groups have.
        warmup_num_steps: iterations of the warm-up; 1 counts as 2.
        warmup_type: "linear" for equal steps, or "log" for steps that follow the logarithm of the iteration.
        last_batch_iteration: iteration to continue from; -1 starts a new schedule.

    Raises:
        ValueError: a number is out of range, a list does not have one number for each parameter group, or
            ``warmup_type`` is unknown.
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
        """Return the factor f after the warm-up, where the rate is ``min + f * (max - min)``: falls from 1 to 0."""
        # max(0.0, ...): after the last iteration the line would fall below the minimum.
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(_Schedule):
    """Warm-up and cosine decay: the parameter groups' initial rates times a factor.

    The factor rises from ``warmup_min_ratio`` to 1, and then falls to ``cos_min_ratio`` along half a cosine wave.

    Args:
        optimizer: optimizer whose parameter groups get the rates.
        total_num_steps: iterations until the end of the fall.
        warmup_min_ratio: factor at the start.
        warmup_num_steps: iterations of the warm-up; 1 counts as 2.
        cos_min_ratio: factor at the end of the fall and after it.
        warmup_type: "linear" for equal steps, or "log" for steps that follow the logarithm of the iteration.
        last_batch_iteration: iteration to continue from; -1 starts a new schedule.

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
        """Return the learning rate of each parameter group at an iteration >= -1."""
        return [float(base) * self.get_lr_ratio(iteration) for base in self.base_lrs]

    def get_lr_ratio(self, iteration: int | None = None) -> float:
        """Return the factor on the initial rates at an iteration; None for the current iteration."""
        iteration = self.last_batch_iteration if iteration is None else iteration
        if iteration < self.warmup.steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup.part(iteration)
        done = (iteration - self.warmup.steps + 1) / max(1, self.total_num_steps - self.warmup.steps)
        # min(1.0, done): after the last iteration the cosine would rise again.
        wave = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * wave)


class _Warmup:
    """Progress of a warm-up.

    Attributes:
        steps: iterations of the warm-up, at least 2.
        linear: True for linear progress, False for logarithmic progress.
    """

    def __init__(self, steps: int, kind: str) -> None:
        count = _count("warmup_num_steps", steps)
        if kind not in ("log", "linear"):
            raise ValueError(f'warmup_type is {kind!r}; expected "log" or "linear"')
        self.steps = max(2, count)  # part() divides by log(steps), which is 0 for 1
        self.linear = kind == "linear"

    def part(self, iteration: int) -> float:
        """Return the progress at an iteration below ``steps``, from 0 to below 1 (logarithmic: to 1)."""
        if iteration < 0:
            # log(iteration + 1) does not exist for -1.
            return 0.0
        return iteration / self.steps if self.linear else math.log(iteration + 1) / math.log(self.steps)


def _per_group(optimizer: Optimizer, name: str, value: Any) -> list[float]:
    """Return one number for each parameter group, in a new list.

    Args:
        optimizer: optimizer with the parameter groups.
        name: name of the argument, for errors.
        value: one number, or a sequence of numbers.

    Raises:
        ValueError: ``value`` is a string, or does not have one number for each group.
    """
    # A new list, because a list from the JSON belongs to the configuration.
    groups = len(optimizer.param_groups)
    if isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected a number, or a list with one for each parameter group")
    if not isinstance(value, Sequence):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"{name} has {len(value)} numbers, and the optimizer {groups} parameter groups")
    return list(value)


def _count(name: str, value: object) -> int:
    """Return a number of iterations as an int; a float such as JSON's 1e4 is accepted if it is a whole number.

    Raises:
        ValueError: ``value`` is not a whole number above 0.
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    # bool is a subclass of int, and is refused.
    if not isinstance(whole, int) or isinstance(whole, bool) or whole <= 0:
        raise ValueError(f"{name} is {value!r}; expected a whole number above 0")
    return whole


SCHEDULERS: dict[str, type[LRScheduler]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""Name in the JSON configuration -> class of the schedule."""
