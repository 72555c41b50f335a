"""What is alive at any moment, what the engine owns, and what is left when model and optimizer are gone."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Block, Routed, chain, live, make_config
from tests.owned import live_numel, owned_bytes
from zeropp.comm.hops import Hop
from zeropp.comm.streams import Event
from zeropp.order import reductions
from zeropp.params.gradient import Gradient
from zeropp.params.unit import Unit

# Gathered elements.


class Tree(nn.Module):
    """Blocks of different sizes, one of them nested in another's forward, and weights of the root itself."""

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
    """Samples after every gather, and at every module's forward and backward."""

    def __init__(self, engine: object, limit: int) -> None:
        self.engine, self.limit = engine, limit
        self.samples = 0
        self.most_free = 0  # elements that no call and no gradient holds
        self.most_held = 0

    def __call__(self, *_: object) -> None:
        self.samples += 1
        self.most_free = max(self.most_free, live(self.engine.units, held=False))
        self.most_held = max(self.most_held, live(self.engine.units, held=True))
        gathered = [u for u in self.engine.units if not u.persistent and u.buffers[0].flat.untyped_storage().nbytes()]
        total = sum(unit.numel for unit in gathered)
        assert live_numel(self.engine.units) >= total, "a storage is there that live_numel does not know of"

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
    """Limit, most elements beside what is held, most held, sizes of units, samples."""
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


def trained(model: nn.Module, config: dict[str, object]) -> zeropp.ZeroOptimizer:
    return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)


SHARED_NAN = 16  # bytes: one NaN for each dtype, seen through every released parameter of the process


@pytest.mark.parametrize("settings", [{}, {"reuse": 0}, {"prefetch": 0}], ids=["both", "prefetch", "reuse"])
@pytest.mark.parametrize("units_live", [0, 1.5])
@pytest.mark.parametrize("world", [1, 2])
def test_live_elements_stay_below_the_limit(world: int, units_live: float, settings: dict[str, object]) -> None:
    """Beside the limit: units on the call stack (here three at most) and those with incomplete gradients."""
    for limit, free, held, sizes, samples in run_ranks(world, most_live, units_live, settings):
        assert len(sizes) >= 6 and samples > 100
        assert free <= limit, f"{free} elements beside what is in use, the limit is {limit}; units have {sizes}"
        assert held <= sum(sorted(sizes)[-3:]), f"{held} elements held at once; units have {sizes}"


def test_the_limit_is_used() -> None:
    """Otherwise the tests above would pass with nothing ever kept or fetched ahead."""
    limit, free, _, sizes, _ = run_ranks(2, most_live, 1.5, {})[0]
    assert limit - max(sizes) < free <= limit


def passed_over(limit: int, prefetch: int) -> tuple[int, int]:
    """Most elements beside what is held, on ranks of which the last soon uses less than the others; size of a unit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Routed(8)
    optimizer = trained(model, make_config(live=limit, prefetch=prefetch))
    watch = Watch(optimizer.engine, limit)
    everything, part = chain(8), chain(0, 7)
    for step in range(6):
        if step == 2:
            watch.most_free = 0  # while an order is learned, what others need may be needed here too
        with watch.on(model):
            model(torch.randn(2, 8), part if step and rank == world - 1 else everything).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch.most_free, max(u.numel for u in optimizer.engine.units)


@pytest.mark.parametrize("prefetch", [0, 10**9])
@pytest.mark.parametrize("units_live", [0, 1, 2])
def test_units_passed_over_stay_below_the_limit(units_live: int, prefetch: int) -> None:
    """A rank that skips six of eight units takes part in their gathers, one at a time, and keeps none for later."""
    numel = 512
    for most, unit in run_ranks(2, passed_over, units_live * numel, prefetch):
        assert unit == numel
        assert most <= (units_live + 1) * numel


def late_exit() -> int:
    """The last rank leaves early from the start: what others still need is let go as it comes."""
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


# Owned bytes.


class Mixed(nn.Module):
    """Trainable and frozen weights, two dtypes, odd shapes, channels_last, a tied weight, integers and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32, freeze: bool = True, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.emb = nn.Embedding(37, 24, dtype=dtype)
            self.blocks = nn.ModuleList(Block(24).to(dtype) for _ in range(3))
            self.norm = nn.LayerNorm(24, dtype=dtype)
            self.conv = nn.Conv2d(3, 5, 3, dtype=dtype).to(memory_format=torch.channels_last)
            self.other = nn.Linear(24, 7, dtype=torch.float64 if dtype == torch.float32 else torch.float32)
            self.head = nn.Linear(24, 37, bias=False, dtype=dtype)
            self.head.weight = self.emb.weight
            self.register_buffer("seen", torch.zeros(3))
            self.codes = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
        if freeze:
            self.blocks[1].requires_grad_(False)
            self.norm.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x).sum() + self.other(x.to(self.other.weight.dtype)).sum() + self.conv.weight.sum()


