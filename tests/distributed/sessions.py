"""Training sessions of random calls, each done to a partitioned model and to a plain one that sees every rank's batch.

A session is drawn from its seed alone, so every rank makes the same calls. After each of them what can be seen without
changing anything is compared; weights, states and averages are, in whole, by calls that are drawn like the others.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.session_model import WIDTH, Body
from tests.distributed.shapes import apart, make_config, share, worst

__all__ = ["PLACEMENTS", "Session", "run_session"]

BOUND = 1e-9  # float64; only the order of sums differs

PLACEMENTS: list[dict[str, object]] = [
    {},
    {"prefetch": 0, "reuse": 0, "live": 0},
    {"prefetch": 200, "reuse": 150, "live": 400},
    {"persist": 20},
    {"persist": 10**6},
    {"overlap_comm": False},
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "overlap_comm": True},
    {"unit_numel": 50},
    {"zero_hpz_partition_size": 2},
    {"mics_shard_size": 2},
    {"mics_shard_size": 2, "persist": 20, "prefetch": 100},
]


class Session:
    """Both sides, and the calls. Calls whose name begins with ``do_`` are drawn.

    Attributes:
        draw: what a session is drawn from; equal on all ranks.
        done: names of the calls made, for the report.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.draw, self.done = seed, random.Random(seed), []
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = Body().double()
        share(self.model)
        self.plain = copy.deepcopy(self.model)
        self.batches = 0
        self.saved: tuple[Any, ...] | None = None
        self.late = ["side.weight", "side.bias"] if self.draw.random() < 0.5 else []
        self.wrap()

    def wrap(self) -> None:
        """A new optimizer on both sides, with settings of its own."""
        draw = self.draw
        self.steps = draw.choice([1, 1, 2, 3])  # micro-batches in a window
        self.managed = draw.random() < 0.5
        self.clip = draw.choice([0.0, 0.0, 0.05])
        self.settings: dict[str, object] = {
            **draw.choice(PLACEMENTS), "gradient_accumulation_steps": self.steps, "gradient_clipping": self.clip,
            "managed_gradient_accumulation": self.managed, "hang_timeout": 15,
        }  # fmt: skip
        kind, given = draw.choice([
            (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
            (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "fused": True}),
        ])  # fmt: skip
        self.plain_optimizer = kind(self.groups(self.plain), weight_decay=0.02, **given)
        inner = kind(self.groups(self.model), weight_decay=0.02, **given)
        self.optimizer = zeropp.ZeroOptimizer(inner, self.model, make_config(**self.settings))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.8)
        self.plain_scheduler = torch.optim.lr_scheduler.StepLR(self.plain_optimizer, 3, 0.8)
        self.average: Any = None
        self.plain_average: dict[str, Tensor] = {}
        self.saved = None
        self.count = 0  # micro-batches of the running window
        self.owned = self.steps == 1 or not self.managed  # every step() is taken
        self.left_out = self.asked = self.ever_asked = False  # step() after micro-batches; see the note in window.py
        self.norms: dict[str, float] = {}
        self.skipped = 0
        self.thawed = False  # whether a parameter has been unfrozen since the last forward, with which it joins
        self.poisoned = False

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in model.named_parameters() if name not in self.late]
        matrices = [p for _, p in named if p.ndim > 1]
        return [{"params": matrices}, {"params": [p for _, p in named if p.ndim < 2], "lr": 0.03}]

    # Micro-batches.

    def rows(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 7919 + self.batches * 31 + rank)
        return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)

    def routes(self) -> list[tuple[int, ...]]:
        """One way through the blocks for each rank; mostly the same and mostly the whole."""
        choice = self.draw.random()
        if choice < 0.6:
            return [(0, 1, 2, 3)] * self.world
        one = tuple(self.draw.sample(range(4), self.draw.randint(1, 4)))
        if choice < 0.85:
            return [one] * self.world
        return [tuple(self.draw.sample(range(4), self.draw.randint(1, 4))) for _ in range(self.world)]

    def micro(self, form: str, *, poison: bool = False) -> None:
        """Forward and backward, in one of several forms."""
        self.batches += 1
        self.thawed = False
        routes, aside, by_loss = self.routes(), self.draw.random() < 0.3, self.draw.random() < 0.5
        victim = self.draw.randrange(self.world) if poison else None
        factor = [math.inf if rank == victim else 1.0 for rank in range(self.world)]
        for rank in range(self.world):
            one, two = self.plain(self.rows(rank), routes[rank], aside)
            if form == "two forwards":
                again, more = self.plain(self.rows(rank) + 1, routes[rank], aside)
                one, two = one + again, two + more
            ((one + two) * factor[rank] / self.world / self.steps).backward()
            if rank == self.rank:
                expected = one.detach()
        one, two = self.model(self.rows(self.rank), routes[self.rank], aside)
        if form == "two forwards":
            again, more = self.model(self.rows(self.rank) + 1, routes[self.rank], aside)
            one, two = one + again, two + more
        self.same("loss", one.detach(), expected)
        one, two = one * factor[self.rank], two * factor[self.rank]
        backward: Callable[..., None] = self.optimizer.backward
        if by_loss:
            one, two = one / self.steps, two / self.steps
            backward = torch.Tensor.backward
        if form == "two losses":
            backward(one, retain_graph=True)
            backward(two)
        else:
            backward(one + two)
        if self.count and not self.asked:
            self.left_out = True
            self.owned |= not self.ever_asked
        self.asked = False
        self.count += 1
        self.poisoned |= poison

    @property
    def unfinished(self) -> bool:
        return not self.owned and not self.left_out and self.count < self.steps

    def begin_window(self) -> None:
        self.plain.zero_grad()
        self.count, self.poisoned, self.left_out, self.asked = 0, False, False, False

    def same(self, what: str, found: Tensor | float, expected: Tensor | float) -> None:
        wide, exact = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
        off, bound = apart(wide, exact), BOUND * max(1.0, float(exact.abs().max()))
        assert off <= bound, f"{what} is off by {off:.3g}"

    # Steps.

    def do_window(self) -> None:
        """A window from the first micro-batch to the step, as the loops in docs/configuration.md."""
        if self.count:  # of a window that was left open
            self.close_window()
            return
        each = not self.owned and self.draw.random() < 0.5
        count = self.steps if not self.owned else self.draw.choice([self.steps, 1, 2])
        hold = self.draw.choice(["", "", "all but the last", "all"]) if not each else ""
        poison = self.draw.randrange(count) if self.draw.random() < 0.08 else -1
        for number in range(count):
            inside = hold == "all" or (hold and number < count - 1)
            with self.optimizer.no_sync() if inside else contextlib.nullcontext():
                self.micro(self.draw.choice(["", "", "", "two losses", "two forwards"]), poison=number == poison)
            if each and number < count - 1:
                self.unfinished_step()
        self.close_window()

    def unfinished_step(self) -> None:
        before = repr(self.optimizer.grad_norm)
        if self.draw.random() < 0.3:
            self.optimizer.clip_grad_norm_(0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert not self.optimizer.step_was_taken and repr(self.optimizer.grad_norm) == before  # or both NaN
        self.asked = self.ever_asked = True

    def close_window(self) -> None:
        norm = self.plain_norm()
        asked = self.draw.random()
        if asked < 0.2 and not self.poisoned:
            self.check_norms()
        if asked > 0.7 and not self.poisoned:
            bound = norm * self.draw.choice([0.5, 2.0])
            self.same("norm", self.optimizer.clip_grad_norm_(bound, now=True), norm)
            nn.utils.clip_grad_norm_(self.plain.parameters(), bound)
        self.optimizer.step(now=True)
        taken = not self.poisoned
        assert self.optimizer.step_was_taken == taken and self.optimizer.step_was_skipped != taken
        self.skipped += not taken
        assert self.optimizer.skipped_steps == self.skipped
        if taken:
            self.same("grad_norm", self.optimizer.grad_norm, norm)
            if self.clip:
                nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
            self.plain_optimizer.step()
            self.scheduler.step()
            self.plain_scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.5)
        self.begin_window()
        if self.average is not None and taken:
            self.average.update()
            for name, value in self.plain_average.items():
                value.lerp_(self.plain.get_parameter(name).detach(), 0.1)

    def check_norms(self) -> None:
        norms, before = self.optimizer.grad_norms(), self.norms
        self.norms = norms
        if self.unfinished:
            assert norms == before
            return
        grads = {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}
        assert norms.keys() == grads.keys(), norms.keys() ^ grads.keys()
        for name, value in norms.items():
            self.same(f"norm of {name}", value, grads[name].norm())

    def plain_norm(self) -> float:
        """Over the whole model: parameters that are in no group yet count, too."""
        return float(nn.utils.get_total_norm([p.grad for p in self.plain.parameters() if p.grad is not None]))

    do_window_too = do_window_again = do_window  # what most calls are

    def do_closure(self) -> None:
        if self.count or self.steps > 1:
            return

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            self.micro("two losses")
            return torch.tensor(3.0)

        loss = self.optimizer.step(closure)
        assert float(loss) == 3.0 and self.optimizer.step_was_taken
        self.same("grad_norm", self.optimizer.grad_norm, self.plain_norm())
        if self.clip:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
        self.plain_optimizer.step()
        self.optimizer.zero_grad()
        self.begin_window()
        self.average = None

    def do_discard(self) -> None:
        """A window begun and given up."""
        self.micro("")
        self.optimizer.zero_grad(now=True)
        self.begin_window()

    def do_leave_open(self) -> None:
        """Other calls come between the micro-batches of a window."""
        if not self.count:
            with self.optimizer.no_sync() if self.draw.random() < 0.3 else contextlib.nullcontext():
                self.micro("")

    # What does not train.

    def do_evaluate(self) -> None:
        self.batches += 1
        routes, aside = self.routes(), self.draw.random() < 0.3
        mode = self.draw.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        applied = self.average is not None and not self.count and self.draw.random() < 0.5
        plain = self.plain
        if applied:
            plain = copy.deepcopy(self.plain)
            plain.load_state_dict(self.plain_average, strict=False)
        self.model.train(self.draw.random() < 0.5)
        with self.average.applied() if applied else contextlib.nullcontext(), mode():
            one, two = self.model(self.rows(self.rank), routes[self.rank], aside)
        expected = plain(self.rows(self.rank), routes[self.rank], aside)
        self.same("evaluation", torch.stack([one, two]).detach(), torch.stack(expected).detach())
        self.model.train()

    def do_fail_forward(self) -> None:
        index = self.draw.randrange(4)
        self.model.parts[index].fails = True
        with contextlib.suppress(ArithmeticError):
            self.model(self.rows(self.rank), (0, 1, 2, 3), False)
            raise AssertionError("the failure was swallowed")
        self.model.parts[index].fails = False

    def do_fail_backward(self) -> None:
        """Recomputation fails, in the midst of backward."""
        one, _ = self.model(self.rows(self.rank), (0, 1, 2, 3), False)
        self.model.parts[2].fails = True
        with contextlib.suppress(ArithmeticError):
            one.backward()
            raise AssertionError("the failure was swallowed")
        self.model.parts[2].fails = False
        self.optimizer.zero_grad(now=True)
        self.begin_window()

    # Weights.

    def do_read(self) -> None:
        name = self.draw.choice([name for name, _ in self.model.named_parameters()])
        with zeropp.zero.GatheredParameters(self.model.get_parameter(name)):
            self.same(name, self.model.get_parameter(name).detach(), self.plain.get_parameter(name).detach())

    def do_edit(self) -> None:
        names = self.draw.sample(sorted(self.trained_weights()), 2)
        editor = self.draw.randrange(self.world)
        own = [self.model.get_parameter(name) for name in names]
        with zeropp.zero.GatheredParameters(own, modifier_rank=editor), torch.no_grad():
            if self.rank == editor:
                for parameter in own:
                    parameter.mul_(0.9)
        with torch.no_grad():
            for name in names:
                self.plain.get_parameter(name).mul_(0.9)

    def do_compare(self) -> None:
        found = zeropp.full_state(self.model) if self.draw.random() < 0.5 else self.model.state_dict()
        off = worst(found, self.plain.state_dict())
        assert off <= BOUND, f"weights are off by {off:.3g}"

    def do_load_weights(self) -> None:
        if self.count:
            return
        # Frozen weights and buffers are in no state of an optimizer, and in averages only if they were trained.
        self.average = self.saved = None
        state = {name: value * 0.95 for name, value in self.plain.state_dict().items()}
        self.model.load_state_dict(state)
        self.plain.load_state_dict(state)

    def do_freeze(self) -> None:
        if self.count:
            return
        name = self.draw.choice(["start.bias", "parts.0.lin.weight", "parts.1.gain", "norm.weight", "scale"])
        flag = not self.plain.get_parameter(name).requires_grad
        self.thawed |= flag
        for model in (self.model, self.plain):
            model.get_parameter(name).requires_grad_(flag)
        self.average = self.saved = None  # what they hold is settled when they begin

    # Settings and states.

    def do_rate(self) -> None:
        if self.count and self.managed:  # groups are not to be had inside an unfinished window
            return
        index, factor = self.draw.randrange(2), self.draw.choice([0.9, 1.1])
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.param_groups[index]["lr"] *= factor

    def do_add_group(self) -> None:
        if self.count or not self.late:
            return
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
            optimizer.add_param_group({"params": [model.get_parameter(name) for name in self.late], "lr": 0.02})
        self.late, self.saved = [], None

    def do_save(self) -> None:
        if not self.count and not self.thawed:  # what is saved before a parameter joins is of another partition
            states = (self.optimizer.state_dict(), self.trained_weights(), self.plain_optimizer.state_dict())
            self.saved = (copy.deepcopy(states), self.skipped)

    def trained_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.plain.named_parameters() if p.requires_grad}

    def do_load(self) -> None:
        if self.count or self.saved is None:
            return
        (own, weights, state), self.skipped = copy.deepcopy(self.saved)
        self.optimizer.load_state_dict(own)
        self.plain.load_state_dict(weights, strict=False)  # frozen weights and buffers are not the optimizer's
        self.plain_optimizer.load_state_dict(state)
        self.average = None

    def do_average(self) -> None:
        if not self.count and self.average is None and not self.thawed:
            self.average = zeropp.ema(self.model, 0.9)
            self.plain_average = self.trained_weights()

    def do_wrap(self) -> None:
        if not self.count:
            self.optimizer = self.scheduler = self.average = None  # let go of, so that the next may take over
            self.wrap()

    def calls(self) -> list[str]:
        return sorted(name for name in dir(self) if name.startswith("do_"))


def run_session(seed: int, length: int) -> list[str]:
    """One session; the calls that were made.

    Raises:
        AssertionError: something differed; the message names the seed and the calls up to there.
    """
    session = Session(seed)
    for _ in range(length):
        name = session.draw.choice(session.calls())
        session.done.append(name.removeprefix("do_"))
        try:
            getattr(session, name)()
        except BaseException as error:
            error.add_note(f"seed {seed}, {session.settings}, calls {session.done}")
            raise
    if session.count:
        session.close_window()
    session.do_compare()
    session.optimizer.close()
    return session.done
