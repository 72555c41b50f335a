"""``grad_norms()`` gives plain torch's norm of each parameter's gradient, for all parameters with a gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.default_recipe import PLACED, RECIPE, backward
from tests.support.parity import assert_close, build
from tests.support.rank_pool import run_ranks, some
from zeropp.params import gradient
from zeropp.wire import codecs
from zeropp.wire.codecs import PlainCodec, Report


def normed(settings: dict[str, object], clip: float | None) -> tuple[dict[str, float], float | None, dict[str, float]]:
    model = build(RECIPE)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, make_config(**settings))
    backward(model, 0, None)
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    norms = optimizer.grad_norms()
    optimizer.step()
    return norms, optimizer.grad_norm, optimizer.grad_norms()


@pytest.mark.parametrize("placement", some(["mics", *(name for name in PLACED if name != "mics")], len(PLACED)))
def test_norms_of_each_gradient(placement: str) -> None:
    model = build(RECIPE)
    backward(model, 0, 4)
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for norms, total, after in run_ranks(4, normed, PLACED[placement], None, local_world_size=2):
        assert norms.keys() == expected.keys() and after == norms
        assert_close(list(norms.values()), [expected[name] for name in norms], 1e-9, "norms")
        assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, total, 1e-9, "all together")
    for norms, _, _ in run_ranks(4, normed, PLACED[placement], 0.01, local_world_size=2):
        assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, 0.01, 1e-3, "clipped")


def partly() -> list[dict[str, float]]:
    """Return ``grad_norms()`` after each of three backwards in windows of two, of a model with an unused block."""
    model = Routed()
    config = make_config(gradient_accumulation_steps=2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    found = []
    for _ in range(3):
        model(torch.ones(2, 8), ((0,), (2,))).square().mean().backward()
        found.append(optimizer.grad_norms())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_norms_are_of_parameters_that_have_a_gradient() -> None:
    for first, whole, inside in run_ranks(2, partly):
        assert first == {} and inside == whole
        assert set(whole) == {f"blocks.{i}.lin.{part}" for i in (0, 2) for part in ("weight", "bias")}


class TwoDtypes(nn.Module):
    """Model of one unit with two flat buffers, because its parameters have two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.linspace(-1, 1, 700))
        self.long = nn.Parameter(torch.linspace(-2, 1, 900, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return (self.short.square().sum() + 3 * self.long.square().sum()) / 2


def of_two_dtypes() -> tuple[int, dict[str, float]]:
    model = TwoDtypes()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model().backward()
    return len(optimizer.engine.trainable_buffers), optimizer.grad_norms()


def test_norms_of_a_unit_with_two_buffers() -> None:
    expected = {"short": TwoDtypes().short.norm().item(), "long": 3 * TwoDtypes().long.norm().item()}
    for buffers, norms in run_ranks(2, of_two_dtypes):
        assert buffers == 2 and norms == pytest.approx(expected, rel=1e-6)


class Passes:
    """Counter of passes that only measure whole shards, and of sums of one number over the ranks."""

    def __init__(self, optimizer: zeropp.ZeroOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured = self.numbers = 0
        measure, decode, add_up = Report.measure, PlainCodec.decode_sum_, optimizer.engine.comm.sum
        inside = threading.local()

        def measured(report: Report, values: torch.Tensor) -> None:
            self.measured += not getattr(inside, "sum", False)
            measure(report, values)

        def summed(*arguments: object, **options: object) -> None:
            inside.sum = True
            decode(*arguments, **options)  # type: ignore[arg-type]
            inside.sum = False

        def added(tensor: torch.Tensor) -> None:
            self.numbers += tensor.numel() == 1
            add_up(tensor)

        monkeypatch.setattr(Report, "measure", measured)
        monkeypatch.setattr(PlainCodec, "decode_sum_", summed)
        monkeypatch.setattr(optimizer.engine.comm, "sum", added)

    def taken(self) -> tuple[int, int]:
        found = self.measured, self.numbers
        self.measured = self.numbers = 0
        return found


def passes_of_steps() -> dict[str, tuple[int, int]]:
    """Return (measuring passes over shards, sums of one number over the ranks) for one step of each kind."""
    model = build(RECIPE)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(gradient_clipping=0.1))
    groups = inner.param_groups  # read now, because reading optimizer.param_groups makes the next step measure again
    found: dict[str, tuple[int, int]] = {}

    def one(name: str, edit: Callable[[], object] = lambda: None) -> None:
        backward(model, 0, None)
        edit()
        optimizer.step()
        optimizer.zero_grad()
        found[name] = passes.taken()

    with pytest.MonkeyPatch.context() as monkeypatch:
        passes = Passes(optimizer, monkeypatch)
        one("first")
        one("plain")
        one("edited", lambda: [p.grad.mul_(2.0) for p in groups[0]["params"] if p.grad is not None])
        one("groups were asked for", lambda: optimizer.param_groups)
        one("after that")
    return found


def test_norms_and_flags_come_out_of_the_last_sum() -> None:
    for found in run_ranks(2, passes_of_steps):
        assert found["plain"] == found["after that"] == (0, 1), "no separate measuring pass, and one sum for the flag"
        assert found["edited"][0] > 0 and found["groups were asked for"][0] > 0, found


def flags_of_a_window(managed: bool) -> list[int]:
    model = build(RECIPE)
    config = make_config(gradient_accumulation_steps=3, managed_gradient_accumulation=managed)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, config)
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        passes = Passes(optimizer, monkeypatch)
        for micro in range(3):
            backward(model, micro, None)
            found.append(passes.taken()[1])
            if managed or micro == 2:
                optimizer.step()
                optimizer.zero_grad()
            passes.taken()
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(("managed", "expected"), [(True, [0, 0, 1]), (False, [1, 1, 1])])
def test_the_worlds_flag_is_asked_for_where_a_step_may_follow(managed: bool, expected: list[int]) -> None:
    """The ranks sum the non-finite flag in each backward after which a step may follow.

    In a managed window this is the last backward. If the user decides when to step, this is every backward.
    """
    assert run_ranks(2, flags_of_a_window, managed) == [expected, expected]


def norm_of_data_edits() -> tuple[float | None, float]:
    """Edit gradients through ``.data``, which raises no version, before a step.

    Returns:
        The norm of the step, and the norm of one backward. Two backwards are added and multiplied by 0.25, so the first
        norm is half of the second.
    """
    model = build(RECIPE)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, make_config())
    backward(model, 0, None)
    whole = sum(norm**2 for norm in optimizer.grad_norms().values()) ** 0.5
    backward(model, 0, None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.25)
    optimizer.step()
    return optimizer.grad_norm, whole


