"""Engines of one process share communicators, rehearse them while wrapping, and destroy them together.

The tests use the staged backend with ``overlap_comm=False``, so that work runs in the order of the program, as on CUDA
streams without offload.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from bench.common import staged
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks, some
from tests.support.staged_worlds import over
from zeropp.comm import agreement, communicators
from zeropp.comm.hops import Hop

ORDERED: dict[str, Any] = {"overlap_comm": False, "hang_timeout": 20}


def wrapped(
    seed: int, change: Callable[[nn.Module], object] = lambda model: None, **settings: Any
) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    """Return a small wrapped model and its optimizer.

    Args:
        seed: seed of the weights.
        change: function that changes the model before it is wrapped.
        settings: configuration, see ``make_config``.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    change(model)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, zeropp.ZeroOptimizer(inner, model, make_config(**{**ORDERED, **settings}))


def step(model: nn.Module, optimizer: zeropp.ZeroOptimizer, number: int) -> float:
    """Take one optimizer step, and return its loss."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    loss = model(torch.randn(4, 64, generator=generator)).square().mean()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def groups(optimizer: zeropp.ZeroOptimizer) -> set[str]:
    """Return the names of an engine's communicators."""
    return {each.name for each in optimizer.engine.comm.communicators}


def several(settings: dict[str, Any], local: int) -> tuple[list[int], int, list[float], list[float], list[bool]]:
    """Train an actor and a critic, first one after the other, then together, with a third model for inference.

    Args:
        settings: configuration of all engines.
        local: ranks per node.

    Returns:
        Two counts of communicators made (held by the process, named by the engines), the count that zeropp.plan.memory
        gives, losses of the models trained together, losses of the models trained one after the other, and four
        booleans that are True if closed engines leave no communicator.
    """
    held = communicators._held
    alone: list[float] = []
    for seed in (1, 2):
        model, optimizer = wrapped(seed, local_world_size=local, **settings)
        alone += [step(model, optimizer, number) for number in range(3)]
        optimizer.close()
    left = [not held]
    (actor, first), (critic, second), (reference, third) = (
        wrapped(seed, local_world_size=local, **settings) for seed in (1, 2, 3)
    )
    made = [len(held), len(groups(first) | groups(second) | groups(third))]
    plan = zeropp.plan.memory(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
        make_config(**{**ORDERED, "local_world_size": local, **settings}), dist.get_world_size(), local,
    )  # fmt: skip
    together: dict[int, list[float]] = {1: [], 2: []}
    for number in range(3):
        with torch.no_grad():
            reference(torch.ones(1, 64))
        together[1].append(step(actor, first, number))
        together[2].append(step(critic, second, number))
    first.close()
    third.close()
    left.append(set(held) == groups(second))
    step(critic, second, 3)
    registered = [each.group for each in held.values()]
    second.close()
    left += [not held, all(group not in dist.distributed_c10d._world.pg_map for group in registered)]
    return made, len(plan.communicators), together[1] + together[2], alone, left


@pytest.mark.parametrize(
    ("world", "local", "settings", "count", "alone"),
    [
        # Gathers and refreshes share one communicator, reductions and small sums the other.
        pytest.param(2, 2, {}, 2, 0, marks=pytest.mark.campaign),
        # Gathers and reductions have one communicator each within a node, and one each between nodes. Small sums use
        # the user's group. The plan counts one more communicator, because it does not see the user's group.
        (4, 2, {"zero_hpz_partition_size": 2}, 4, 1),
        pytest.param(2, 2, {"share_communicators": False}, 2, 0, marks=pytest.mark.campaign),
    ],
)
def test_engines_share_communicators(world: int, local: int, settings: dict[str, Any], count: int, alone: int) -> None:
    engines = 3 if settings.get("share_communicators") is False else 1
    for made, planned, together, apart, left in run_ranks(
        world, over, several, settings, local, init=False, local_world_size=local
    ):
        assert (made, planned) == ([engines * count] * 2, count + alone)
        assert together == apart
        assert left == [True] * 4


