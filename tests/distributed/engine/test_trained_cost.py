"""Costs of frozen and unfrozen parameters: bytes owned, elements gathered, messages, and exchanges between ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Block, Routed, gathers, make_config
from tests.support.freezing_model import Tower, batch, train, wrap
from tests.support.owned_memory import live_numel, owned_bytes
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair


def sizes(settings: dict[str, object]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Train a model with frozen blocks, unfreeze one block, and train again.

    Args:
        settings: keys for ``make_config``.

    Returns:
        Bytes owned before and after the block is unfrozen, and by a model that was wrapped with the block trainable.
    """
    owned = []
    for late in (True, False):
        model = Tower().double()
        model.blocks.requires_grad_(False)
        if not late:
            model.blocks[3].requires_grad_(True)
        optimizer = wrap(model, **settings)
        train(model, optimizer, 2)
        owned.append(owned_bytes(optimizer))
        if late:
            model.blocks[3].requires_grad_(True)
            train(model, optimizer, 2)
            optimizer.engine.wait_for_refresh()
            owned.append(owned_bytes(optimizer))
    return owned[0], owned[1], owned[2]


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, {"stage": 1}, {"zero_hpz_partition_size": 2}], ids=["3", "1", "hpz"])
def test_an_unfrozen_block_costs_as_much_as_a_trainable_one(settings: dict[str, object]) -> None:
    for before, after, expected in run_ranks(4, sizes, settings, local_world_size=2):
        assert after == expected
        assert after["gradients"] > before["gradients"]
        assert after["frozen_weights"] < before["frozen_weights"]


def planned_sizes() -> tuple[list[int], list[int], list[int]]:
    """Unfreeze one bias of a model with frozen blocks, and run a forward.

    Returns:
        Sizes of units that prefetch plans use, before and after that, and the units' actual sizes. All in elements.
    """
    model = Tower().double()
    model.blocks.requires_grad_(False)
    optimizer = wrap(model)
    engine = optimizer.engine
    before = list(engine._schedule.live_units.numel)
    model.blocks[2].lin.bias.requires_grad_(True)
    model(batch(0, 0, 0))
    return before, engine._schedule.live_units.numel, [unit.numel for unit in engine.units]


def test_plans_count_with_the_new_sizes() -> None:
    for before, planned, sizes in run_ranks(2, planned_sizes):
        assert planned == sizes != before


def order(frozen: bool) -> list[tuple[tuple[int, int], ...]]:
    """Train three steps.

    Args:
        frozen: True to freeze the biases of all blocks.

    Returns:
        For each kind of backward, the learned reductions as pairs (unit, number of uses before the reduction).
    """
    model = Routed(4)
    optimizer = wrap(model)
    for block in model.blocks if frozen else ():
        block.lin.bias.requires_grad_(False)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    known = optimizer.engine._schedule.known._known
    return [variants.last.reductions for key, variants in known.items() if key[0] == "backward"]


def test_units_with_frozen_parameters_are_reduced_as_early_as_others() -> None:
    assert run_ranks(2, order, True) == run_ranks(2, order, False)


def exchanges(turns: int) -> list[tuple[int, dict[str, int]]]:
    """Train rounds of two steps, in which the blocks and the head are trained in turns.

    Args:
        turns: number of rounds.

    Returns:
        For each round, the number of exchanges, and the bytes reduced by unit.
    """
    model = Tower().double()
    optimizer = wrap(model)
    ledger = optimizer.engine.comm.ledger
    found = []
    for turn in range(turns):
        model.blocks.requires_grad_(turn % 2 == 0)
        model.head.requires_grad_(turn % 2 == 1)
        ledger.reset()
        train(model, optimizer, 2)
        agreed = sum(row.calls for row in ledger.rows if row.unit == "<agreement>")
        found.append((agreed, {row.unit: row.bytes for row in ledger.rows if row.kind == "reduce"}))
    return found


def test_parts_that_take_turns_are_learned_once_and_frozen_ones_send_nothing() -> None:
    for rounds in run_ranks(2, exchanges, 6):
        assert rounds[0][0] > rounds[4][0] and rounds[1][0] > rounds[5][0]
        assert rounds[2][0] == rounds[4][0] <= 1 + 2  # at most one for the change, and one for each backward
        assert rounds[3][0] == rounds[5][0] <= 1 + 2
        assert not any(unit.startswith("head") for unit in rounds[4][1])
        assert not any(unit.startswith("blocks") for unit in rounds[5][1])
        assert rounds[4][1] and rounds[5][1]


