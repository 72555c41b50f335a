"""Steps whose sum the host does not wait for: equal weights, states and reports, and steps that the device skips.

On CPU, sums are read late only if a test sets ``defers_read``; see [Note: sums read late].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.sums_read_late import ADAM, STATIC, Leaning, backward, numbers, wrapped
from zeropp.optimizer.step_sync import differ, differ_on_device, encode_hash


def alike(settings: dict[str, object], poisoned: int | None, by_hand: bool) -> list[str]:
    """Take five steps beside a twin whose host waits, and return texts on differences.

    Args:
        settings: settings of the configuration.
        poisoned: step in which rank 1, or the only rank, has NaN; None for no such step.
        by_hand: True to clip by ``clip_grad_norm_`` before each step.
    """
    pair = [wrapped(late, **settings) for late in (True, False)]
    wrong = []
    for step in range(5):
        seen: list[Any] = []
        for optimizer in pair:
            # One rank has NaN in one step.
            bad = step == poisoned and (not dist.is_initialized() or dist.get_rank() == 1)
            backward(optimizer, step, float("nan") if bad else 1.0)
            norm = optimizer.clip_grad_norm_(0.05).item() if by_hand else 0.0
            optimizer.step()
            values = numbers(optimizer)
            told = (optimizer.step_was_skipped, optimizer.step_was_taken, optimizer.skipped_steps, optimizer.grad_norm)
            seen.append((repr((norm, told)), values))
            optimizer.zero_grad()
        if seen[0][0] != seen[1][0]:
            wrong.append(f"step {step}: {seen[0][0]} late, {seen[1][0]} waiting")
        if not all(map(torch.equal, seen[0][1], seen[1][1])):
            wrong.append(f"step {step}: weights or states differ")
    reads = [optimizer.step_sync.reads for optimizer in pair]
    if reads != [0, 5]:
        wrong.append(f"hosts waited {reads} times")
    return wrong


PLACED: dict[str, dict[str, object]] = {
    "stage 3": {},
    "stage 3, no clipping": {"gradient_clipping": 0.0},
    "stage 1": {"stage": 1},
    "persistent, bf16": {"persist": 1000, "bf16": {"enabled": True}},
    "qgZ": {"zero_quantized_gradients": True, "zero_quantized_weights": True},
}


@pytest.mark.every(9)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("poisoned", [None, 2])
@pytest.mark.parametrize("name", PLACED)
def test_steps_are_those_of_a_host_that_waits(name: str, poisoned: int | None, by_hand: bool) -> None:
    """Weights and states have the same bits. A step with a non-finite gradient changes nothing and is counted."""
    for wrong in run_ranks(2, alike, {**STATIC, **PLACED[name]}, poisoned, by_hand):
        assert not wrong


@pytest.mark.parametrize("poisoned", [None, 2])
def test_one_rank_need_promise_nothing(poisoned: int | None) -> None:
    assert run_ranks(1, alike, {"gradient_clipping": 0.1}, poisoned, False) == [[]]


class Partly(nn.Module):
    """Model with two layers, of which only some forwards use the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if both else x


def waits(settings: dict[str, object], kind: Any, unfused: bool) -> int:
    """Return the number of times that the host waits in three steps."""
    optimizer = wrapped(True, kind, unfused=unfused, **settings)
    for step in range(3):
        backward(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.step_sync.reads


WAITING: dict[str, tuple[dict[str, object], Any, bool]] = {
    "graphs may vary": ({"static_graph": False}, torch.optim.AdamW, False),
    "no flag to look at": ({}, torch.optim.AdamW, True),
    "a first momentum": ({}, torch.optim.SGD, False),
    "carried errors": ({"zero_quantized_gradients": True, "zeropp_loco_param": {}}, torch.optim.AdamW, False),
    "differences": ({"stage": 1, "weight_codec": "delta4", "bf16": {"enabled": True}}, torch.optim.AdamW, False),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("why", WAITING)
def test_the_host_waits_only_for_results_that_it_needs(why: str) -> None:
    settings, kind, unfused = WAITING[why]
    assert run_ranks(2, waits, {**STATIC, **settings}, kind, unfused) == [3, 3]
    assert run_ranks(2, waits, STATIC, torch.optim.Adam, False) == [0, 0]


def partly_used() -> tuple[int, bool]:
    """Take two steps, of which the second leaves a layer unused.

    Returns:
        The number of times that the host waited, and True if the second step did not change the unused layer.
    """
    torch.manual_seed(0)
    model = Partly()
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), **ADAM), model, make_config())
    optimizer.step_sync.defers_read = True
    for both in (True, False):
        before = zeropp.full_state(model)["layers.1.weight"]
        model(torch.ones(2, 8), both).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.step_sync.reads, torch.equal(before, zeropp.full_state(model)["layers.1.weight"])


