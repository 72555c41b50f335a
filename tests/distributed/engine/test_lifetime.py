"""Nothing outlives its use: graphs are freed after their backward, and the engine with its model and optimizer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.branch_routes import agreements
from tests.support.branching_models import Routed, make_config
from tests.support.parity import Recipe, build, continue_zero, make_optimizer
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from tests.support.staged_worlds import over
from tests.support.tensor_memory import storages, trained
from zeropp.engine.hooks import BackwardCall


@pytest.fixture(autouse=True, scope="module")
def nothing_old() -> Iterator[None]:
    """Freeze all objects made before these tests, because each garbage collection would scan them again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_calls() -> int:
    """Return the number of module calls that some graph keeps alive, after a collection of garbage."""
    gc.collect()
    return sum(type(found) is BackwardCall for found in gc.get_objects())


def train(model: str) -> list[weakref.ref[object]]:
    """Train two steps on one rank without a process group.

    Args:
        model: key of MODELS.

    Returns:
        Weak references to the model, the optimizer, the engine and its parts.
    """
    recipe = Recipe(model=model, steps=2)
    module = build(recipe, seed=7)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, module), module, recipe.config())
    before = live_calls()
    continue_zero(recipe, module, optimizer, range(2), 0)
    assert live_calls() == before, "graphs outlive their backward"
    engine = optimizer.engine
    return [weakref.ref(thing) for thing in (module, optimizer, engine, engine.comm, *engine.units, *engine.buffers)]


@pytest.mark.every(5)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left(model: str) -> None:
    left = train(model)
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []


def named_threads() -> set[threading.Thread]:
    """Return the live threads of engines. Objects are compared, because threads of an earlier test may still end."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("zeropp")}


def hooks_of(model: nn.Module) -> list[str]:
    """Return the paths of all hooks and replaced methods on a model's modules and parameters."""
    found = []
    for path, module in model.named_modules():
        found += [f"{path}.{name}" for name, value in vars(module).items() if "hooks" in name and value]
        found += [f"{path}.{name}" for name in vars(module) if callable(vars(module)[name]) and name != "training"]
        found += [f"{path}.{name}" for name in vars(module) if isinstance(vars(type(module)).get(name), type(hooks_of))]
    for name, parameter in model.named_parameters():
        found += [name] * bool(parameter._post_accumulate_grad_hooks)
    return found


def steps_then(end: str, settings: dict[str, object], automatic: bool) -> dict[str, object]:
    """Train three steps, drop model and optimizer, and look for objects that are still alive.

    Args:
        end: order in which model and optimizer are dropped, or an event before that: a forward without a backward, an
            error in a forward, or ``close()``.
        settings: keys for ``make_config``.
        automatic: True to drop them without a run of the garbage collector.

    Returns:
        Four entries: classes of live objects, bytes of each new storage, number of the engine's threads, and number of
        shards with memory. With ``automatic``, storages and shards are not counted.
    """
    # The first engine of a process makes objects that stay, so make one before the count.
    trained(Routed(), make_config()).close()
    before, threads = storages(), named_threads()
    model = Routed()
    optimizer = trained(model, make_config(**settings))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
    if end == "forward":
        loss = model(torch.randn(2, 8)).square().mean()
        del loss
    if end == "error":
        handle = model.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(torch.randn(2, 8))
        del handle
    if end == "closed":
        optimizer.close()
    engine = optimizer.engine
    refs = [weakref.ref(thing) for thing in (model, optimizer, engine, engine._schedule, engine.comm, *engine.units)]
    refs += [weakref.ref(buffer) for buffer in engine.buffers]
    refs += [weakref.ref(parameter) for parameter in model.parameters()]
    shards = [buffer.shard.untyped_storage()._weak_ref() for buffer in engine.buffers]
    del engine
    gc.collect()
    gc.disable()
    try:
        if end == "model first":
            del model
            gc.collect()
            del optimizer
        elif end == "optimizer first":
            del optimizer
            gc.collect()
            del model
        else:
            del model, optimizer
        if not automatic:
            gc.collect()
        for _ in range(100):  # threads end after a refresh in flight
            if named_threads() - threads:
                threading.Event().wait(0.02)
        alive = [type(ref()).__name__ for ref in refs if ref() is not None]
    finally:
        gc.enable()
    if not automatic:
        left = [size for key, size in storages().items() if key not in before]
        freed = sum(torch.UntypedStorage._expired(shard) for shard in shards)
    else:
        left, freed = [], len(shards)
    for shard in shards:
        torch.UntypedStorage._free_weak_ref(shard)
    return {"alive": alive, "left": left, "threads": len(named_threads() - threads), "unfreed": len(shards) - freed}


