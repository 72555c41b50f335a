"""Stepping tensors in chunks by a rule gives the bits and states of torch's own fused optimizers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from zeropp.optimizer.fused import CUT, Rule, SliceStep, rule_of

ADAM = [
    {},
    {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-6},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    {"amsgrad": True, "lr": 0.0},
]
CASES = [
    *((AdamW, options) for options in ADAM),
    *((Adam, options) for options in ADAM),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (SGD, {}),
    (SGD, {"weight_decay": 0.2, "maximize": True}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (SGD, {"momentum": 0.5, "lr": 0.0}),
    (Adagrad, {}),
    (Adagrad, {"lr_decay": 0.3, "weight_decay": 0.1, "eps": 1e-5}),
    (Adagrad, {"initial_accumulator_value": 0.7, "maximize": True}),
    (Adagrad, {"lr": 0.0, "lr_decay": 0.1}),
]
TINY = [256, 257, 5 * CUT - 1, 40 * CUT + 131]


def gradient(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random values [numel]; one eighth of them subnormal, zero, huge, infinite or NaN."""
    found = torch.randn(numel, generator=generator, dtype=dtype)
    smallest = torch.finfo(dtype).tiny
    odd = torch.tensor([smallest / 64, -smallest / 8, 0.0, -0.0, 1e30, -1e25, torch.inf, -torch.inf, torch.nan])
    where = torch.randint(numel, (numel // 8,), generator=generator)
    found[where] = odd.to(dtype)[torch.randint(len(odd), (len(where),), generator=generator)]
    return found


def cuts(numel: int, chooser: random.Random) -> Iterator[slice]:
    """Yield chunks of a tensor of random lengths; each begins at a multiple of `CUT`."""
    start = 0
    while start < numel:
        stop = start + CUT * chooser.randint(1, 9)
        yield slice(start, stop)
        start = stop


def step_cut(
    rule: Rule, optimizer: Optimizer, param: Tensor, grad: Tensor, scale: Tensor | None, chooser: random.Random
) -> None:
    """Take a step of ``optimizer`` by its rule, chunk by chunk in a random order."""
    settings = rule.snapshot(optimizer.param_groups[0])
    state = optimizer.state.get(param, {})
    step = rule.begin_step(settings, param.detach(), state)
    if state:
        optimizer.state[param] = state
    chunks = list(cuts(param.numel(), chooser))
    chooser.shuffle(chunks)
    with torch.no_grad():
        for chunk in chunks:
            states = {name: state[name][chunk] for name in rule.states(settings)}
            rule.step_slice(SliceStep(param[chunk], grad[chunk], states, settings, step, scale))


def same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    bits = torch.int64 if one.dtype == torch.float64 else torch.int32
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_chunks_step_like_the_whole(kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Weights, gradients and saved states are equal over four steps with a changing lr; every second one is scaled."""
    for seed, numel in enumerate(TINY):
        generator, chooser = torch.Generator().manual_seed(seed), random.Random(seed)
        start = torch.randn(numel, generator=generator, dtype=dtype)
        whole, cut = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        theirs, ours = kind([whole], fused=True, **options), kind([cut], fused=True, **options)  # type: ignore[call-arg]
        rule = rule_of(ours)
        assert rule is not None
        for step in range(4):
            whole.grad = gradient(numel, dtype, generator)
            grad, scale = whole.grad.clone(), torch.tensor(3.7) if step % 2 else None
            theirs.grad_scale, theirs.found_inf = scale, None  # type: ignore[attr-defined]
            step_cut(rule, ours, cut, grad, scale, chooser)
            theirs.step()
            assert same_bits(cut.data, whole.data)
            assert same_bits(grad, whole.grad)
            for optimizer in (theirs, ours):
                optimizer.param_groups[0]["lr"] *= 0.7
        saved, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert saved.keys() == expected.keys()
        assert list(saved.get(0, {})) == list(expected.get(0, {}))
        for key, value in expected.get(0, {}).items():
            assert same_bits(saved[0][key], value), key


def test_odd_cuts_differ() -> None:
    """Chunks that end inside a SIMD vector give other bits, so chunks begin at multiples of `CUT`.

    This also shows that the test above would notice a difference in rounding.
    """
    generator = torch.Generator().manual_seed(0)
    optimizer = AdamW([nn.Parameter(torch.randn(4096, generator=generator))])
    rule = rule_of(optimizer)
    assert rule is not None
    settings, grad = rule.snapshot(optimizer.param_groups[0]), torch.randn(4096, generator=generator)
    found = []
    for size in (4096, 3):
        param, state = torch.zeros(4096), dict[str, Any]()
        for _ in range(3):
            step = rule.begin_step(settings, param, state)
            for start in range(0, 4096, size):
                part = slice(start, start + size)
                states = {name: state[name][part] for name in rule.states(settings)}
                rule.step_slice(SliceStep(param[part], grad[part], states, settings, step))
        found.append(state["exp_avg_sq"])
    assert not torch.equal(*found)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Adam, {"amsgrad": True}),
        (AdamW, {}),
        (SGD, {}),
        (SGD, {"momentum": 0.9}),
        (Adagrad, {"initial_accumulator_value": 0.7}),
    ],
)
def test_fresh_states_are_torch_s(
    kind: type[Optimizer], options: dict[str, Any], fused: bool | None, default: torch.dtype
) -> None:
    """After one step, saved states have torch's keys, order, dtypes and shapes, and nearly torch's values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        theirs_param, ours_param = (nn.Parameter(torch.ones(300, dtype=torch.float32)) for _ in range(2))
        theirs = kind([theirs_param], fused=fused, **options)  # type: ignore[call-arg]
        ours = kind([ours_param], fused=fused, **options)  # type: ignore[call-arg]
        if kind is Adagrad:  # the case of a group added later, which has no states yet
            ours.state.clear()
        theirs_param.grad = torch.ones_like(theirs_param)
        theirs.step()
        rule = rule_of(ours)
        assert rule is not None
        step_cut(rule, ours, ours_param, torch.ones(300, dtype=torch.float32), None, random.Random(0))
    finally:
        torch.set_default_dtype(before)
    saved, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    about = [
        {number: [(key, v.dtype, v.shape, v.device) for key, v in state.items()] for number, state in states.items()}
        for states in (saved, expected)
    ]
    assert about[0] == about[1]
    for key, value in expected.get(0, {}).items():
        assert torch.allclose(saved[0][key], value), key


class Renamed(AdamW):
    """A subclass that steps like its parent, so the parent's rule applies."""


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnStates(SGD):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


@pytest.mark.parametrize("kind", [Renamed, Adam, AdamW, SGD, Adagrad])
def test_kinds_that_have_a_rule(kind: type[Optimizer]) -> None:
    assert rule_of(kind([nn.Parameter(torch.ones(3))])) is not None  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [OwnStep, OwnStates, RMSprop])
def test_kinds_that_have_none(kind: type[Optimizer]) -> None:
    assert rule_of(kind([nn.Parameter(torch.ones(3))])) is None  # type: ignore[call-arg]


@pytest.mark.parametrize("asked", ["differentiable", "capturable"])
def test_groups_that_ask_for_more_have_none(asked: str) -> None:
    """A group with this setting rules out the whole optimizer, even if it is not the first group."""
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], asked: True})
    assert rule_of(optimizer) is None
    optimizer.param_groups[1][asked] = False
    optimizer.param_groups[1]["foreach"] = True
    assert rule_of(optimizer) is not None