def lent_and_frozen() -> tuple[dict[str, int], dict[str, int]]:
    """Train, freeze the blocks inside GatheredParameters, and train again.

    Returns:
        Bytes reduced by unit before and after that.
    """
    model = Tower().double()
    optimizer = wrap(model)
    ledger = optimizer.engine.comm.ledger
    found = []
    for freeze in (False, True):
        if freeze:
            with zeropp.zero.GatheredParameters(model.blocks):
                model.blocks.requires_grad_(False)
        ledger.reset()
        train(model, optimizer, 2)
        found.append({row.unit: row.bytes for row in ledger.rows if row.kind == "reduce"})
    return found[0], found[1]


def test_frozen_inside_gathered_parameters() -> None:
    """Frozen blocks are reduced no more. If the engine missed the change, it would reduce zeros for them."""
    for before, after in run_ranks(2, lent_and_frozen):
        assert any(unit.startswith("blocks") for unit in before)
        assert after == {unit: sent for unit, sent in before.items() if not unit.startswith("blocks")} and after


class Beside(Block):
    """A block that is given a second tensor and does not use it, so that backward never reaches that tensor."""

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x)


class GivenMore(Routed):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Beside() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, unused=x * 2)
        return x


def live_in_backward(when: str, kind: type[Routed]) -> tuple[int, int]:
    """Train four steps with all blocks frozen but the first, and sample gathered elements in backward.

    Args:
        when: "before" or "after" wrapping, the time of freezing.
        kind: class of the model.

    Returns:
        Most elements gathered at once in the last backward, and elements of the largest unit.
    """
    model = kind(6)
    optimizer = wrap(model, live=0, prefetch=0, reuse=0) if when == "after" else None
    model.blocks[1:].requires_grad_(False)
    optimizer = optimizer or wrap(model, live=0, prefetch=0, reuse=0)
    units, most = optimizer.engine.units, 0

    def sample(*_: object) -> None:
        nonlocal most
        most = max(most, live_numel(units))

    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: out.register_hook(sample) and None)
    for _ in range(4):
        most = 0
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    return most, max(unit.numel for unit in units)


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", [Routed, GivenMore], ids=["plain", "unused inputs"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_blocks_are_released_in_backward(when: str, kind: type[Routed]) -> None:
    for most, block in run_ranks(2, live_in_backward, when, kind):
        assert block <= most <= 2 * block


class TwoWays(nn.Module):
    """One unit: a trained layer that calls with ``gain=True`` run, and a frozen layer that other calls run."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, *, gain: bool) -> Tensor:
        return torch.tanh(self.gain(x)) if gain else self.frozen(x)


class Early(nn.Module):
    """A model whose first result is used last.

    Backward reaches the frozen layer of the first block before the trained layer of the same unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoWays() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.blocks[0](x, gain=True)
        return self.blocks[0](self.blocks[1](x, gain=True), gain=False) * gain


def gathered_in_a_step() -> dict[str, int]:
    """Return the number of gathers of each unit in the third step, without prefetch and reuse."""
    model = Early()
    optimizer = wrap(model, prefetch=0, reuse=0)
    for _ in range(3):
        before = gathers(optimizer)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: count - before[name] for name, count in gathers(optimizer).items()}


def test_a_unit_stays_until_the_gradients_behind_its_frozen_part_have_come() -> None:
    """A unit is gathered once for each call in forward, and once in backward. Each gather counts for two buffers."""
    assert run_ranks(2, gathered_in_a_step) == [{"blocks.0": 2 * 3, "blocks.1": 2 * 2}] * 2


class Scaled(nn.Module):
    """A frozen weight of the root and a frozen layer, which form one unit, behind a trained block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * self.scale
        return self.blocks[1](torch.tanh(self.inner(x)))


class Shifted(nn.Module):
    """A frozen scale and a trained shift of the root, which form one unit.

    The gradient of the shift arrives before backward uses the scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x) * self.scale + self.shift)


def frozen_outside(kind: type[nn.Module], grad: bool) -> None:
    torch.manual_seed(2)
    config = make_config(live=0, prefetch=0, reuse=0)
    pair = Pair(kind(), config, batch=lambda *place: batch(*place).requires_grad_(grad))
    for _ in range(3):
        pair.train()
    pair.check()


@pytest.mark.every(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Scaled, Shifted])
def test_frozen_weights_around_trained_blocks_stay_until_backward_has_used_them(
    kind: type[nn.Module], grad: bool
) -> None:
    """The weights stay even if the model's input needs no gradient, whose arrival would show the end of their use."""
    run_ranks(2, frozen_outside, kind, grad)
