"""Units prepare their work once, and prepare it again after each event that changes it.

Each case trains until all work is prepared and each unit has one gradient hook. Then an event follows, and more steps.
The bits must be those of a training that prepares nothing. Another test removes pieces of code that notice such events,
one at a time, and sees other bits, an error, or late reductions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeropp
from tests.support.branching_models import Routed, chain, make_config, worst
from tests.support.rank_pool import run_ranks
from tests.support.source_edits import edit
from tests.support.unprepared import unprepared
from zeropp.comm.hops import Hop
from zeropp.comm.streams import CommStreams
from zeropp.engine.hooks import _gradient_ready
from zeropp.order.reductions import Arrivals, Reductions
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient, ReduceWork
from zeropp.params.parameter_swap import Swap
from zeropp.params.unit import Unit

WIDTH, UNITS = 8, 3


class Pair(nn.Module):
    """Two layers, which may run in either order, or only one of them. The order changes which gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turned: bool, alone: bool) -> Tensor:
        layers = [self.two, self.one] if turned else [self.one, self.two]
        for layer in layers[:1] if alone else layers:
            x = x + torch.tanh(layer(x))
        return x


class Pairs(nn.Module):
    """Units of two layers. The attributes are settings of the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(UNITS))
        self.turned = self.alone = self.again = self.twice = self.reentrant = self.short = False

    def forward(self, x: Tensor) -> Tensor:
        for block in [each for each in self.blocks[self.short :] for _ in range(1 + self.twice)]:
            run = functools.partial(checkpoint, block, use_reentrant=self.reentrant) if self.again else block
            x = x.requires_grad_() if x.is_leaf and self.reentrant else x
            x = run(x, self.turned, self.alone)
        return x


class Training:
    """A training of one rank, with losses and whole weights to compare."""

    def __init__(self, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = Pairs()
        if settings.pop("frozen", False):
            self.model.blocks[1].two.requires_grad_(False)
        emptied = settings.pop("emptied", False)
        dtype: dict[str, object] = {} if "fp16" in settings else {"bf16": {"enabled": True}}
        config = make_config(gradient_clipping=0.5, reuse=0, **dtype, **settings)
        adam = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer = zeropp.ZeroOptimizer(adam, self.model, config)
        for block in self.model.blocks if emptied else ():
            # The user's hook removes the gradient, so the parameter is not stepped.
            block.one.bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        self.draw = torch.Generator().manual_seed(dist.get_rank())
        self.seen: list[Tensor] = []

    def backward(self) -> None:
        loss = self.model(torch.randn(2, WIDTH, generator=self.draw)).square().mean()
        self.optimizer.backward(loss)
        self.seen.append(loss.detach().clone())

    def steps(self, number: int = 4) -> None:
        for _ in range(number):
            for _ in range(self.optimizer.engine.accumulation.steps):
                self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def result(self) -> list[Tensor]:
        return [*self.seen, *zeropp.full_state(self.model).values()]


def turned(t: Training) -> None:
    """Change the order of the gradients for some steps."""
    t.model.turned = True
    t.steps()
    t.model.turned = False


def alone(t: Training) -> None:
    """Leave one layer of each unit without a gradient."""
    t.model.alone = True
    t.steps()
    t.model.alone = False


def alone_turned(t: Training) -> None:
    """Leave the layer whose gradient comes last without a gradient, once."""
    t.model.alone = t.model.turned = True
    t.steps(1)
    t.model.alone = t.model.turned = False


def recomputed(t: Training) -> None:
    t.model.again = True
    t.steps()
    t.model.again = False


def frozen(t: Training) -> None:
    """Freeze the parameters whose gradients come last, and train them again later."""
    for trained in (False, True):
        for block in t.model.blocks:
            block.one.requires_grad_(trained)
        t.steps()


def unfrozen(t: Training) -> None:
    t.model.blocks[1].two.requires_grad_(True)
    t.steps()


def replaced(t: Training) -> None:
    """Set ``.data`` of all tensors of the group, which moves the main weights to other memory."""
    with torch.no_grad():
        for each in t.optimizer.param_groups[0]["params"]:
            each.data = each.data * 0.5


def kept(t: Training) -> None:
    """Keep the gradients of a step over ``zero_grad()``; they keep their values, as in plain torch."""
    t.backward()
    gradients = [each.grad for each in t.optimizer.param_groups[0]["params"]]
    before = [None if each is None else each.as_subclass(Tensor).clone() for each in gradients]
    t.optimizer.step()
    after_step = [None if each is None else each.as_subclass(Tensor).clone() for each in gradients]
    t.optimizer.zero_grad()
    t.steps(2)
    assert any(each is not None for each in before)
    for each, wanted in zip(gradients, after_step, strict=True):
        if each is not None and wanted is not None and each.numel() > 2:  # not a marker
            assert torch.equal(each.as_subclass(Tensor), wanted), "zero_grad() has freed a gradient that the user keeps"


def evaluated(t: Training) -> None:
    with torch.no_grad():
        t.model.alone = True
        t.model(torch.ones(2, WIDTH))
        t.model.alone = False


def saved_and_loaded(t: Training) -> None:
    state = {name: value.clone() for name, value in t.model.state_dict().items()}
    t.steps(1)
    t.model.load_state_dict(state)


def averaged(t: Training) -> None:
    average = zeropp.ema(t.model, decay=0.5)
    t.steps(1)
    average.update()
    with average.applied(), torch.no_grad():
        t.seen.append(t.model(torch.ones(2, WIDTH)).detach().clone())


def failed(t: Training) -> None:
    """Let a backward fail half-way; its gradients are dropped."""
    handle = t.model.blocks[1].one.register_full_backward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        t.backward()
    handle.remove()
    t.optimizer.zero_grad(now=True)


def penalized(t: Training) -> None:
    """Run ``torch.autograd.grad`` through the model, which accumulates nothing."""
    x = torch.ones(2, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(t.model(x).sum(), x)
    t.seen.append(gradient.clone())


def twice(t: Training) -> None:
    """Use each unit twice, once before the order is known and then in a known order."""
    for number in (1, 4):
        t.model.twice = True
        t.steps(number)
        t.model.twice = False
        t.steps(2)


def twice_in_two_backwards(t: Training) -> None:
    """Use each unit twice, in backwards of their own inside the backward, so that each brings the same gradients."""
    t.model.again = t.model.reentrant = True
    t.steps(2)
    twice(t)
    t.model.again = t.model.reentrant = False


def shortened(t: Training) -> None:
    """Leave out the first unit until this is a known order, and use it again."""
    for number in (4, 1, 1):
        t.model.short = True
        t.steps(number)
        t.model.short = False
        t.steps(1)


def scaled(t: Training) -> None:
    """Take steps in which the loss scale grows."""
    before = t.optimizer.loss_scale
    t.steps()
    assert t.optimizer.loss_scale > before


def hooked(t: Training) -> None:
    """Register hooks that halve gradients. zeropp takes the gradients behind them."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in t.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    t.steps()
    turned(t)


