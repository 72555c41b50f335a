"""Cached weights are refreshed once per step and never used at an old version; a use waits only for its own refresh."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Block, apart, make_config
from tests.support.parity import assert_close
from tests.support.rank_pool import RankFailure, run_ranks, some, spread
from zeropp.order.refresh import Refresh
from zeropp.params.flat_buffer import FlatBuffer

KEPT: dict[str, dict[str, object]] = {
    "hpz": {"zero_hpz_partition_size": 2},
    "stage 2": {"stage": 2, "overlap_comm": True},
    "persistent": {"persist": 10_000},
}


class Stack(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(settings: dict[str, object], **more: object) -> tuple[Stack, zeropp.ZeroOptimizer]:
    model = Stack().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, zeropp.ZeroOptimizer(inner, model, make_config(**{**settings, **more}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 16, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def slowly(settings: dict[str, object], seconds: float) -> tuple[float, float, list[float]]:
    """Take a step and run a forward while each refresh takes ``seconds``.

    Returns:
        Seconds that ``step()`` takes, seconds of the forward, and seconds from the end of ``step()`` until each block
        has run.
    """
    model, optimizer = wrapped(settings)
    train(model, optimizer, 3)
    original = FlatBuffer.refresh
    began: list[float] = []

    def refresh(buffer: FlatBuffer, differs: Callable[[FlatBuffer], bool]) -> Iterator[None]:
        time.sleep(seconds)
        yield from original(buffer, differs)

    for block in model.blocks:
        block.register_forward_hook(lambda *_: began.append(time.monotonic()))
    optimizer.zero_grad()
    model(torch.ones(2, 16, dtype=torch.float64)).square().mean().backward()
    FlatBuffer.refresh = refresh  # type: ignore[method-assign]
    try:
        start = time.monotonic()
        optimizer.step()
        stepped = time.monotonic()
        began.clear()
        with torch.no_grad():
            model(torch.ones(2, 16, dtype=torch.float64))
        done = time.monotonic()
    finally:
        FlatBuffer.refresh = original  # type: ignore[method-assign]
        optimizer.engine.wait_for_refresh()
    return stepped - start, done - stepped, [moment - stepped for moment in began]


@pytest.mark.parametrize("name", some(["hpz", "stage 2"], 2))
def test_a_step_does_not_wait_for_the_refresh_and_a_use_only_for_its_own(name: str) -> None:
    """The refreshes of four units take 0.3 s each. The first block has run long before the last refresh ends."""
    for stepped, forward, began in run_ranks(4, slowly, KEPT[name], 0.3, local_world_size=2):
        assert stepped < 0.25, "step() waited for a refresh"
        assert forward > 0.9, "forward did not wait for the last refresh"
        assert began[0] < 0.8 < 0.9 < began[3], began


def skipping(settings: dict[str, object], skip: str) -> None:
    """Leave out the refresh after a step or a load, and run a forward.

    Args:
        settings: keys for ``make_config``.
        skip: "step" or "load".
    """
    model, optimizer = wrapped(settings)
    train(model, optimizer, 2)
    state = model.state_dict()
    Refresh.start_refresh = lambda self: None  # type: ignore[method-assign]
    if skip == "step":
        train(model, optimizer, 1)
    else:
        model.load_state_dict(state)
    model(torch.ones(2, 16, dtype=torch.float64))


def skip_and_restore(settings: dict[str, object], skip: str) -> None:
    original = Refresh.start_refresh
    try:
        skipping(settings, skip)
    finally:
        Refresh.start_refresh = original  # type: ignore[method-assign]


@pytest.mark.parametrize(("name", "skip"), spread(KEPT, ["step", "load"], 2))
def test_weights_of_an_older_version_are_never_used(name: str, skip: str) -> None:
    for failure in run_ranks(4, skip_and_restore, KEPT[name], skip, local_world_size=2, catch=True):
        assert isinstance(failure, RankFailure) and "caches weights of old versions" in failure.message


def values_after_a_load(settings: dict[str, object]) -> tuple[Tensor, Tensor, list[int]]:
    """Train two steps, load other weights, and evaluate 21 times.

    Returns:
        Output after the load, expected output, and the numbers of refreshes by wrapping, by the load, and by the last
        20 evaluations.
    """
    model, optimizer = wrapped(settings)
    ledger = optimizer.engine.comm.ledger

    def refreshes() -> int:
        optimizer.engine.wait_for_refresh()
        return sum(row.calls for row in ledger.rows if row.kind == "refresh")

    wrapping = refreshes()
    train(model, optimizer, 2)
    trained = refreshes()
    other = Stack().double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.25)
    model.load_state_dict(other.state_dict())
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 16)
    with torch.no_grad():
        found = model(x)
        loaded = refreshes()
        for _ in range(20):
            assert torch.equal(model(x), found)
    return found, other(x).detach(), [wrapping, loaded - trained, refreshes() - loaded]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", KEPT)
def test_a_load_is_seen_and_evaluation_renews_nothing(name: str) -> None:
    for found, expected, sent in run_ranks(4, values_after_a_load, KEPT[name], local_world_size=2):
        assert_close(found, expected, 1e-12, "output after a load")
        assert sent[0] == sent[1] > 0 and sent[2] == 0, "a load renews everything once"


class Interrupted(torch.optim.SGD):
    """SGD whose step raises KeyboardInterrupt after it has updated the weights, if ``fails`` is True."""

    fails = False

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.fails:
            raise KeyboardInterrupt("during the step")


class Failing(nn.Linear):
    """A layer that raises an error when a state dict is loaded into it."""

    def _load_from_state_dict(self, *_: object) -> None:
        raise KeyError("the user's own")


def half_way(settings: dict[str, object], what: str, only: int | None) -> float:
    """Let a step or a load fail after it has changed weights, and train one step afterwards.

    Args:
        settings: keys for ``make_config``.
        what: "step" or "load".
        only: rank whose step fails; None for all ranks.

    Returns:
        Largest difference of the output after the failure from that of a plain model with the full main weights.
    """
    model = nn.Sequential(Stack(), Failing(16, 16)).double()
    inner = Interrupted(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
    train(model, optimizer, 2)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 16)
    old = model(x).sum()
    if what == "step":
        model(x).square().mean().backward()
        old = model(x).sum()
        inner.fails = only is None or dist.get_rank() == only
        failure = pytest.raises(KeyboardInterrupt, match="during the step") if inner.fails else contextlib.nullcontext()
        with failure:
            optimizer.step()
        inner.fails = False
    else:
        other = {key: value + 0.25 for key, value in model.state_dict().items()}
        with pytest.raises(KeyError, match="the user's own"):
            model.load_state_dict(other)
    whole = nn.Sequential(Stack(), nn.Linear(16, 16)).double()
    optimizer.zero_grad()
    with torch.no_grad():
        found = model(x)
        whole.load_state_dict(zeropp.full_state(model))
        difference = apart(found, whole(x))
    # This graph was made with older weights.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    return difference


@pytest.mark.every(5)
@pytest.mark.parametrize(("what", "only"), [("step", None), ("step", 1), ("load", None)])
@pytest.mark.parametrize("name", some([*KEPT, "stage 3"], 2))
def test_weights_that_changed_before_an_error_are_new_ones(name: str, what: str, only: int | None) -> None:
    for difference in run_ranks(4, half_way, KEPT.get(name, {}), what, only, local_world_size=2):
        assert difference < 1e-12, "the model runs with older weights than it has"


def clamped(settings: dict[str, object]) -> float:
    """Train four steps with a step post-hook that clamps the weights.

    Returns:
        Largest difference of outputs from plain torch.
    """
    model, optimizer = wrapped(settings)
    plain = Stack().double()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    def clamp(each: torch.optim.Optimizer, *_: object) -> None:
        time.sleep(0.01)  # a refresh issued before this hook would have ended, with weights that are not clamped
        with torch.no_grad():
            for group in each.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)

    off = 0.0
    optimizer.register_step_post_hook(clamp)
    reference.register_step_post_hook(clamp)
    for _ in range(4):
        train(model, optimizer, 1)
        train(plain, reference, 1)
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 16)
        with torch.no_grad():
            off = max(off, apart(model(x), plain(x)))
    return off


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [*KEPT, "stage 3"])
def test_a_hook_after_the_step_may_edit_weights(name: str) -> None:
    assert max(run_ranks(4, clamped, KEPT.get(name, {}), local_world_size=2)) < 1e-12


class Unknown(torch.optim.AdamW):
    """AdamW under another class name. An optimizer that zeropp does not know steps all units at once."""


def portions(settings: dict[str, object], kind: type[Any]) -> tuple[list[str], dict[str, Tensor], bool]:
    """Train three steps, and record the updates and refreshes of a fourth one.

    Args:
        settings: keys for ``make_config``.
        kind: class of the optimizer.

    Returns:
        "step <elements>" for each update and "refresh <unit>" for each refresh, in order; full weights; and True if all
        slices still show their gradients after the step.
    """
    model = Stack().double()
    optimizer = zeropp.ZeroOptimizer(kind(model.parameters(), lr=0.1), model, make_config(**settings))
    train(model, optimizer, 3)
    optimizer.engine.wait_for_refresh()
    done: list[str] = []
    update, refresh = torch.optim.AdamW.step, FlatBuffer.refresh
    inner = getattr(update, "__wrapped__", update)

    def step(own: torch.optim.Optimizer, *args: Any) -> None:
        optimizer.engine.wait_for_refresh()
        stepped = [p for group in own.param_groups for p in group["params"] if p.grad is not None]
        done.append(f"step {sum(p.numel() for p in stepped)}")
        inner(own, *args)

    def renew(buffer: FlatBuffer, differs: Callable[[FlatBuffer], bool]) -> Iterator[None]:
        done.append(f"refresh {buffer.unit}")
        yield from refresh(buffer, differs)

    torch.optim.AdamW.step, FlatBuffer.refresh = step, renew  # type: ignore[method-assign]
    try:
        train(model, optimizer, 1)
        optimizer.engine.wait_for_refresh()
    finally:
        torch.optim.AdamW.step, FlatBuffer.refresh = update, refresh  # type: ignore[method-assign]
    whole = all(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    return done, zeropp.full_state(model), whole


@pytest.mark.parametrize("name", some(["hpz", "stage 2"], 2))
def test_first_weights_travel_while_the_last_are_stepped(name: str) -> None:
    results = run_ranks(4, portions, KEPT[name], torch.optim.AdamW, local_world_size=2)
    others = run_ranks(4, portions, KEPT[name], Unknown, local_world_size=2)
    for (done, weights, whole), (at_once, expected, _) in zip(results, others, strict=True):
        assert [what.split()[0] for what in at_once] == ["step"] + ["refresh"] * 4
        steps = [index for index, what in enumerate(done) if what.startswith("step")]
        assert steps == [0, 2, 4] and done[1] == "refresh blocks.0" and done[3] == "refresh blocks.1", done
        assert len({what for what in done if what.startswith("refresh")}) == 4
        assert whole and all(torch.equal(value, expected[key]) for key, value in weights.items())


def long_pieces(settings: dict[str, object], kind: type[Any]) -> tuple[dict[str, Tensor], int]:
    """Train four steps of a model with wide layers.

    Args:
        settings: keys for ``make_config``.
        kind: class of the optimizer.

    Returns:
        Full weights, and the largest number of slices of one unit on this rank.
    """
    model = Stack(64).double()
    optimizer = zeropp.ZeroOptimizer(kind(model.parameters(), lr=0.1), model, make_config(**settings))
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 64), 1.0 + step + dist.get_rank(), dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    units = [piece.unit for piece in optimizer.slices.stepped]
    return zeropp.full_state(model), max(units.count(unit) for unit in units)


@pytest.mark.parametrize("name", some(["hpz", "stage 2"], 2))
def test_all_slices_of_a_unit_are_stepped_once(name: str) -> None:
    results = run_ranks(4, long_pieces, KEPT[name], torch.optim.AdamW, local_world_size=2)
    others = run_ranks(4, long_pieces, KEPT[name], Unknown, local_world_size=2)
    assert max(count for _, count in results) > 1
    for (weights, _), (expected, _) in zip(results, others, strict=True):
        assert all(torch.equal(value, expected[key]) for key, value in weights.items())