def storages() -> dict[int, int]:
    """Bytes of every storage that some Python tensor reaches, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor or isinstance(thing, nn.Parameter):
            with torch._C.DisableTorchFunctionSubclass():
                if thing.device.type == "cpu":
                    storage = thing.untyped_storage()
                    found[storage._cdata if storage.nbytes() == 0 else storage.data_ptr()] = storage.nbytes()
    return found


def owned(dtype: torch.dtype, freeze: bool, settings: dict[str, object]) -> list[str]:
    """What differs between the plan and the engine, fresh and after two steps."""
    config = make_config(**settings)
    model = Mixed(dtype, freeze)
    world = dist.get_world_size() if dist.is_initialized() else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    plan = zeropp.plan.memory(model, config, world, local)
    wrong = []
    if zeropp.plan.memory(Mixed(dtype, freeze, device="meta"), config, world, local) != plan:
        wrong.append("the plan of a meta model differs")
    optimizer = trained(model, config)
    for when in ("fresh", "after a step", "after an eval", "after a state dict"):
        if when == "after a step":
            model(torch.arange(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if when == "after an eval":
            with torch.no_grad():
                model(torch.arange(4))
        if when == "after a state dict":
            model.state_dict()
            zeropp.full_state(model)
        optimizer.engine.refresh.wait()
        if when == "after an eval":
            optimizer.engine.schedule.holdings.release_planned()  # kept for reuse, within max_live_parameters
        bytes_now = owned_bytes(optimizer.engine.units)
        wanted = {**plan.terms, "held_gradients": 0, "gathered": 0}
        if bytes_now != wanted:
            wrong.append(f"{when}: owned {bytes_now}, planned {wanted}")
    sizes = {unit.name: sum(buffer.nbytes for buffer in unit.buffers) for unit in optimizer.engine.units}
    if sizes != {unit.name: unit.gathered for unit in plan.units}:
        wrong.append(f"gathered sizes {sizes}, planned {plan.units}")
    return wrong


CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
OWNED = {
    "fp32": (torch.float32, False, {}),
    "fp32-frozen": (torch.float32, True, {}),
    "fp64-frozen": (torch.float64, True, {}),
    "bf16": (torch.float32, False, {"bf16": {"enabled": True}}),
    "bf16-frozen-persistent": (torch.float32, True, {"bf16": {"enabled": True}, "persist": 100}),
    "defaults": (torch.float32, True, {"persist": 100_000, "unit_min_blocks": 128}),
    "merged": (torch.float32, True, {"unit_min_blocks": 2, "persist": 30}),
    "stage 0": (torch.float32, True, {"stage": 0}),
    "stage 1": (torch.float32, True, {"stage": 1, "bf16": {"enabled": True}}),
    "stage 2": (torch.float64, True, {"stage": 2, "persist": 100}),
    "mics": (torch.float32, True, {"mics_shard_size": 1, "persist": 100}),
    "hpz": (torch.float32, True, {"zero_hpz_partition_size": 2, "persist": 100}),
    "hpz-bf16": (torch.float32, False, {"zero_hpz_partition_size": 2, "bf16": {"enabled": True}}),
    "fp32-wire": (torch.float32, True, {"bf16": {"enabled": True}, "communication_data_type": "fp32"}),
    "feedback": (torch.float32, True, {**CODED, "zeropp_loco_param": {}, "feedback": "both", "persist": 100}),
    "feedback-cross": (torch.float32, True, {**CODED, "zeropp_loco_param": {}, "bf16": {"enabled": True}}),
    "hpz-codes": (torch.float32, True, {**CODED, "zero_hpz_partition_size": 2, "secondary": "codes"}),
    "frozen-codes": (torch.float32, True, {"zero_quantized_nontrainable_weights": True, "persist": 100}),
}


@pytest.mark.parametrize("name", OWNED)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_owned_bytes_equal_the_plan(world: int, name: str) -> None:
    for rank, wrong in enumerate(run_ranks(world, owned, *OWNED[name], local_world_size=min(world, 2))):
        assert not wrong, f"rank {rank}: {wrong}"


def held(settings: dict[str, object], micro: int) -> tuple[list[int], int, int]:
    """Bytes of held gradients after each backward of one step; the plan's; those that were held by then."""
    model = Mixed(torch.float32, False)
    config = make_config(**settings, gradient_accumulation_steps=micro)
    plan = zeropp.plan.memory(model, config, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    optimizer = trained(model, config)
    found = []
    for _ in range(micro):
        optimizer.backward(model(torch.arange(4)))
        found.append(owned_bytes(optimizer.engine.units)["held_gradients"])
    optimizer.step()
    return found, plan.held_gradients, owned_bytes(optimizer.engine.units)["held_gradients"]


@pytest.mark.parametrize("settings", [{"stage": 1}, {"defer_cross_reduction": True}, {"mics_shard_size": 2}], ids=str)
def test_held_gradients_equal_the_plan_and_are_gone_with_the_last_backward(settings: dict[str, object]) -> None:
    for found, planned, after in run_ranks(4, held, settings, 3, local_world_size=2):
        assert found == [planned, planned, 0] and planned > 0 and after == 0


def under_way(small: int) -> int:
    """Most messages of gradients at one time over a slow network, if ``small`` bytes count as few."""
    model = Routed(6)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    most = 0
    pack, all_to_all = Gradient.pack, Hop.all_to_all

    def packed(gradient: Gradient, *, hold: bool) -> Tensor | None:
        nonlocal most
        most = max(most, len(optimizer.engine.reductions._in_flight) + 1)
        return pack(gradient, hold=hold)

    def slow(hop: Hop, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return all_to_all(hop, *args, **kwargs)

    with (
        mock.patch.object(reductions, "_SMALL", small),
        mock.patch.object(Gradient, "pack", packed),
        mock.patch.object(Hop, "all_to_all", slow),
    ):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad()
    return most


def test_a_slow_network_piles_up_no_more_than_two_large_messages() -> None:
    """Many small ones are no burden, and a link need not wait for one slow rank."""
    assert run_ranks(2, under_way, 0) == [2, 2]
    assert min(run_ranks(2, under_way, 2**26)) == 6


def in_memory(settings: dict[str, object]) -> tuple[int, int, int]:
    """Bytes that wrapping leaves in this process beside the model's buffers; the plan's; the whole model's."""
    before = storages()
    model = Mixed()
    whole = sum(p.nbytes for p in model.parameters())
    config = make_config(**settings)
    plan = zeropp.plan.memory(model, config, dist.get_world_size())
    others = model.seen.nbytes + model.codes.nbytes
    optimizer = trained(model, config)
    optimizer.engine.refresh.wait()
    # A lane's thread tells that a message has arrived just before it lets go of it.
    until = time.monotonic() + 5
    while (found := sum(n for key, n in storages().items() if key not in before) - others) > plan.total + SHARED_NAN:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return found, plan.total, whole


@pytest.mark.parametrize("settings", [{}, {"persist": 100}, {"stage": 0}, {"stage": 2}], ids=str)
def test_the_process_holds_no_more_than_the_plan(settings: dict[str, object]) -> None:
    for found, planned, whole in run_ranks(2, in_memory, settings):
        assert planned <= found <= planned + SHARED_NAN
        assert whole > 0


@pytest.mark.parametrize("freeze", [False, True])
def test_whole_main_weights_in_the_compute_dtype_are_there_once(freeze: bool) -> None:
    """Stages 0 to 2 on one rank, and frozen ones in stage 0: the model computes with the main weights themselves."""
    for stage in (0, 1, 2):
        terms = zeropp.plan.memory(Mixed(torch.float32, freeze), make_config(stage=stage), 1).terms
        assert terms["persistent_weights"] == 0
    halves = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)))
    halves[0].requires_grad_(False)
    terms = zeropp.plan.memory(halves, make_config(stage=0), 4).terms
    assert terms["persistent_weights"] == terms["frozen_weights"] == terms["gradients"] // 2  # of the trainable ones