def dropped() -> tuple[bool, bool, bool]:
    """Drop engines without close(), on rank 0 before rank 1.

    Returns:
        True if a new engine reuses the communicators that rank 1 still uses; True if no communicator has a user after
        the last engine is dropped; True if the next engine has new communicators and the old ones are gone.
    """
    first, optimizer = wrapped(1)
    before = groups(optimizer)
    keep = (first, optimizer) if dist.get_rank() else None
    del first, optimizer
    gc.collect()
    other, second = wrapped(2)
    reused = groups(second) == before  # expected True, because rank 1 still uses these communicators
    del keep
    gc.collect()
    step(other, second, 0)
    del other, second
    gc.collect()
    idle = not any(communicators.held_here().values())
    _, third = wrapped(3)
    return reused, idle, before.isdisjoint(groups(third)) and before.isdisjoint(communicators._held)


def test_dropped_engines_leave_no_communicators() -> None:
    for found in run_ranks(2, over, dropped, init=False):
        assert found == (True, True, True)


def crossed() -> str:
    """Use two engines of equal shapes in opposite orders on the two ranks, and return the error."""
    engines = [wrapped(1), wrapped(2)]
    for model, optimizer in engines:
        step(model, optimizer, 0)
    with pytest.raises(RuntimeError) as caught:
        for model, optimizer in engines if dist.get_rank() == 0 else engines[::-1]:
            step(model, optimizer, 1)
    return str(caught.value)


def test_engines_in_another_order_on_another_rank_are_noticed() -> None:
    """Ranks that use two engines in different orders get an error at the next step.

    Without the check, each engine's gathers would fill the other engine's buffers, which have the same sizes.
    """
    for text in run_ranks(2, over, crossed, init=False):
        assert "comparing what was gathered and reduced" in text


def lost_together() -> list[str]:
    """Step two engines on rank 0 while rank 1 steps neither of them, and return the errors of rank 0."""
    (model, first), (other, second) = wrapped(1, hang_timeout=2), wrapped(2, hang_timeout=2)
    errors, store = [], dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        for each, optimizer in ((model, first), (other, second)):
            with pytest.raises(RuntimeError) as caught:
                step(each, optimizer, 0)
            errors.append(str(caught.value))
        store.set("told", "")
    else:
        store.wait(["told"], timedelta(seconds=30))
    for optimizer in (first, second):
        optimizer.close()
    return errors


def test_a_loss_reaches_every_engine_that_shares() -> None:
    errors, _ = run_ranks(2, over, lost_together, init=False)
    assert "rank 1 does not wait for others" in errors[0]
    assert errors[1].startswith(
        "another model of this process has lost the other ranks, and shares process groups with this"
    )
    assert "rank 1 does not wait for others" in errors[1]


def ended_and_begun_again(folder: str) -> int:
    """Destroy and reinitialize torch.distributed while an engine exists, and close that engine afterwards.

    Args:
        folder: folder for the stores of the two process groups.

    Returns:
        Number of communicators that this rank has after a step of the second engine.
    """
    staged.register()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number in range(2):
        # One store for each process group, because the launcher's store still has the addresses of the first group.
        store = dist.FileStore(f"{folder}/{number}", world)
        dist.init_process_group(staged.NAME, store=store, rank=rank, world_size=world)
        model, optimizer = wrapped(number)
        step(model, optimizer, 0)
        if number == 0:
            dist.destroy_process_group()
            old = optimizer
    old.close()
    step(model, optimizer, 1)
    count = len(communicators.held_here())
    optimizer.close()
    return count


def test_an_engine_outlives_torch_distributed(tmp_path: Path) -> None:
    """close() of the first engine neither raises nor touches the process groups of the second engine."""
    assert run_ranks(2, ended_and_begun_again, str(tmp_path), init=False) == [2, 2]


def closed_alone() -> tuple[str, float]:
    """Raise an error on rank 0, which closes its optimizer, while rank 1 goes on training.

    Returns:
        The error of this rank, and seconds until the error.
    """
    model, optimizer = wrapped(1)
    step(model, optimizer, 0)
    begun = time.monotonic()
    try:
        with mock.patch.object(agreement, "_MEETING", 3.0), contextlib.closing(optimizer):
            if dist.get_rank() == 0:
                raise KeyError("a batch without labels")
            for number in range(1, 3):
                step(model, optimizer, number)
    except Exception as error:
        return repr(error), time.monotonic() - begun
    return "", time.monotonic() - begun


