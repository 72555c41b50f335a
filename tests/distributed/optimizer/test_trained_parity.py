"""Parameters frozen, unfrozen and added to groups after wrapping train as in plain torch with the same calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.branching_models import WIDTH, make_config
from tests.support.freezing_model import Tower, batch, trained
from tests.support.rank_pool import run_ranks, spread
from tests.support.sharded_and_plain import Pair

# By name: ranks, ranks per node, settings.
PLACED: dict[str, tuple[int, int, dict[str, object]]] = {
    "stage 3": (2, 2, {}),
    "bare": (2, 2, {"prefetch": 0, "reuse": 0, "live": 0, "overlap_comm": False}),
    "one unit": (2, 2, {"unit_min_blocks": 10_000}),
    "persistent": (2, 2, {"persist": 100_000}),
    "mixed": (2, 2, {"persist": WIDTH}),
    "stage 1": (2, 2, {"stage": 1}),
    "hpz": (4, 2, {"zero_hpz_partition_size": 2}),
    "mics": (4, 2, {"mics_shard_size": 2}),
}


def everything(model: Tower) -> list[nn.Parameter]:
    return list(model.parameters())


Story = Callable[[Tower, torch.optim.Optimizer, int, int], None]


class Tale:
    """A sequence of changes to a model in training.

    Args:
        start: function that prepares the model before it is wrapped.
        tell: function that changes the model before each micro-batch. It is also called before the step, with -1 as the
            micro-batch.
        given: function that returns the parameters for the optimizer.
        micros: micro-batches in a step.
    """

    def __init__(self, start: Callable[[Tower], object], tell: Story, given: Any = everything, micros: int = 1) -> None:
        self.start, self.tell, self.given, self.micros = start, tell, given, micros


def gradual(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    if step in (1, 3, 4) and micro == 0:
        model.blocks[4 - step if step > 1 else 3].requires_grad_(True)


def thaw_and_freeze(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    if micro == 0 and step in (2, 4):
        for block in model.blocks[:2]:
            block.requires_grad_(step == 4)


def taking_turns(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    if micro == 0:
        model.blocks.requires_grad_(step % 2 == 0)
        model.head.requires_grad_(step % 2 == 1)


def biases_first(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    if micro == 0 and step == 1:
        model.gain.requires_grad_(True)
        for block in model.blocks:
            block.lin.bias.requires_grad_(True)
    if micro == 0 and step == 3:
        model.blocks[1].lin.weight.requires_grad_(True)


def groups(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    if micro == 0 and step == 1:
        model.blocks[3].requires_grad_(True)
        optimizer.add_param_group({"params": model.blocks[3].parameters(), "lr": 0.01})
    if micro == 0 and step == 2:  # both blocks are frozen; block 1 is unfrozen at step 4
        optimizer.add_param_group({"params": [*model.blocks[1].parameters(), *model.blocks[0].parameters()]})
    if micro == 0 and step == 4:
        model.blocks[1].requires_grad_(True)


def never_asked(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    model.zero_grad() if micro == 0 else None
    if micro == 0 and step == 2:  # requires gradients from now on, but is in no group until later
        model.blocks[2].requires_grad_(True)
    if micro == -1 and step == 3:
        optimizer.add_param_group({"params": model.blocks[2].lin.weight, "weight_decay": 0.2})


def between_micros(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    if step == 1 and micro == 1:
        model.blocks[1].requires_grad_(True)
    if step == 2 and micro == 1:
        model.blocks[3].requires_grad_(False)
    if step == 3 and micro == -1:
        model.blocks[3].requires_grad_(True)
        model.norm.requires_grad_(False)
    if step == 4 and micro == 1:
        model.norm.requires_grad_(True)


def at_random(seed: int) -> Story:
    def tell(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
        rng = random.Random(100 * seed + 10 * step + micro)
        if rng.random() < 0.7:
            for parameter in model.parameters():
                if rng.random() < 0.3:
                    parameter.requires_grad_(rng.random() < 0.6)
            model.out.bias.requires_grad_(True)  # backward needs at least one trainable parameter
        if rng.random() < 0.2:
            with torch.no_grad():
                model(torch.ones(1, WIDTH, dtype=torch.float64))

    return tell


def half_frozen(seed: int) -> Callable[[Tower], None]:
    def start(model: Tower) -> None:
        rng = random.Random(seed)
        for parameter in model.parameters():
            parameter.requires_grad_(rng.random() < 0.4)
        model.out.bias.requires_grad_(True)

    return start


TALES = {
    "gradual": Tale(lambda m: m.blocks.requires_grad_(False), gradual),
    "thaw and freeze": Tale(lambda m: None, thaw_and_freeze),
    "taking turns": Tale(lambda m: None, taking_turns),
    "biases first": Tale(lambda m: (m.blocks.requires_grad_(False), m.gain.requires_grad_(False)), biases_first),
    "groups": Tale(lambda m: m.blocks.requires_grad_(False), groups, trained),
    "never asked": Tale(lambda m: m.blocks.requires_grad_(False), never_asked, trained),
    "between micro-batches": Tale(lambda m: m.blocks[1].requires_grad_(False), between_micros, micros=2),
    **{f"random {seed}": Tale(half_frozen(seed), at_random(seed), micros=1 + seed % 3) for seed in range(4)},
}


def live(name: str, settings: dict[str, object]) -> None:
    live_tale(TALES[name], settings)


def live_tale(tale: Tale, settings: dict[str, object]) -> None:
    """Train a pair for six steps with the same changes to both models, and compare them at the end."""
    model = Tower()
    tale.start(model)
    pair = Pair(
        model,
        make_config(**settings, gradient_accumulation_steps=tale.micros),
        optimizer=lambda m: torch.optim.SGD(tale.given(m), lr=0.1, momentum=0.9, weight_decay=0.05),
        batch=batch,
        micros=tale.micros,
    )
    for step in range(6):
        pair.zero_grad()
        for micro in range(tale.micros):
            for half in pair.halves:
                tale.tell(half.model, half.optimizer, step, micro)
            pair.backward()
        for half in pair.halves:
            tale.tell(half.model, half.optimizer, step, -1)
        pair.step()
    assert [p.requires_grad for p in pair.model.parameters()] == [p.requires_grad for p in pair.plain.parameters()]
    pair.check()


@pytest.mark.every(8)
@pytest.mark.parametrize(("name", "placement"), spread(TALES, PLACED, every=8))
def test_trains_as_plain_torch(name: str, placement: str) -> None:
    world, local, settings = PLACED[placement]
    run_ranks(world, live, name, settings, local_world_size=local)


def live_at_random(seeds: list[int], settings: dict[str, object]) -> None:
    for seed in seeds:
        live_tale(Tale(half_frozen(seed), at_random(seed), micros=1 + seed % 3), settings)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", PLACED)
def test_random_changes(placement: str) -> None:
    world, local, settings = PLACED[placement]
    run_ranks(world, live_at_random, list(range(100, 130)), settings, local_world_size=local, timeout=500)