def test_edits_through_data_are_measured() -> None:
    for found, whole in run_ranks(2, norm_of_data_edits):
        assert_close(found, whole / 2, 1e-6, "a quarter of two equal gradients")


def alone(
    by_kernels: bool, dtype: torch.dtype, settings: dict[str, object]
) -> tuple[dict[str, torch.Tensor], list[float | None], int]:
    """Train four steps on one rank.

    Args:
        by_kernels: True to add gradients to shards by one kernel, as on a GPU; False to do as on CPU.
        dtype: dtype of the model.
        settings: further keys for ``make_config``.

    Returns:
        Whole weights, norms, and the number of messages that were allocated.
    """
    torch.manual_seed(3)
    model = Routed().to(dtype)
    messages = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if by_kernels:
            for module in (codecs, gradient):
                monkeypatch.setattr(module, "summed_by_kernels", lambda out: out.dtype == torch.float32)

        def noting(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def noted(*given: Any) -> torch.Tensor:
                messages.append(given[-1].type != "meta")
                return empty(*given)

            return noted

        for codec in (PlainCodec, codecs.BlockCodec):
            monkeypatch.setattr(codec, "empty", noting(codec.empty))
        config = make_config(gradient_accumulation_steps=2, gradient_allreduce_op="sum", **settings)
        optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, config)
        norms = []
        for step in range(4):
            for micro in range(2):
                # The route leaves blocks out, so a block may have no gradient in one or both of a step's backwards.
                route = ((0,), (2,)) if micro or step % 2 else ((0,), (1,))
                x = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * step + micro), dtype=torch.float64)
                optimizer.backward(model(x.to(dtype), route).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        return zeropp.full_state(model), norms, sum(messages)


# Quantized weights are left out: they are rounded on one rank, too, so that the number of ranks changes no weight.
CODED: dict[str, object] = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}


@pytest.mark.parametrize("settings", [{}, CODED], ids=["plain", "codecs"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.campaign)]
)
def test_one_rank_forms_no_message(dtype: torch.dtype, settings: dict[str, object]) -> None:
    [(weights, norms, messages)] = run_ranks(1, alone, False, dtype, {}, init=False)
    [(found, measured, made)] = run_ranks(1, alone, True, dtype, settings, init=False)
    assert messages == made == 0
    assert_close(measured, norms, 1e-6, "norms")
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