def test_a_parameter_that_no_rank_uses_is_not_stepped() -> None:
    assert run_ranks(1, partly_used) == [(1, True)]


def some_wait(settings: dict[str, object], factor: float) -> tuple[list[str], list[int]]:
    """Take four steps in which rank 1 does not use a parameter, beside a twin whose hosts all wait.

    Args:
        settings: settings of the configuration.
        factor: factor on the loss of the third step.

    Returns:
        Texts on differences, and the numbers of host waits of the model and of its twin.
    """
    pair, wrong = [], []
    for late in (True, False):
        torch.manual_seed(3)
        model = Leaning()
        inner = torch.optim.AdamW(model.parameters(), **ADAM)
        pair.append((model, zeropp.ZeroOptimizer(inner, model, make_config(**STATIC, **settings))))
        pair[-1][1].step_sync.defers_read = late
    for step in range(4):
        seen: list[Any] = []
        for model, optimizer in pair:
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = model(x, dist.get_rank() != 1).square().mean()
            (loss * factor if step == 2 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            told = (optimizer.step_was_skipped, optimizer.step_was_taken, optimizer.skipped_steps)
            seen.append((repr(told), numbers(optimizer)))
        if seen[0][0] != seen[1][0] or not all(map(torch.equal, seen[0][1], seen[1][1])):
            wrong.append(f"step {step}: {seen[0][0]} late, {seen[1][0]} waiting")
    return wrong, [optimizer.step_sync.reads for _, optimizer in pair]


@pytest.mark.every(8)
@pytest.mark.parametrize("factor", [1.0, float("nan")])
@pytest.mark.parametrize("settings", [{}, {"stage": 1}], ids=str)
def test_ranks_that_read_early_and_late_take_the_same_steps(settings: dict[str, object], factor: float) -> None:
    """Ranks that lack some gradients read the sum first, the other ranks read it late, and all take the same steps."""
    found = run_ranks(3, some_wait, settings, factor)
    assert [wrong for wrong, _ in found] == [[]] * 3
    assert [reads for _, reads in found] == [[0, 4], [4, 4], [0, 4]]


def norms_between() -> tuple[float | None, dict[str, float], list[float | None]]:
    """Read a step's norm after the next gradients were measured, on hosts that read late and on hosts that wait.

    Returns:
        The norm read again on the host that waits, norms of the next gradients, and the norm read on both kinds of
        host.
    """
    found: list[float | None] = []
    for late in (True, False):
        optimizer = wrapped(late, **STATIC)
        backward(optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        backward(optimizer, 1)
        norms = optimizer.grad_norms()
        found.append(optimizer.grad_norm)
    return optimizer.grad_norm, norms, found


def test_measuring_gradients_does_not_lose_the_norm_of_the_step_before() -> None:
    for norm, norms, found in run_ranks(2, norms_between):
        assert norm and norms and found == [norm, norm]


def resumed() -> list[str]:
    """Load the state of an optimizer that is not fused into a fused one, step, and return the errors.

    The loaded settings turn ``fused`` off, and torch's other implementations do not accept ``grad_scale``.
    """
    failed = []
    plain = wrapped(False, unfused=True, gradient_clipping=0.1)
    backward(plain, 0)
    plain.step()
    saved = plain.state_dict()
    for late in (True, False):
        optimizer = wrapped(late, gradient_clipping=0.1)
        backward(optimizer, 0)
        optimizer.step()
        optimizer.load_state_dict(saved)
        try:
            backward(optimizer, 1)
            optimizer.step()
        except (AssertionError, RuntimeError) as error:
            failed.append(f"late {late}: {error}")
    return failed


def test_a_state_of_an_optimizer_that_was_not_fused_goes_on() -> None:
    assert run_ranks(1, resumed) == [[]]


def twice() -> tuple[float, float]:
    """Return the norms of two steps on the same gradients, which the first step clips."""
    optimizer = wrapped(False, gradient_clipping=0.01)
    backward(optimizer, 0)
    optimizer.step()
    first = optimizer.grad_norm
    optimizer.step()
    return first or 0.0, optimizer.grad_norm or 0.0


def test_a_second_step_measures_gradients_clipped_by_the_first() -> None:
    for first, second in run_ranks(2, twice):
        assert first > 0.1 and second == pytest.approx(0.01, rel=1e-4)


def unfreezes(adds: bool) -> list[float]:
    """Return the norms of steps of a model that gets more trained parameters while the sum of a step is unread.

    Args:
        adds: True to add the new parameters as a group of their own, False if a group has them from the beginning.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    groups = model[2].parameters() if adds else model.parameters()
    optimizer: Any = zeropp.ZeroOptimizer(torch.optim.AdamW(groups, **ADAM), model, make_config(static_graph=True))
    optimizer.model = model
    optimizer.step_sync.defers_read = True
    norms = []
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            if adds:
                optimizer.add_param_group({"params": list(model[0].parameters())})
        backward(optimizer, step)
        optimizer.step()
        if step != 1:  # the sum of step 1 is read after the change
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("adds", [False, True], ids=["unfrozen", "added"])
def test_parameters_that_are_unfrozen_before_a_sum_is_read(adds: bool) -> None:
    assert all(norm > 0 for norms in run_ranks(2, unfreezes, adds) for norm in norms)
    assert all(norm > 0 for norm in run_ranks(1, unfreezes, adds)[0])


def too_large() -> tuple[list[bool], int]:
    """Take four steps. After the first step, gradients are finite and their squares overflow float32.

    Returns:
        True for each skipped step, and the number of times that the host waited.
    """
    optimizer = wrapped(True, **{**STATIC, "gradient_clipping": 0.0})
    found = []
    for step in range(4):
        backward(optimizer, step, 1e25 if step else 1.0)
        # Measure in float32, as the kernels of a GPU do.
        for gradient in optimizer.engine.gradients:
            gradient.report.reset()
            gradient.report.norms.copy_(gradient.shard.view(-1, 256).square().sum(1))
        optimizer.step()
        found.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    return found, optimizer.step_sync.reads


def test_finite_gradients_whose_squares_are_not_cost_one_step_and_are_waited_for_then() -> None:
    assert run_ranks(2, too_large) == [([False, True, False, False], 4)] * 2


def random_hashes() -> Iterator[tuple[list[int], int]]:
    generator = torch.Generator().manual_seed(1)
    for world in (1, 2, 3, 511, 1024):
        same = int(torch.randint(2**24, (1,), generator=generator))
        yield [same] * world, world
        yield [2**24 - 1] * world, world
        yield [*[2**24 - 1] * (world - 1), 0], world
        yield [*[same] * (world - 1), same ^ 1], world
        yield torch.randint(2**24, (world,), generator=generator).tolist(), world


def test_hashes_are_told_apart_on_the_device_as_on_the_host() -> None:
    for codes, world in random_hashes():
        sums = torch.tensor([encode_hash(code) for code in codes], dtype=torch.float64).sum(0)
        apart = len(set(codes)) > 1
        assert differ(sums.tolist(), world) is apart and bool(differ_on_device(sums, world)) is apart


def test_on_a_card_sums_are_read_late() -> None:
    """A new StepSync sets ``defers_read`` by the device's type alone. Other tests here that step set it themselves."""
    from zeropp.optimizer.step_sync import StepSync

    engine = mock.Mock(units=[], device=torch.device("cuda"))
    assert StepSync(engine, mock.Mock(), checks_overflow=True).defers_read
    engine.device = torch.device("cpu")
    assert not StepSync(engine, mock.Mock(), checks_overflow=True).defers_read


def test_an_event_is_asked_on_the_card_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is queried with its own GPU as the current device.

    Without ``torch.cuda.set_device`` another GPU is current, and a query there would create a context of half a
    gigabyte.
    """
    from zeropp.optimizer.step_sync import PendingSum

    current: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    event = mock.Mock(query=lambda: bool(seen.append([*current])) or len(seen) > 1)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", entered)
    card = torch.device("cuda", 1)
    vector = mock.Mock(device=card, to=lambda *_, **__: torch.ones(2))
    assert PendingSum(vector).read_sum(mock.Mock(wait_for_event=lambda arrives, _: arrives(5.0))) == [1.0, 1.0]
    assert seen == [[card], [card]] and not current