def test_snapshots_are_plain_numbers_and_stay() -> None:
    lr, betas = torch.tensor(1e-3), (torch.tensor([0.5]), torch.tensor(0.25))
    optimizer = AdamW([nn.Parameter(torch.ones(3))], lr=lr, betas=betas)
    rule = rule_of(optimizer)
    assert rule is not None
    settings = rule.snapshot(optimizer.param_groups[0])
    before = dict(settings.numbers)
    lr.fill_(5.0)
    betas[1].fill_(0.75)
    optimizer.param_groups[0].update(lr=7.0, amsgrad=True, weight_decay=3.0, decoupled_weight_decay=False)
    assert settings.numbers == before and settings.decoupled
    assert all(type(number) in (float, bool) for number in before.values())
    assert (before["lr"], before["beta1"], before["beta2"]) == (float(torch.tensor(1e-3)), 0.5, 0.25)
    with pytest.raises(TypeError):
        settings.numbers["lr"] = 1.0  # type: ignore[index]


def test_momentum_that_begins_late_begins_with_a_gradient() -> None:
    """The first step with momentum sets the buffer to the gradient, as in torch; None counts as no buffer."""
    whole, cut = (nn.Parameter(torch.ones(700)) for _ in range(2))
    theirs, ours = SGD([whole], fused=True), SGD([cut], fused=True)
    ours.state[cut]["momentum_buffer"] = None
    rule = rule_of(ours)
    assert rule is not None
    for momentum in (0.0, 0.9, 0.9):
        for optimizer in (theirs, ours):
            optimizer.param_groups[0].update(momentum=momentum, dampening=0.5)
        whole.grad = torch.arange(700.0)
        theirs.step()
        step_cut(rule, ours, cut, torch.arange(700.0), None, random.Random(1))
        assert same_bits(cut.data, whole.data)
    assert same_bits(ours.state[cut]["momentum_buffer"], theirs.state[whole]["momentum_buffer"])


def test_amsgrad_set_late_is_refused() -> None:
    param = torch.ones(8)
    optimizer = AdamW([nn.Parameter(param)])
    rule, state = rule_of(optimizer), dict[str, Any]()
    assert rule is not None
    rule.begin_step(rule.snapshot(optimizer.param_groups[0]), param, state)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RuntimeError, match="no max_exp_avg_sq: amsgrad was set"):
        rule.begin_step(rule.snapshot(optimizer.param_groups[0]), param, state)
    assert state["step"] == 1
