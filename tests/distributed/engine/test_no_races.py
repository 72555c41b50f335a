"""A delay before or after any collective, copy or wait, on one rank or on all, changes no bit of the result."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.parity import Recipe, Trained, build, train_zero
from tests.support.rank_pool import run_ranks, some
from tests.support.text_models import Block
from zeropp.comm import streams
from zeropp.comm.hops import Comm, Hop
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient
from zeropp.wire import paths
from zeropp.wire.codecs import PlainCodec
from zeropp.wire.paths import GatherPath

# Functions that can be delayed: name of the place -> (class or module, name of the function).
PLACES: dict[str, tuple[Any, str]] = {
    "gather hop": (Hop, "all_gather"),
    "reduce hop": (Hop, "all_to_all"),
    "step sync": (Comm, "sum"),
    "agreement": (Comm, "all_gather_ints"),
    "gather copy": (GatherPath, "begin"),
    "queueing a refresh": (FlatBuffer, "refresh"),
    "gradient copy": (Gradient, "pack"),
    "gradient sum": (PlainCodec, "decode_sum_"),
    "between links": (paths, "used_here"),
    "no_sync copy": (Gradient, "_hold_whole"),
    "showing values": (FlatBuffer, "unshard"),
    "hiding values": (FlatBuffer, "guard_values"),
    "freeing": (FlatBuffer, "free_storage"),
    "queueing": (streams.ThreadStream, "run"),
    "wait": (streams.ThreadEvent, "wait"),
    "completion": (streams.ThreadEvent, "finish"),
    "computing": (Block, "forward"),
    "step": (ZeroOptimizer, "step"),
}


# Functions that run only if refreshes send exact differences (lossless).
COUNTED: dict[str, tuple[Any, str]] = {
    "counting": (FlatBuffer, "count_escapes"),
    "agreeing on sizes": (Comm, "largest"),
}


class Delays:
    """Sleeps of 5 to 50 ms: at the first call, and then at calls drawn at random, until a budget is spent.

    Args:
        seed: seed of the random numbers, which differ between ranks.
        often: probability of a sleep.
        budget: total length of all sleeps in seconds.

    Attributes:
        slept: number of sleeps so far.
    """

    def __init__(self, seed: int, often: float, budget: float) -> None:
        self.random = random.Random(seed * 64 + dist.get_rank())
        self.often, self.budget = often, budget
        self.slept = 0

    def maybe(self) -> None:
        if self.budget > 0 and (not self.slept or self.random.random() < self.often):
            seconds = self.random.uniform(0.005, 0.05)
            self.budget -= seconds
            self.slept += 1
            time.sleep(seconds)

    def around(self, method: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.maybe()
            result = method(*args, **kwargs)
            if after:
                self.maybe()
            return result

        return slow


@contextlib.contextmanager
def slowed(places: list[str], ranks: list[int], seed: int, often: float, budget: float) -> Iterator[Delays]:
    """Delay the functions of some places inside the block.

    Args:
        places: keys of PLACES and COUNTED.
        ranks: ranks that are delayed.
        seed: seed of the delays. With an even seed they come before each call; with an odd one after it.
        often: probability of a delay.
        budget: total length of the delays in seconds.
    """
    delays = Delays(seed, often, budget)
    with contextlib.ExitStack() as stack:
        for place in places if dist.get_rank() in ranks else []:
            cls, name = {**PLACES, **COUNTED}[place]
            stack.enter_context(mock.patch.object(cls, name, delays.around(getattr(cls, name), seed % 2 == 1)))
        yield delays


def differences(base: Trained, other: Trained) -> list[str]:
    """Return the losses, norms and weights that differ in any bit."""
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(base.losses, other.losses, strict=True)) if a != b]
    found += [f"norm {i}" for i, (a, b) in enumerate(zip(base.norms, other.norms, strict=True)) if a != b]
    return found + [name for name, value in base.state.items() if not torch.equal(value, other.state[name])]


def train_slowed(
    recipe: Recipe, cases: list[tuple[list[str], list[int], int]], often: float, budget: float
) -> list[tuple[int, list[str]]]:
    """Train once at full speed, and once with delays for each case.

    Args:
        recipe: the recipe.
        cases: (places, ranks, seed) of each case; see `slowed`.
        often: probability of a delay.
        budget: total length of the delays of a case in seconds.

    Returns:
        For each case, the number of delays on this rank, and the values that differ from the run at full speed.
    """
    base = train_zero(recipe)
    results = []
    for places, ranks, seed in cases:
        with slowed(places, ranks, seed, often, budget) as delays:
            run = train_zero(recipe)
        results.append((delays.slept, differences(base, run)))
    return results


def check_delays(
    world: int, nodes: int, recipe: Recipe, cases: list[tuple[list[str], list[int], int]], budget: float = 0.5
) -> None:
    runs = run_ranks(world, train_slowed, recipe, cases, 0.4, budget, local_world_size=world // nodes, timeout=100)
    for rank, results in enumerate(runs):
        for case, (slept, found) in zip(cases, results, strict=True):
            assert not found, f"rank {rank}, {case}: {found}"
            assert slept or rank not in case[1], f"rank {rank}, {case}: nothing was delayed"


TIGHT: dict[str, object] = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 100}
RECIPE = Recipe("gpt", torch.float32, steps=3, accumulation=2, how="no_sync", zero=TIGHT, clip=1.0)


@pytest.mark.campaign
@pytest.mark.every(8)
@pytest.mark.parametrize("place", some(PLACES, 2))
def test_one_place_on_one_rank(place: str) -> None:
    # Only with several nodes does a path go over two kinds of links.
    world, nodes = (4, 2) if place == "between links" else (2, 1)
    check_delays(world, nodes, RECIPE, [([place], [0], 0), ([place], [1], 1)], budget=0.3)


@pytest.mark.parametrize("nodes", some([2, 1], 2))
@pytest.mark.parametrize(
    "model", some(["tied segments, reentrant", "repeated blocks", "frozen middle, segments recomputed"], 3)
)
def test_everywhere_on_all_ranks(model: str, nodes: int) -> None:
    places = [place for place in PLACES if place != "no_sync copy"]
    recipe = Recipe(model, steps=2, evaluate=True, zero={"stage3_param_persistence_threshold": 100 * (nodes - 1)})
    check_delays(2 * nodes, nodes, recipe, [(places, list(range(2 * nodes)), 2), (places, [0], 3)], budget=0.3)


def test_quantized_messages_with_feedback() -> None:
    quantized: dict[str, object] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    zero = {**quantized, "zeropp_loco_param": {}, "zero_hpz_partition_size": 2}
    recipe = Recipe("repeated blocks", torch.float32, steps=2, evaluate=True, zero=zero)
    places = [place for place in PLACES if place not in ("no_sync copy", "computing")]
    check_delays(4, 2, recipe, [(places, [0, 1, 2, 3], 2)])


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("codec", "zero"),
    [
        ("lossless", {"zero_hpz_partition_size": 2}),
        pytest.param("delta4", {"stage": 1, "overlap_comm": True}, marks=pytest.mark.campaign),
        pytest.param("delta4", {"zero_hpz_partition_size": 2}, marks=pytest.mark.campaign),
        pytest.param("lossless", {"stage": 1, "overlap_comm": True}, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_weights_renewed_by_differences(codec: str, zero: dict[str, object]) -> None:
    extension, top = {"weight_codec": codec}, {"bf16": {"enabled": True}}
    settings: dict[str, object] = {**zero, "zero_quantized_gradients": True, "zeropp_loco_param": {}}
    recipe = Recipe("gpt", torch.float32, steps=4, evaluate=True, zero=settings, extension=extension, top=top)
    places = ["reduce hop", "gather hop", "step sync", "queueing a refresh", "between links", "queueing", "wait"]
    places.append("step")
    places += ["counting", "agreeing on sizes"] if codec == "lossless" else []
    check_delays(4, 2, recipe, [(places, [0, 1, 2, 3], 2), (places, [0], 3), (places, [3], 4)])


@pytest.mark.campaign
def test_sizes_of_differences_are_waited_for_on_one_node() -> None:
    """Refreshes wait for the agreement on the sizes of their messages, although they run on another comm stream.

    Ranks agree on the comm stream of links between nodes. With one node, refreshes run on that of links inside it.
    """
    zero: dict[str, object] = {"stage": 1, "overlap_comm": True}
    extension, top = {"weight_codec": "lossless"}, {"bf16": {"enabled": True}}
    recipe = Recipe("gpt", torch.float32, steps=2, evaluate=True, zero=zero, extension=extension, top=top)
    check_delays(4, 1, recipe, [(list(COUNTED), [0, 1, 2, 3], 2)])


@pytest.mark.campaign
@pytest.mark.timeout(600)  # the delays add up to minutes
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", ["gpt", "repeated blocks", "encoder", "tied segments, reentrant", "modes"])
def test_every_place_everywhere(model: str, place: str) -> None:
    if place == "computing" and not any(isinstance(module, Block) for module in build(Recipe(model), 0).modules()):
        pytest.skip(f"{model} has no Block whose computing could be slowed")
    for zero in ({}, TIGHT, {"stage3_max_live_parameters": 0}, {"stage3_param_persistence_threshold": 10**6}):
        recipe = Recipe(model, steps=3, accumulation=3, how="no_sync mixed", evaluate=True, zero=zero)
        threshold = zero.get("stage3_param_persistence_threshold", 0)
        if threshold == 10**6 and place in ("freeing", "agreement", "gather copy"):
            continue  # all parameters are persistent, so nothing is freed or gathered
        if threshold == 0 and place == "queueing a refresh":
            continue  # no parameter is persistent, so nothing is refreshed
        if place != "between links":  # with one node, a path has one kind of link
            check_delays(2, 1, recipe, [([place], [0], 4), ([place], [1], 5), ([place], [0, 1], 6)], budget=1.0)
        check_delays(4, 2, recipe, [([place], [seed % 4], seed) for seed in range(4)], budget=1.0)


# A missing wait, which the tests above must detect.


def train_impatiently(recipe: Recipe) -> list[str]:
    base = train_zero(recipe)
    original = streams.ThreadStream.run

    def run(self: streams.ThreadStream, *works: Callable[[], object], **more: Any) -> Any:
        event = original(self, *works, **more)
        if self._thread.name.startswith("zeropp reduce"):
            return streams.DONE  # sabotage: callers do not wait for the reduction
        return event

    with mock.patch.object(streams.ThreadStream, "run", run), slowed(["reduce hop"], [0, 1], 0, 0.5, 1.0):
        return differences(base, train_zero(recipe))


@pytest.mark.campaign
def test_a_missing_wait_shows() -> None:
    assert all(run_ranks(2, train_impatiently, Recipe(steps=3, zero=TIGHT)))