class Special(nn.Parameter):
    """A class that the user sets."""


def reclassed(t: Training) -> None:
    """Set the class of released parameters, and of one that is unsharded."""
    first, second = t.model.blocks[0].one, t.model.blocks[1].one
    first.weight.__class__ = Special
    with first.register_forward_pre_hook(lambda *_: setattr(first.bias, "__class__", Special)):
        t.steps(2)
    found = [type(p)._zeropp_own_class for p in (first.weight, first.bias, second.weight)]  # type: ignore[attr-defined]
    assert found == [Special, Special, nn.Parameter]


EVENTS: dict[str, tuple[Callable[[Training], None], dict[str, object]]] = {
    "gradients in another order": (turned, {}),
    "no gradient of some": (alone, {}),
    "no gradient of the last": (alone_turned, {}),
    "no gradient of the last, accumulated": (alone_turned, {"gradient_accumulation_steps": 2}),
    "in another order, deferred": (turned, {"gradient_accumulation_steps": 2, "defer_cross_reduction": True}),
    "recomputed": (recomputed, {}),
    "frozen": (frozen, {}),
    "unfrozen": (unfrozen, {"frozen": True}),
    "weights replaced": (replaced, {}),
    "weights replaced, quantized": (replaced, {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
    "gradients kept": (kept, {}),
    "evaluated": (evaluated, {}),
    "loaded": (saved_and_loaded, {}),
    "averaged": (averaged, {}),
    "failed": (failed, {}),
    "penalized": (penalized, {}),
    "used twice": (twice, {}),
    "used twice, accumulated": (twice, {"gradient_accumulation_steps": 2}),
    "used twice, in two backwards": (twice_in_two_backwards, {}),
    "shortened": (shortened, {}),
    "shortened, persistent": (shortened, {"persist": 10**6}),
    "the loss scale grows": (scaled, {"fp16": {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2}}),
    "hooks of the user": (hooked, {}),
    "hooks that remove gradients": (turned, {"emptied": True}),
    "classes of the user": (reclassed, {}),
}


def trained(name: str, fault: str = "") -> list[Tensor]:
    """Train around an event, and return losses and weights."""
    event, settings = EVENTS[name]
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        t = Training(**settings)
        t.steps()
        event(t)
        t.steps()
        return t.result()


def pair_of_runs(name: str) -> list[int]:
    """Return the positions of results that differ between a training with prepared work and one without."""
    own = trained(name)
    with unprepared():
        other = trained(name)
    return [place for place, (a, b) in enumerate(zip(own, other, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize("name", EVENTS)
def test_prepared_work_changes_no_bit(name: str) -> None:
    assert run_ranks(2, pair_of_runs, name) == [[]] * 2


def _old_shard() -> Any:
    """Return a patch that takes prepared reductions for right after the shard has moved."""
    prepare = Gradient.prepare_reduce

    def old(self: Gradient, *args: Any, last: ReduceWork | None = None, **kwargs: Any) -> ReduceWork:
        if last is not None:
            last.shard = self.shard
        return prepare(self, *args, last=last, **kwargs)

    return mock.patch.object(Gradient, "prepare_reduce", old)


_ADVANCE = "self.generation.advance()"
# Faults: each removes one piece of code that notices some event.
FAULTS: dict[str, Callable[[], Any]] = {
    "units get other buffers": edit(Unit, "replace", _ADVANCE, "pass"),
    "main weights move": edit(FlatBuffer, "move_main", _ADVANCE, "pass"),
    "the shard moves": _old_shard,
    "another scale": edit(Gradient, "prepare_reduce", "last.reduction.scale = scale", "pass"),
    "not all gradients came": edit(Arrivals, "count", "hooks.all_arrived()", "True"),
    "gradients came without a hook": edit(Arrivals, "recount", "hooks.arrived()", "[]"),
    "gradients without a hook at the end": edit(Arrivals, "end", "self.recount(index)", "pass"),
    "a use before the last gradient": edit(Reductions, "before_use", "self.arrivals.recount(index)", "pass"),
    "hooks of the user run later": edit(Arrivals, "run_last", "put_hook_last(", "(lambda *_: None)("),
    "a class while released": edit(Swap, "show", "parameter.__class__ is not guarded", "False"),
    "a class while unsharded": edit(Swap, "hide", "parameter.__class__ is not own", "False"),
}
SHOWN = [
    ("units get other buffers", "unfrozen"),
    ("main weights move", "weights replaced"),
    ("main weights move", "weights replaced, quantized"),
    ("the shard moves", "gradients kept"),
    ("another scale", "the loss scale grows"),
    ("not all gradients came", "gradients in another order"),
    ("gradients came without a hook", "no gradient of the last"),
    ("gradients without a hook at the end", "no gradient of the last"),
    ("a use before the last gradient", "no gradient of the last, accumulated"),
    ("hooks of the user run later", "hooks that remove gradients"),
    ("a class while released", "classes of the user"),
    ("a class while unsharded", "classes of the user"),
]


def with_fault(fault: str, name: str) -> bool:
    """Return True if a training with a fault differs from one without, raises an error, or sends gradients late."""
    send = Reductions.send_unsent
    late: list[int] = []

    def noted(self: Reductions, index: int) -> None:
        late.append(index)
        send(self, index)

    with mock.patch.object(Reductions, "send_unsent", noted):
        own = trained(name)
        usual = len(late)
        try:
            other = trained(name, fault)
        except (RuntimeError, AssertionError):
            return True
    return len(late) > 2 * usual or any(not torch.equal(a, b) for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize(("fault", "name"), SHOWN)
def test_each_event_must_be_noticed(fault: str, name: str) -> None:
    assert any(run_ranks(2, with_fault, fault, name))


def gathered_again() -> tuple[int, list[Tensor]]:
    """Train four ranks. Rank 0 does not use a unit that the others use twice, but must gather it twice, too.

    Returns:
        The number of gathers that began while one of the same unit was in flight, and losses and weights.
    """
    torch.manual_seed(0)
    model = Routed(2)
    settings = make_config(bf16={"enabled": True}, zero_quantized_weights=True, reuse=0, prefetch=0, hang_timeout=2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, settings)
    draw = torch.Generator().manual_seed(dist.get_rank())
    gather, prepare, again, seen = Hop.all_gather, Unit.prepare_gather, 0, []

    def slow(hop: Hop, *args: Any) -> None:
        if hop.spec.link == "local":
            time.sleep(0.02)
        gather(hop, *args)

    def noted(unit: Unit, comm_streams: CommStreams) -> Any:
        nonlocal again
        again += unit.gathering is not None
        return prepare(unit, comm_streams)

    with mock.patch.object(Hop, "all_gather", slow), mock.patch.object(Unit, "prepare_gather", noted):
        for step in range(4):
            skips = step > 1 and dist.get_rank() == 0
            loss = model(torch.randn(2, WIDTH, generator=draw), chain(0, 0, 1)[2 * skips :]).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
    return again, [*seen, *zeropp.full_state(model).values()]


def gathered_again_in_two_ways() -> tuple[int, bool]:
    """Return the first result of `gathered_again`, and True if losses and weights are those without prepared work."""
    again, own = gathered_again()
    with unprepared():
        _, other = gathered_again()
    return again, all(map(torch.equal, own, other))


def test_a_unit_gathered_again_while_its_gather_is_in_flight() -> None:
    found = run_ranks(4, gathered_again_in_two_ways, local_world_size=2)
    assert found[0][0] > 0 and all(same for _, same in found)


def with_one_gather() -> str:
    """Return the error if two gathers in flight share their prepared work."""
    with edit(Unit, "prepare_gather", " or self.gathering is not None", "")():
        try:
            gathered_again()
        except (RuntimeError, IndexError) as error:
            return str(error)
    return ""


def test_gathers_in_flight_must_not_share_their_work() -> None:
    assert all(run_ranks(4, with_one_gather, local_world_size=2))


def with_users_hooks(when: str) -> float:
    """Train with hooks that change gradients; return the largest difference from plain torch.

    All ranks have the same batch, so the mean of their gradients is the gradient of plain torch.

    Args:
        when: time at which the hooks are registered.
    """
    torch.manual_seed(0)
    model = Pairs().double()
    plain = copy.deepcopy(model)

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(1 + parameter.grad.abs().mean())

    def hook(each: nn.Module) -> None:
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(change)

    if when == "before wrapping":
        hook(plain)
        hook(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, make_config(reuse=0))
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(12):
        if step == 5 and when == "after wrapping":
            hook(plain)
            hook(model)
        model.turned = plain.turned = step > 8
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for each, steps in ((model, optimizer), (plain, other)):
            out = each(x)
            if step == 5 and when == "in a backward":
                out.register_hook(lambda gradient, each=each: hook(each))
            out.square().mean().backward()
            steps.step()
            steps.zero_grad()
    return worst(zeropp.full_state(model), dict(plain.state_dict()))


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "in a backward"])
def test_hooks_of_the_user_change_gradients_before_they_are_reduced(when: str) -> None:
    assert max(run_ranks(2, with_users_hooks, when)) <= 1e-12


def hooks_called() -> tuple[int, int]:
    """Return the calls of gradient hooks in the first backward and in the fifth."""
    counts = []
    with mock.patch("zeropp.engine.hooks._gradient_ready", side_effect=_gradient_ready) as hook:
        t = Training()
        for _ in range(5):
            hook.reset_mock()
            t.steps(1)
            counts.append(hook.call_count)
    return counts[0], counts[-1]


def test_one_hook_a_unit() -> None:
    assert run_ranks(2, hooks_called) == [(4 * UNITS, UNITS)] * 2


def gradient_bytes() -> list[int]:
    """Return the bytes of gradient shards through two steps, the second one with ``set_to_none=False``."""
    t = Training()
    found = []

    def look() -> None:
        found.append(sum(g.shard.untyped_storage().nbytes() for g in t.optimizer.engine.gradients))

    for to_none in (True, False):
        look()
        t.backward()
        look()
        t.optimizer.step()
        look()
        t.optimizer.zero_grad(set_to_none=to_none)
        look()
    return found


def test_gradients_have_memory_from_a_reduction_to_zero_grad() -> None:
    plan = zeropp.plan.memory(Pairs(), make_config(bf16={"enabled": True}), 2)
    whole = plan.gradients
    assert whole > 0 and run_ranks(2, gradient_bytes) == [[0, whole, whole, 0, 0, whole, whole, whole]] * 2


def sizes_allocated() -> list[list[int]]:
    """Return the sizes to which storages are resized in each of six steps, in order."""
    t = Training()
    resize = torch.UntypedStorage.resize_
    steps = []
    for _ in range(6):
        sizes: list[int] = []

        def noted(storage: torch.UntypedStorage, nbytes: int, sizes: list[int] = sizes) -> Any:
            sizes.append(nbytes)
            return resize(storage, nbytes)

        with mock.patch.object(torch.UntypedStorage, "resize_", noted):
            t.steps(1)
        steps.append(sizes)
    return steps


def test_memory_is_allocated_in_the_same_order_every_step() -> None:
    for steps in run_ranks(2, sizes_allocated):
        assert steps[-1] and steps[-1] == steps[-2] == steps[-3]
