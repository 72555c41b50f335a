"""Gathered elements stay below the configured limit at any moment, and the limit is used.

With reuse switched off, no unit is gathered between steps.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Block, Routed, chain, live, make_config
from tests.support.owned_memory import live_numel, owned_bytes
from tests.support.rank_pool import run_ranks
from tests.support.tensor_memory import trained
from zeropp.comm.streams import Event
from zeropp.params.unit import Unit


class Tree(nn.Module):
    """Blocks of one size, of which the first runs twice, a larger block, and a weight of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(5))
        self.wide = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.wide(x * self.scale) + self.blocks[0](x)


class Watch:
    """Samples the gathered elements after every gather, and at every module's forward and backward.

    Attributes:
        limit: configured limit in elements.
        samples: number of samples.
        most_free: largest number of gathered elements of units that no call and no gradient needs.
        most_held: largest number of gathered elements of units in use.
    """

    def __init__(self, engine: object, limit: int) -> None:
        self.engine, self.limit = engine, limit
        self.samples = 0
        self.most_free = 0
        self.most_held = 0

    def __call__(self, *_: object) -> None:
        self.samples += 1
        self.most_free = max(self.most_free, live(self.engine.units, held=False))
        self.most_held = max(self.most_held, live(self.engine.units, held=True))
        gathered = [u for u in self.engine.units if not u.persistent and u.buffers[0].flat.untyped_storage().nbytes()]
        total = sum(unit.numel for unit in gathered)
        assert live_numel(self.engine.units) >= total, "a unit that counts as sharded has memory"

    def after(self, module: nn.Module, args: object, out: Tensor) -> None:
        self()
        if out.requires_grad:
            out.register_hook(self)

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        original = Unit.note_gather

        def gather(unit: Unit, event: Event) -> None:
            original(unit, event)
            self()

        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self))
            handles.append(module.register_forward_hook(self.after))
        Unit.note_gather = gather
        try:
            yield
        finally:
            Unit.note_gather = original
            for handle in handles:
                handle.remove()


def most_live(units_live: float, settings: dict[str, object]) -> tuple[int, int, int, list[int], int]:
    """Train five steps, with evaluations after the last three.

    Args:
        units_live: limit on live elements, as a multiple of the largest unit.
        settings: keys for ``make_config``.

    Returns:
        Limit in elements, most gathered elements beside units in use, most gathered elements of units in use, sizes of
        units, and number of samples.
    """
    model = Tree()
    sizes = [u.numel for u in trained(copy.deepcopy(model), make_config(live=0, **settings)).engine.units]
    limit = int(units_live * max(sizes))
    config = make_config(live=limit, **settings)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    watch = Watch(optimizer.engine, limit)
    with watch.on(model):
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(2, 16)).square().mean().backward()
            optimizer.step()
            if step > 1:
                with torch.no_grad():
                    model(torch.randn(2, 16))
            watch()
    units = [u.numel for u in optimizer.engine.units if not u.persistent]
    return limit, watch.most_free, watch.most_held, units, watch.samples


@pytest.mark.every(6)
@pytest.mark.parametrize("settings", [{}, {"reuse": 0}, {"prefetch": 0}], ids=["both", "prefetch", "reuse"])
@pytest.mark.parametrize("units_live", [0, 1.5])
@pytest.mark.parametrize("world", [2, 1])
def test_live_elements_stay_below_the_limit(world: int, units_live: float, settings: dict[str, object]) -> None:
    """Units on the call stack (at most three here) and units with incomplete gradients do not count for the limit."""
    for limit, free, held, sizes, samples in run_ranks(world, most_live, units_live, settings):
        assert len(sizes) >= 6 and samples > 100
        assert free <= limit, f"{free} elements beside what is in use, the limit is {limit}; units have {sizes}"
        assert held <= sum(sorted(sizes)[-3:]), f"{held} elements held at once; units have {sizes}"


def test_the_limit_is_used() -> None:
    """A run comes within one unit of the limit, so units are kept or prefetched at all."""
    limit, free, _, sizes, _ = run_ranks(2, most_live, 1.5, {})[0]
    assert limit - max(sizes) < free <= limit


def passed_over(limit: int, prefetch: int) -> tuple[int, int]:
    """Train six steps. From the second one on, the last rank uses only two of the eight units.

    Args:
        limit: limit on live elements.
        prefetch: prefetch bucket size in elements.

    Returns:
        Most gathered elements beside units in use, from the third step on, and elements of a unit.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Routed(8)
    optimizer = trained(model, make_config(live=limit, prefetch=prefetch))
    watch = Watch(optimizer.engine, limit)
    everything, part = chain(8), chain(0, 7)
    for step in range(6):
        if step == 2:
            # While an order is learned, a rank may keep units that only other ranks need, so begin to count here.
            watch.most_free = 0
        with watch.on(model):
            model(torch.randn(2, 8), part if step and rank == world - 1 else everything).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch.most_free, max(u.numel for u in optimizer.engine.units)


@pytest.mark.every(12)
@pytest.mark.parametrize("prefetch", [0, 10**9])
@pytest.mark.parametrize("units_live", [0, 1, 2])
def test_units_passed_over_stay_below_the_limit(units_live: int, prefetch: int) -> None:
    """A rank that skips six of eight units takes part in their gathers one at a time, and keeps none of them."""
    numel = 512
    for most, unit in run_ranks(2, passed_over, units_live * numel, prefetch):
        assert unit == numel
        assert most <= (units_live + 1) * numel


def late_exit() -> int:
    """Run one forward in which the last rank uses two of eight units, and the other rank uses all.

    Returns:
        Most gathered elements beside units in use.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Routed(8)
    optimizer = trained(model, make_config(live=0, prefetch=0))
    watch = Watch(optimizer.engine, 0)
    with watch.on(model), torch.no_grad():
        model(torch.randn(2, 8), chain(0, 1) if rank == world - 1 else chain(8))
    return watch.most_free


def test_a_rank_that_is_done_keeps_nothing_for_others() -> None:
    most = run_ranks(2, late_exit)
    assert most[1] <= 512, most


def released_by(make: Callable[[], nn.Module]) -> int:
    model = make()
    optimizer = trained(model, make_config(reuse=0, prefetch=0))
    for _ in range(2):
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return owned_bytes(optimizer)["gathered"]


def test_nothing_is_gathered_between_steps() -> None:
    assert run_ranks(2, released_by, Routed) == [0, 0]


class Tied(nn.Module):
    """A model whose head has no parameter but the first block's weight. ``look`` is called after the head has run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.blocks[0].lin.weight
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        self.look()
        return x


def gathered_behind_a_tied_module() -> list[int]:
    model, found = Tied(), []
    optimizer = trained(model, make_config(reuse=0, prefetch=0))
    model.look = lambda: found.append(live_numel(optimizer.engine.units))
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_module_releases_a_weight_that_it_shares_with_another_unit() -> None:
    assert run_ranks(2, gathered_behind_a_tied_module) == [[0, 0]] * 2
