"""Random training programs, each run on a sharded model and on a plain model that trains on all ranks' batches.

A seed determines a model, a configuration, an optimizer and a list of calls. After each call, losses, norms and
gradients of inputs are compared, which changes no state. Weights are compared after each step. Each call draws from its
own generator, so a program that fails can be run again with fewer calls:

    python -m tests.distributed.engine.test_random_programs 1234 --world 2 --length 10 --keep 0,3,7
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import math
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.random_models import WIDTH, WORDS, Node, draw_spec, grow, kinds
from tests.support.random_settings import WITHOUT_EFFECT, draw_settings
from tests.support.unprepared import unprepared
from zeropp import checkpoint

__all__ = ["CALLS", "FAILED", "Program", "run_programs"]

# Bounds relative to max(1, largest value). In float64, only the order of sums differs.
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.06}
FORMS = [*["one"] * 4, "two losses", "a part", "two forwards", "forwards, last first", "an evaluation between forwards"]
PAIRS = 10  # one of this many programs runs a second time with other settings
FAILED = "random program"  # beginning of the message of a failed program; its seed follows
# Parts of error messages that refuse a program for its settings, on all ranks or on none. The second is raised if one
# rank alone runs a module more often than any rank has before.
REFUSALS = ("backward reached a weight whose unit was released", "no rank ever ran it")


class Invalid(Exception):
    """The error for a program that plain torch cannot run, or that is refused for its settings."""


class Program:
    """Both sides of a program, and its calls. Calls whose name begins with ``do_`` are drawn.

    Attributes:
        draw: generator of the current call; equal on all ranks.
        seen: hashes of the full weights at each comparison.
        done: calls made so far with their random choices, for messages.
        plain: the plain model, with main weights and gradients.
        twin: the plain model that runs forward: ``plain`` itself, or in 16-bit programs a 16-bit copy of it.
    """

    def __init__(self, seed: int, folder: Path, changed: dict[str, Any]) -> None:
        self.seed, self.folder, self.changed = seed, folder, changed
        self.draw = draw = random.Random(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.spec, self.dtype = draw_spec(draw), draw.choices(list(BOUNDS), [6, 3, 3, 1])[0]
        self.sixteen = self.dtype.itemsize == 2
        self.wide = torch.float32 if self.sixteen else self.dtype
        self.batches = 0
        self.seen: list[str] = []
        self.done: list[str] = []
        self.model, self.plain = grow(self.spec, self.wide), grow(self.spec, self.wide)
        self.twin = grow(self.spec, self.wide) if self.sixteen else self.plain
        for parameter in self.twin.parameters():
            parameter.data = parameter.data.to(self.dtype if self.sixteen else parameter.dtype)
        self.weights = dict(self.plain.named_parameters())
        self.twin_buffers = dict(self.twin.named_buffers(remove_duplicate=False))
        mixed = {p.dtype for p in self.plain.parameters()} != {self.wide}
        self.bound = BOUNDS[torch.float32 if mixed else self.dtype]
        self.norm_bound = max(self.bound, 3e-7)  # norms are sums in float32
        trained = [name for name, p in self.weights.items() if p.requires_grad]
        self.late = draw.sample(trained, 2) if draw.random() < 0.2 else []
        self.wrap()

    @property
    def models(self) -> list[nn.Module]:
        return [self.model, self.plain, *([self.twin] if self.sixteen else [])]

    def wrap(self) -> None:
        """Wrap both sides with new optimizers and newly drawn settings."""
        self.settings = draw_settings(self.draw, self.world, self.dtype, self.folder, self.changed)
        self.steps, self.managed, self.clip = self.settings.steps, self.settings.managed, self.settings.clip
        self.plain_optimizer = self.settings.optimizer(self.groups(self.plain))
        inner = self.settings.optimizer(self.groups(self.model))
        self.optimizer = zeropp.ZeroOptimizer(inner, self.model, copy.deepcopy(self.settings.config))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.8)
        self.plain_scheduler = torch.optim.lr_scheduler.StepLR(self.plain_optimizer, 3, 0.8)
        # Wrapping broadcasts rank 0's buffers to all ranks.
        self.buffers = [self.buffers_of(self.twin if not hasattr(self, "buffers") else self.model)] * self.world
        self.average: Any = None
        self.plain_average: dict[str, Tensor] = {}
        self.saved: Any = None
        self.stored: Any = None
        self.every_step_acts = self.steps == 1 or not self.managed
        self.norms: dict[str, float] = {}
        self.skipped = 0
        self.thawed = False  # a parameter has been unfrozen since the last forward; the next forward includes it
        self.begin_window()

    def begin_window(self) -> None:
        self.count = 0  # micro-batches of the current window
        self.poisoned = self.held = False

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in model.named_parameters() if name not in self.late]
        vectors = [p for _, p in named if p.ndim < 2]
        return [{"params": [p for _, p in named if p.ndim > 1]}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]

    def buffers_of(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.named_buffers(remove_duplicate=False)}

    # Comparison.

    def same(self, subject: str, found: Any, expected: Any, bound: float | None = None) -> None:
        """Assert that both values are equal within the bound and finite in the same places."""
        one, two = (torch.as_tensor(value).detach().double() for value in (found, expected))
        assert one.shape == two.shape, f"{subject} has shape {tuple(one.shape)}, expected {tuple(two.shape)}"
        assert torch.equal(one.isfinite(), two.isfinite()), f"{subject} is {one}, expected {two}"
        if one.numel():
            off, largest = (float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in (one - two, two))
            assert off <= (bound or self.bound) * max(1.0, largest), f"{subject} is off by {off:.3g} of {largest:.3g}"

    def compare(self) -> None:
        """Compare full weights and this rank's buffers, and store a hash of them."""
        found, buffers = zeropp.full_state(self.model), self.buffers[self.rank]
        expected = {**self.plain.state_dict(), **buffers}
        assert found.keys() == expected.keys(), f"names differ: {found.keys() ^ expected.keys()}"
        digest = hashlib.sha256()
        for name, value in expected.items():
            self.same(name, found[name], value, 0.02 if self.sixteen and name not in buffers else None)
            digest.update(found[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.seen.append(digest.hexdigest())

    # Micro-batches.

    def batch(self, number: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
        """Return rows, words and the turn of a batch. In most batches all ranks have the same turn.

        The first batch has the turn that runs modules most often. Otherwise a rank could later be the only one to run a
        module more often than any rank before, which is refused.
        """
        generator = torch.Generator().manual_seed((self.seed * 7919 + number * 31 + rank) % 2**40)
        rows, shared = 1 + (number + rank) % 3, random.Random(self.seed * 7919 + number)
        x = torch.randn(rows, 3, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
        words = torch.randint(0, WORDS, (rows, 3), generator=generator)
        turn = shared.choice([127, 127, 0, shared.randrange(128)]) if number > 0 else 127
        if number > 0 and shared.random() < 0.4:
            turn = random.Random(number * 31 + rank).randrange(128)
        return x, words, turn

    def forward(self, model: Any, number: int, rank: int, inputs: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        x, words, turn = self.batch(number, rank, self.wide if model is self.model else self.dtype)
        x.requires_grad_(inputs)
        return x, *model.losses(model(x, words, turn))

    @contextlib.contextmanager
    def twin_as(self, rank: int) -> Iterator[None]:
        """Run the block with a rank's buffers in the twin, and keep its changes. An error makes the program invalid."""
        for name, value in self.twin_buffers.items():
            value.copy_(self.buffers[rank][name])
        try:
            yield
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error
        self.buffers[rank] = {name: value.clone() for name, value in self.twin_buffers.items()}

    def micro(self, form: str = "one", *, poison: bool = False) -> None:
        """Run forward and backward of a micro-batch on both sides, in one of several forms, and compare."""
        draw, number = self.draw, self.batches
        self.batches, self.thawed = number + 2, False
        victim, factor = draw.randrange(self.world), draw.choice([math.inf, math.nan])
        inputs, by_loss = draw.random() < 0.3, draw.random() < 0.5 and self.dtype != torch.float16
        if inputs and form == "one" and draw.random() < 0.5 and "reentrant" not in kinds(self.spec):
            form = "gradients of inputs first"
        poisoned = f" not finite on rank {victim}" if poison else ""
        self.done.append(f"{form}{poisoned}{' held' if self.held else ''}{' by loss' if by_loss else ''}")
        scale = float(self.optimizer.loss_scale) if self.dtype == torch.float16 else 1.0
        factors = [factor if poison and rank == victim else 1.0 for rank in range(self.world)]
        losses: list[Tensor] = []
        grads: list[Tensor] = []
        for rank, times in enumerate(factors):
            times *= scale / self.steps if self.sixteen else 1 / self.steps / self.world
            with self.twin_as(rank):
                results = self.one_side(self.twin, number, rank, form, inputs, times, torch.Tensor.backward)
            if rank == self.rank:
                losses, grads = results
            if self.sixteen:
                self.take_over(scale * self.world)
        times = factors[self.rank] / (self.steps if by_loss else 1)
        backward = torch.Tensor.backward if by_loss else self.optimizer.backward
        found, found_grads = self.one_side(self.model, number, self.rank, form, inputs, times, backward)
        for one, two in zip(found, losses, strict=True):
            self.same("loss", one, two)
        assert len(found_grads) == len(grads), f"{len(found_grads)} inputs have gradients, expected {len(grads)}"
        if not self.sixteen and not poison:
            for one, two in zip(found_grads, grads, strict=True):
                self.same("gradient of an input", one, two * self.world)
        self.count += 1
        self.poisoned |= poison

    def one_side(
        self, model: Any, number: int, rank: int, form: str, inputs: bool, times: float, backward: Callable[..., None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a micro-batch on one side; return its losses and the gradients of its inputs."""
        x, one, two = self.forward(model, number, rank, inputs)
        losses, xs = [one, two], [x]
        if "forwards" in form:
            if form == "an evaluation between forwards":
                with torch.no_grad():
                    self.forward(model, number + 1000, rank)
            x, three, four = self.forward(model, number + 1, rank, inputs)
            losses, xs = [*losses, three, four], [*xs, x]
        if form == "gradients of inputs first":
            torch.autograd.grad(one + two, x, retain_graph=True, allow_unused=True)
        if form == "two losses":
            backward(one * times, retain_graph=True)
            backward(two * times)
        elif form == "a part":
            backward(two * times)
        elif form == "forwards, last first":
            backward((losses[2] + losses[3]) * times)
            backward((one + two) * times)
        else:
            backward(torch.stack(losses).sum() * times)
        return [loss.detach() for loss in losses], [x.grad for x in xs if x.grad is not None]

    def take_over(self, divisor: float) -> None:
        """Add the twin's 16-bit gradients, divided by ``divisor``, to the gradients of the plain model."""
        for narrow, wide in zip(self.twin.parameters(), self.plain.parameters(), strict=True):
            if narrow.grad is not None:
                grad = narrow.grad.float() / divisor
                wide.grad = grad if wide.grad is None else wide.grad + grad
                narrow.grad = None

    def take_weights(self) -> None:
        """Copy the plain model's weights to the twin."""
        if self.sixteen:
            with torch.no_grad():
                for narrow, wide in zip(self.twin.parameters(), self.plain.parameters(), strict=True):
                    narrow.copy_(wide)

    @property
    def unfinished(self) -> bool:
        return not self.every_step_acts and self.count < self.steps

    # Steps.

    def do_window(self) -> None:
        """Run a window from the first micro-batch to the step, in the ways of docs/configuration.md."""
        if self.count:  # close the window that do_leave_open has left
            self.close_window()
            return
        draw = self.draw
        each = not self.every_step_acts and draw.random() < 0.5
        count = draw.choice([self.steps, 1, 2]) if self.every_step_acts else self.steps
        hold = draw.choice(["", "", "", "all but the last", "all"]) if not each else ""
        poison = draw.randrange(count) if draw.random() < 0.1 else -1
        for number in range(count):
            self.held = hold == "all" or (hold != "" and number < count - 1)
            with self.optimizer.no_sync() if self.held else contextlib.nullcontext():
                self.micro(draw.choice(FORMS), poison=number == poison)
            if number < count - 1 and draw.random() < 0.1:
                self.do_evaluate()
            if each and number < count - 1:
                self.unfinished_step()
        self.close_window()

    do_window_too = do_window_again = do_one_more_window = do_window  # drawn most often

    def unfinished_step(self) -> None:
        self.done.append("step inside the window")
        before = repr(self.optimizer.grad_norm)
        if self.draw.random() < 0.3:
            self.optimizer.clip_grad_norm_(0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert not self.optimizer.step_was_taken and repr(self.optimizer.grad_norm) == before  # or both NaN

    def close_window(self) -> None:
        """Take the step, with a random choice of norms, edits and clipping before it."""
        draw = self.draw
        if draw.random() < 0.25:
            self.check_norms()
        whole = not self.held and self.count % self.steps == 0  # no gradients wait for more micro-batches
        if draw.random() < 0.25 and whole and not self.sixteen:
            self.edit_gradients()
        norm = self.plain_norm()  # before clipping, because the step reports the norm from before it
        if draw.random() < 0.25 and not self.poisoned:
            self.done.append("clip")
            bound = norm * draw.choice([0.5, 2.0]) + 1e-3
            found = self.optimizer.clip_grad_norm_(bound, now=True)
            self.same("the norm before clipping", found, norm, self.norm_bound)
            nn.utils.clip_grad_norm_(self.plain.parameters(), bound)
        self.optimizer.step(now=True)
        self.check_step(norm)
        to_none = draw.random() < 0.7
        self.optimizer.zero_grad(set_to_none=to_none)
        self.plain.zero_grad(set_to_none=to_none)
        self.begin_window()
        self.take_weights()
        self.compare()

    def check_step(self, norm: float) -> None:
        """Compare the step's report with the expectation, and take the step on the plain side."""
        some = any(p.grad is not None for p in self.plain.parameters())
        taken = some and math.isfinite(norm)
        assert self.optimizer.step_was_taken == taken, f"step_was_taken is {not taken} with norm {norm}, {some = }"
        self.skipped += some and not taken
        assert self.optimizer.skipped_steps == self.skipped, (self.optimizer.skipped_steps, self.skipped)
        if not taken:
            return
        self.same("grad_norm", self.optimizer.grad_norm, norm, self.norm_bound)
        if self.clip:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
        self.plain_optimizer.step()
        self.scheduler.step()
        self.plain_scheduler.step()
        if self.average is not None:
            self.average.update()
            for name, value in self.plain_average.items():
                value.lerp_(self.weights[name].detach(), 0.1)

    def check_norms(self) -> None:
        self.done.append("norms")
        norms, before = self.optimizer.grad_norms(), self.norms
        self.norms = norms
        if self.unfinished:
            assert repr(norms) == repr(before)
            return
        grads = {name: p.grad for name, p in self.weights.items() if p.grad is not None}
        assert norms.keys() == grads.keys(), f"norms differ in {norms.keys() ^ grads.keys()}"
        for name, value in norms.items():
            if not self.poisoned:
                self.same(f"norm of {name}", value, grads[name].double().norm(), self.norm_bound)

    def edit_gradients(self) -> None:
        """Edit all gradients of the optimizer in place. Some may be non-finite."""
        times = self.draw.choice([0.5, 0.0, math.nan])
        self.done.append(f"gradients times {times}")
        for optimizer in (self.optimizer, self.plain_optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(times).nan_to_num_(0.0 if times == 0 else math.nan, 0.0, 0.0)

    def plain_norm(self) -> float:
        """Return the norm over the whole model, including parameters that are in no group yet."""
        grads = [p.grad.double() for p in self.weights.values() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads))

    def do_closure(self) -> None:
        if self.count or self.steps > 1:
            return

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            self.plain.zero_grad()
            self.micro("two losses")
            return torch.tensor(3.0)

        assert float(self.optimizer.step(closure)) == 3.0
        self.check_step(self.plain_norm())
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.begin_window()
        self.take_weights()
        self.compare()

    def do_discard(self) -> None:
        """Begin a window and discard it."""
        self.micro()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(now=True)
        self.plain.zero_grad()
        self.begin_window()

    def do_leave_open(self) -> None:
        """Begin a window and leave it open, so that other calls come between its micro-batches."""
        if not self.count:
            self.held = self.draw.random() < 0.3
            with self.optimizer.no_sync() if self.held else contextlib.nullcontext():
                self.micro(self.draw.choice(FORMS))

    # Calls that do not train.

    def do_evaluate(self) -> None:
        number, self.batches = self.batches, self.batches + 1
        mode = self.draw.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        applied = self.average is not None and not self.count and self.draw.random() < 0.5
        train = self.draw.random() < 0.5
        if applied:
            before = copy.deepcopy(self.plain.state_dict())
            self.plain.load_state_dict(self.plain_average, strict=False)
            self.take_weights()
        self.model.train(train)
        self.twin.train(train)
        all_losses: list[tuple[Tensor, ...]] = []
        for rank in range(self.world):
            with self.twin_as(rank), mode():
                all_losses.append(self.forward(self.twin, number, rank)[1:])
        with self.average.applied() if applied else contextlib.nullcontext(), mode():
            found = self.forward(self.model, number, self.rank)[1:]
        for one, two in zip(found, all_losses[self.rank], strict=True):
            self.same("loss of an evaluation", one, two)
        self.model.train()
        self.twin.train()
        if applied:
            self.plain.load_state_dict(before)
            self.take_weights()

    def failing(self) -> list[tuple[str, Node]]:
        return [(name, part) for name, part in self.model.named_modules() if isinstance(part, Node)]

    def do_fail_forward(self) -> None:
        """Let a part of the model raise an error in forward on each rank that runs this part."""
        self.batches += 1
        nodes = self.failing()
        if nodes and not self.buffers[0]:
            node = self.draw.choice(nodes)[1]
            node.fails = True
            x, words, _ = self.batch(self.batches, self.rank, self.wide)
            with contextlib.suppress(ArithmeticError):
                self.model(x, words, 127)
            node.fails = False
            self.model.kept_losses()  # discard the losses of parts that ran before the error

    def do_fail_backward(self) -> None:
        """Let a recomputed part raise an error in backward."""
        self.batches += 1
        nodes = [part for _, part in self.failing() if part.kind in ("checkpoint", "reentrant")]
        inner = [part.parts[0] for part in nodes if isinstance(part.parts[0], Node)]
        if inner and not self.count and not self.buffers[0]:
            x, words, _ = self.batch(self.batches, self.rank, self.wide)
            one, two = self.model.losses(self.model(x, words, 127))
            node = self.draw.choice(inner)
            node.fails = True
            with contextlib.suppress(ArithmeticError):
                self.optimizer.backward(one + two)
            node.fails = False
            self.discard()

    # Weights.

    def do_read(self) -> None:
        name = self.draw.choice([name for name in self.weights])
        with zeropp.zero.GatheredParameters(self.model.get_parameter(name)):
            self.same(name, self.model.get_parameter(name), self.weights[name])

    def do_edit(self) -> None:
        """Edit some parameters inside GatheredParameters, on one rank or on all ranks."""
        names = self.draw.sample(sorted(name for name in self.weights), self.draw.randint(1, 3))
        editor = self.draw.choice([None, *range(self.world)]) if not self.sixteen else self.draw.randrange(self.world)
        own = [self.model.get_parameter(name) for name in names]
        with zeropp.zero.GatheredParameters(own, modifier_rank=editor), torch.no_grad():
            if editor in (None, self.rank):
                for parameter in own:
                    parameter.mul_(0.9)
        with torch.no_grad():
            for name in names:
                self.weights[name].mul_(0.9)
        self.take_weights()

    def do_load_weights(self) -> None:
        """Load weights into the model."""
        if self.count:
            return
        # Averages and saved states become stale: optimizer states contain no frozen weights and no buffers, and
        # averages only weights that were trained when they began.
        self.average = self.saved = None
        own = self.plain.state_dict().keys() - self.buffers[0].keys()
        state = {name: value * 0.95 if name in own else value for name, value in self.plain.state_dict().items()}
        state.update(self.buffers[0])
        self.model.load_state_dict(state)
        self.plain.load_state_dict(state)
        self.buffers = [self.buffers[0]] * self.world
        self.take_weights()

    def do_freeze(self) -> None:
        """Freeze or unfreeze some parameters. The layer ``first`` stays trained."""
        if self.count:
            return
        names = [name for name in self.weights if not name.startswith("first")]
        flag = self.draw.random() < 0.5
        for name in self.draw.sample(names, self.draw.randint(1, min(4, len(names)))):
            self.thawed |= flag and not self.weights[name].requires_grad
            for model in self.models:
                model.get_parameter(name).requires_grad_(flag)
        self.average = self.saved = None  # their sets of parameters are fixed when they begin

    def do_offload_states(self) -> None:
        include = self.draw.choice([None, ["optim_states"], ["hp_params"], ["lp_params"], ["lp_grads", "optim_states"]])
        self.optimizer.offload_states(**({} if include is None else {"include": include}))
        self.optimizer.reload_states()

    # Settings and states.

    def do_rate(self) -> None:
        if self.count and self.managed:  # param_groups is not available inside an unfinished window
            return
        index, factor = self.draw.randrange(2), self.draw.choice([0.9, 1.1])
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.param_groups[index]["lr"] *= factor

    def do_add_group(self) -> None:
        if self.count or not self.late:
            return
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
            optimizer.add_param_group({"params": [model.get_parameter(name) for name in self.late], "lr": 0.02})
        self.late, self.saved, self.stored = [], None, None

    def trained_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.weights.items() if p.requires_grad}

    def do_save(self) -> None:
        if not self.count and not self.thawed:  # a state from before an unfrozen parameter joins has another partition
            states = (self.optimizer.state_dict(), self.trained_weights(), self.plain_optimizer.state_dict())
            self.saved = (copy.deepcopy(states), self.skipped)

    def do_load(self) -> None:
        if self.count:
            return
        if self.saved is None:
            self.do_save()
            self.do_window()
        if self.saved is None:  # do_save saves nothing if a parameter has been unfrozen
            return
        (own, weights, state), self.skipped = copy.deepcopy(self.saved)
        self.optimizer.load_state_dict(own)
        self.plain.load_state_dict(weights, strict=False)  # the optimizer has no frozen weights and no buffers
        self.plain_optimizer.load_state_dict(state)
        self.take_weights()
        self.average = None

    def do_save_checkpoint(self) -> None:
        if self.count:
            return
        checkpoint.save(self.folder / "saved", self.model, self.optimizer, asynchronous=self.draw.random() < 0.3)
        checkpoint.wait()
        plain = (self.plain.state_dict(), self.plain_optimizer.state_dict())
        self.stored = (copy.deepcopy(plain), self.buffers[0], self.skipped)

    def do_load_checkpoint(self) -> None:
        if self.count:
            return
        if self.stored is None:
            self.do_save_checkpoint()
            self.do_window()
        ((weights, state), buffers, self.skipped), self.average, self.saved = copy.deepcopy(self.stored), None, None
        checkpoint.load(self.folder / "saved", self.model, self.optimizer)
        self.plain.load_state_dict(weights)
        self.plain_optimizer.load_state_dict(state)
        self.take_weights()
        self.buffers = [buffers] * self.world
        self.compare()

    def do_average(self) -> None:
        if not self.count and self.average is None and not self.thawed and not self.sixteen:
            self.average = zeropp.ema(self.model, 0.9)
            self.plain_average = self.trained_weights()

    def do_wrap(self) -> None:
        if not self.count:
            self.optimizer = self.scheduler = self.average = None  # dropped, so that a new one may take over
            self.wrap()


CALLS = sorted(name.removeprefix("do_") for name in dir(Program) if name.startswith("do_"))


def message(program: Program, said: str) -> str:
    """Return the error message of a program that failed, perhaps in its constructor, and the command to repeat it."""
    have = {"spec": None, "settings": None, "done": [], **vars(program)}
    alone = f"{have['seed']} --world {dist.get_world_size()} --length {have['length']}"
    return (
        f"{FAILED} {have['seed']}: {said}\n"
        f"  alone: python -m tests.distributed.engine.test_random_programs {alone}\n"
        f"  model {have['spec']}\n  {have['settings']}\n  calls: {', '.join(have['done'])}"
    )


def run_program(seed: int, folder: Path, length: int, changed: dict[str, Any], keep: Sequence[int] | None) -> Program:
    """Run one program of ``length`` drawn calls and a last window.

    Args:
        seed: determines the program.
        folder: folder for checkpoints and offloaded tensors.
        length: number of calls.
        changed: settings that replace drawn ones.
        keep: numbers of the calls to run; None for all.

    Raises:
        AssertionError: a comparison failed or a call raised; the message has the seed and the calls.
        Invalid: plain torch cannot run the program, or its settings are refused.
    """
    calls = [random.Random(f"{seed}, call {number}").choice(CALLS) for number in range(length)]
    program = Program.__new__(Program)
    program.seed, program.length = seed, length  # used by messages
    try:
        program.__init__(seed, folder, changed)  # type: ignore[misc]
        for number, name in enumerate([*calls, "window"]):
            if keep is None or number in keep:
                program.done.append(f"{number}: {name}")
                program.draw = random.Random(f"{seed}, draws of call {number}")
                getattr(program, "do_" + name)()
        if program.count:
            program.close_window()
        program.optimizer.close()
    except Invalid:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if any(words in said for words in REFUSALS):
            raise Invalid(f"refused: {said}") from error
        raise AssertionError(message(program, said)) from error
    return program


def run_programs(seeds: Sequence[int], folder: str, length: int, keep: Sequence[int] | None = None) -> Counter[str]:
    """Run programs one after another, some a second time with a setting that must not change a bit.

    Returns:
        Counts of programs, and of the stages, kinds of parts and calls that occurred in them.
    """
    found: Counter[str] = Counter()
    control = dist.new_group()
    gone: list[Program] = []
    for seed in seeds:
        own, reason = Path(folder) / str(seed), ""
        own.mkdir(exist_ok=True)
        try:
            one = run_program(seed, own, length, {}, keep)
            made = {word.partition(": ")[2] for word in one.done if ": " in word}
            found.update([f"stage {one.settings.config['zero_optimization']['stage']}", *kinds(one.spec), *made])
            if seed % PAIRS == 0:
                changed = random.Random(seed).choice(WITHOUT_EFFECT)
                two = run_program(seed, own, length, changed, keep)
                assert one.seen == two.seen, message(two, f"other bits with {changed}")
                found["pairs"] += 1
            if seed % 5 < 2:
                with unprepared():
                    other = run_program(seed, own, length, {}, keep)
                assert one.seen == other.seen, message(other, "other bits without prepared work")
                found["unprepared"] += 1
            found["right"] += 1
            # torch takes 20 ms to destroy a gloo group and releases the interpreter lock meanwhile, so do it in a
            # thread.
            gone.append(one)
            del one
            threading.Thread(target=gone.clear).start()
        except Invalid as error:
            reason = str(error)
            found["refused" if reason.startswith("refused") else "invalid"] += 1
            gc.collect()
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason, group=control)
        assert all(bool(each) == bool(reason) for each in reasons), f"{FAILED} {seed}: only some ranks end: {reasons}"
        found.update([reason[:200]] if reason else [])
        shutil.rmtree(own, ignore_errors=True)
    return found