def fail(*_: object) -> None:
    raise ArithmeticError("told to")


NOTHING = {"alive": [], "left": [], "threads": 0, "unfreed": 0}


@pytest.mark.every(6)
@pytest.mark.parametrize("end", ["rest", "forward", "error", "closed", "model first", "optimizer first"])
def test_nothing_outlives_model_and_optimizer(end: str) -> None:
    for found in run_ranks(2, steps_then, end, {"persist": 10}, False):
        assert found == NOTHING


def test_nothing_is_left_on_one_rank() -> None:
    assert run_ranks(1, steps_then, "rest", {}, False, init=False) == [NOTHING]


def test_threads_end_with_the_engine() -> None:
    """Threads of comm streams end with the engine, because idle threads refer to no tensor and no engine."""
    for found in run_ranks(2, steps_then, "rest", {"overlap_comm": True}, False):
        assert found["threads"] == 0


def closed() -> tuple[list[str], list[str], list[str]]:
    """Return the hooks of a model before wrapping, while the model is wrapped, and after ``close()``."""
    model = Routed()
    before = hooks_of(model)
    optimizer = trained(model, make_config(persist=10))
    during = hooks_of(model)
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    return before, during, hooks_of(model)


def test_close_takes_every_hook_away() -> None:
    for before, during, after in run_ranks(2, closed):
        assert len(during) > len(before)
        assert after == before


def saved_whole(persist: int) -> tuple[int, int]:
    """Make a state dict and drop it.

    Args:
        persist: persistence threshold in elements.

    Returns:
        Bytes that are left afterwards, and number of exchanges between ranks that the call needed.
    """
    model = Routed()
    optimizer = trained(model, make_config(persist=persist, overlap_comm=False))
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    model.state_dict()  # the first call makes comm streams and buffers of gathers, which stay
    before, asked = sum(storages().values()), agreements(optimizer)
    model.state_dict()
    return sum(storages().values()) - before, agreements(optimizer) - asked


@pytest.mark.every(2)
@pytest.mark.parametrize("persist", [0, 10])
def test_a_state_dict_leaves_nothing_behind_and_asks_once(persist: int) -> None:
    assert run_ranks(2, saved_whole, persist) == [(0, 1)] * 2


def groups_left(kept_on: int | None) -> list[int]:
    """Wrap three models, each in place of the one before.

    Args:
        kept_on: rank that drops the first model only after the second was wrapped; None for no rank.

    Returns:
        Number of process groups after each wrapping.
    """
    counts, kept = [], []
    for number in range(3):
        model = Routed()
        optimizer = trained(model, make_config())
        counts.append(len(dist.distributed_c10d._world.pg_map))
        if number == 0 and dist.get_rank() == kept_on:
            kept.append((model, optimizer))
        del model, optimizer
        if number == 1:
            kept.clear()
        gc.collect()
    return counts


@pytest.mark.parametrize("kept_on", [None, 1])
def test_groups_that_ranks_leave_together_go_once_all_have_dropped_them(kept_on: int | None) -> None:
    """The test uses a backend whose ranks must destroy a process group together, as with NCCL."""
    found = run_ranks(2, over, groups_left, kept_on, init=False)
    first, second, third = found[0]
    assert third == first, found
    assert second == first if kept_on is None else second > first, found