def originals() -> tuple[int, int]:
    """Original storages that are still there after wrapping, of how many."""
    model = Routed(3, 16)
    arrays = []
    for parameter in model.parameters():
        array = np.array(parameter.detach().numpy())
        arrays.append(weakref.ref(array))
        parameter.data = torch.from_numpy(array)  # the storage holds the array, and frees it at its own end
        del array
    optimizer = trained(model, make_config(persist=20))
    assert optimizer.engine.persistent
    return sum(ref() is not None for ref in arrays), len(arrays)


def test_wrapping_frees_the_original_weights() -> None:
    assert run_ranks(2, originals) == [(0, 6)] * 2


# The end.


def named_threads() -> set[threading.Thread]:
    """The engine's threads that live: compared one by one, for those of a case before may end during this one."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("zeropp")}


def hooks_of(model: nn.Module) -> list[str]:
    """Everything that is hung on the model's modules and parameters."""
    found = []
    for path, module in model.named_modules():
        found += [f"{path}.{name}" for name, value in vars(module).items() if "hooks" in name and value]
        found += [f"{path}.{name}" for name in vars(module) if callable(vars(module)[name]) and name != "training"]
        found += [f"{path}.{name}" for name in vars(module) if isinstance(vars(type(module)).get(name), type(hooks_of))]
    for name, parameter in model.named_parameters():
        found += [name] * bool(parameter._post_accumulate_grad_hooks)
    return found