def test_closing_alone_ends_and_hides_nothing() -> None:
    (mine, seconds), (others, later) = run_ranks(2, over, closed_alone, init=False)
    assert mine == repr(KeyError("a batch without labels"))
    assert "rank 0 failed: it closed its optimizer" in others
    assert max(seconds, later) < 20, "hang_timeout"


def rehearsed(settings: dict[str, Any]) -> tuple[Counter[str], Counter[str], int, int]:
    """Count the collectives of hops while a model is wrapped and in two steps.

    Returns:
        Counts of collectives by kind, hop and name, during wrapping and in all; number of ledger rows of gathers and
        reductions after wrapping; and number of collectives in training that are larger than all earlier ones of the
        same kind, hop and name.
    """
    seen: Counter[str] = Counter()
    largest: dict[str, int] = {}
    late = 0

    def noted(name: str) -> Any:
        original = getattr(Hop, name)

        def call(self: Hop, *args: Any, **kwargs: Any) -> object:
            nonlocal late
            key = f"{self.kind} {self.spec.outer}->{self.spec.inner} {name}"
            nbytes = next(arg for arg in args if isinstance(arg, Tensor)).nbytes
            late += training and nbytes > largest.get(key, 0)
            largest[key] = max(largest.get(key, 0), nbytes)
            seen[key] += 1
            return original(self, *args, **kwargs)

        return mock.patch.object(Hop, name, call)

    training = False
    with noted("all_gather"), noted("all_to_all"), noted("reduce_scatter"):
        model, optimizer = wrapped(1, **settings)
        rows = [row for row in zeropp.comm_report(model).rows if row.kind in ("gather", "reduce")]
        at_wrap, counted = Counter(seen), len(rows)
        training = True
        for number in range(2):
            step(model, optimizer, number)
    return at_wrap, seen, counted, late


@pytest.mark.parametrize(
    "settings",
    some(
        [
            {"stage": 1},
            {"bf16": {"enabled": True}},
            {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
            {"mics_shard_size": 2, "bf16": {"enabled": True}},
        ],
        2,
    ),
)
def test_everything_runs_once_while_wrapping(settings: dict[str, Any]) -> None:
    for at_wrap, seen, counted, late in run_ranks(4, over, rehearsed, settings, init=False, local_world_size=2):
        assert set(at_wrap) == set(seen), "the first call of a collective was in training"
        assert late == 0, "training sent messages larger than the rehearsal"
        assert counted == 0, "the ledger counts the rehearsal"


def unfrozen() -> list[str]:
    """Unfreeze a model after it is wrapped.

    Returns:
        Kinds of all-to-all collectives in the order of issue, with "wrapped" after the model is unfrozen and "backward"
        before the backward.
    """
    seen: list[str] = []

    def noted(self: Hop, *args: Any, **kwargs: Any) -> object:
        seen.append(self.kind)
        return original(self, *args, **kwargs)

    original = Hop.all_to_all
    with mock.patch.object(Hop, "all_to_all", noted):
        model, optimizer = wrapped(1, change=lambda model: model.requires_grad_(False))
        model.requires_grad_(True)
        seen.append("wrapped")
        loss = model(torch.ones(1, 64)).square().mean()
        seen.append("backward")
        optimizer.backward(loss)
    return seen


def test_unfreezing_rehearses_new_communicators() -> None:
    for seen in run_ranks(2, over, unfrozen, init=False):
        assert seen == ["wrapped", "reduce", "backward", "reduce", "reduce"]


def broken() -> str:
    """Wrap a model while the all-gather between nodes fails on every rank, and return the error."""

    def fails(self: Hop, *args: Any, **kwargs: Any) -> object:
        if self.spec.link == "cross":
            raise RuntimeError("ncclSystemError: no route to 10.0.0.7")
        return original(self, *args, **kwargs)

    original = Hop.all_gather
    with mock.patch.object(Hop, "all_gather", fails), pytest.raises(RuntimeError) as caught:
        wrapped(1)
    return str(caught.value)


def test_an_unusable_network_shows_while_wrapping() -> None:
    for rank, text in enumerate(run_ranks(4, over, broken, init=False, local_world_size=2)):
        assert f"the first all_gather of ranks {rank % 2} and {rank % 2 + 2} (gather, level 4 to 2)" in text
        assert "no route to 10.0.0.7" in text