def steps_then(end: str, settings: dict[str, object], automatic: bool) -> dict[str, object]:
    """Train, drop everything in the way that ``end`` says; what is left. Without the collector if ``automatic``."""
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
    refs = [weakref.ref(thing) for thing in (model, optimizer, engine, engine.schedule, engine.comm, *engine.units)]
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
        for _ in range(100):  # a refresh that is on its way ends first
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


@pytest.mark.parametrize("end", ["rest", "forward", "error", "closed", "model first", "optimizer first"])
def test_nothing_outlives_model_and_optimizer(end: str) -> None:
    for found in run_ranks(2, steps_then, end, {"persist": 10}, False):
        assert found == NOTHING


def test_nothing_is_left_on_one_rank() -> None:
    assert run_ranks(1, steps_then, "rest", {}, False, init=False) == [NOTHING]


def test_threads_end_with_the_engine() -> None:
    """The streams' threads hold no tensor and no engine once idle."""
    for found in run_ranks(2, steps_then, "rest", {"overlap_comm": True}, False):
        assert found["threads"] == 0


def closed() -> tuple[list[str], list[str], list[str]]:
    """Hooks before wrapping, while wrapped, and after close."""
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


def released_by(make: Callable[[], nn.Module]) -> int:
    model = make()
    optimizer = trained(model, make_config(reuse=0, prefetch=0))
    for _ in range(2):
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return owned_bytes(optimizer.engine.units)["gathered"]


def test_nothing_is_gathered_between_steps() -> None:
    assert run_ranks(2, released_by, Routed) == [0, 0]
