"""``requires_grad_`` and ``add_param_group`` after wrapping, beside plain torch: the same calls on both."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeropp
from tests.distributed.harness import RankFailure, run_ranks, spread
from tests.distributed.parity import assert_close
from tests.distributed.shapes import WIDTH, Block, Routed, make_config, share
from tests.owned import live_numel, owned_bytes
from zeropp.params.unit import UnitState

# Ranks, ranks per node, settings.
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


class Gain(nn.Module):
    """Gives away a view of its weight, to be read when the module is left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self) -> Tensor:
        return self.weight.view(1, -1)


class Tower(nn.Module):
    """Blocks, one of them checkpointed, one used twice, a norm and a gain between, and a head of two tied layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = Gain()
        self.head, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        gain = self.gain()
        x = self.norm(self.blocks[3](self.blocks[0](x))) * gain
        return self.out(torch.tanh(self.head(x)))


def everything(model: Tower) -> list[nn.Parameter]:
    return list(model.parameters())


def trained(model: Tower) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


Story = Callable[[Tower, torch.optim.Optimizer, int, int], None]


class Tale:
    """How a model starts, and what happens before micro-batch ``micro`` of each step (-1: before the step's end)."""

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
    if micro == 0 and step == 2:  # frozen for another two steps
        optimizer.add_param_group({"params": [*model.blocks[1].parameters(), *model.blocks[0].parameters()]})
    if micro == 0 and step == 4:
        model.blocks[1].requires_grad_(True)


def never_asked(model: Tower, optimizer: torch.optim.Optimizer, step: int, micro: int) -> None:
    model.zero_grad() if micro == 0 else None
    if micro == 0 and step == 2:  # trained by the model, but in no group until later
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
            model.out.bias.requires_grad_(True)  # something has to be left for backward
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


def batch(step: int, micro: int, rank: int) -> Tensor:
    seed = 1000 * step + 10 * micro + rank
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def live(name: str, settings: dict[str, object], steps: int = 6) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Final weights of both; the same story told to both."""
    return live_tale(TALES[name], settings, steps)


def live_tale(tale: Tale, settings: dict[str, object], steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Tower().double()
    share(model)
    tale.start(model)
    plain = copy.deepcopy(model)
    made = [torch.optim.SGD(tale.given(m), lr=0.1, momentum=0.9, weight_decay=0.05) for m in (model, plain)]
    config = make_config(**settings, gradient_accumulation_steps=tale.micros)
    optimizer = zeropp.ZeroOptimizer(made[0], model, config)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        optimizer.zero_grad()
        made[1].zero_grad()
        for micro in range(tale.micros):
            tale.tell(model, optimizer, step, micro)
            tale.tell(plain, made[1], step, micro)
            optimizer.backward(model(batch(step, micro, rank)).square().mean())
            for other in range(world):
                (plain(batch(step, micro, other)).square().mean() / world / tale.micros).backward()
        tale.tell(model, optimizer, step, -1)
        tale.tell(plain, made[1], step, -1)
        optimizer.step()
        made[1].step()
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    return zeropp.full_state(model), plain.state_dict()


def check(results: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    for state, plain in results:
        for name, value in plain.items():
            assert_close(state[name], value, 1e-12, name)


@pytest.mark.parametrize(("name", "placement"), spread(TALES, PLACED, every=5))
def test_trains_as_plain_torch(name: str, placement: str) -> None:
    world, local, settings = PLACED[placement]
    check(run_ranks(world, live, name, settings, local_world_size=local))


def live_at_random(seeds: list[int], settings: dict[str, object]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [live_tale(Tale(half_frozen(s), at_random(s), micros=1 + s % 3), settings, 6) for s in seeds]


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", PLACED)
def test_random_changes(placement: str) -> None:
    world, local, settings = PLACED[placement]
    seeds = list(range(100, 130))
    for results in run_ranks(world, live_at_random, seeds, settings, local_world_size=local, timeout=500):
        check(results)


# What else must be right.


def with_history() -> tuple[Tower, torch.optim.Optimizer]:
    """A model that was trained before it is wrapped, so that the optimizer has moments of every block."""
    model = Tower().double()
    share(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(batch(90, 0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def adam_with_history() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The optimizer has moments of a block that is frozen when the model is wrapped, and trained again later."""
    model, optimizer = with_history()
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    reference.load_state_dict(optimizer.state_dict())
    for each in (model, plain):
        each.blocks[1].requires_grad_(False)
    wrapped = zeropp.ZeroOptimizer(optimizer, model, make_config())
    for step in range(4):
        if step == 2:
            for each in (model, plain):
                each.blocks[1].requires_grad_(True)
        wrapped.zero_grad()
        reference.zero_grad()
        model(batch(step, 0, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(step, 0, rank)).square().mean() / dist.get_world_size()).backward()
        wrapped.step()
        reference.step()
    return zeropp.full_state(model), plain.state_dict()


def test_state_of_a_frozen_parameter_waits_for_it() -> None:
    check(run_ranks(2, adam_with_history))


def wrap(model: Tower, **settings: object) -> zeropp.ZeroOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zeropp.ZeroOptimizer(inner, model, make_config(**settings))


def train(model: Tower, optimizer: zeropp.ZeroOptimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, 0, dist.get_rank())).square().mean().backward()
        optimizer.step()


def sizes(settings: dict[str, object]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes owned before and after a block is unfrozen, and those of a model wrapped with the block trainable."""
    owned = []
    for late in (True, False):
        model = Tower().double()
        model.blocks.requires_grad_(False)
        if not late:
            model.blocks[3].requires_grad_(True)
        optimizer = wrap(model, **settings)
        train(model, optimizer, 2)
        owned.append(owned_bytes(optimizer.engine.units))
        if late:
            model.blocks[3].requires_grad_(True)
            train(model, optimizer, 2)
            optimizer.engine.refresh.wait()
            owned.append(owned_bytes(optimizer.engine.units))
    return owned[0], owned[1], owned[2]


@pytest.mark.parametrize("settings", [{}, {"stage": 1}, {"zero_hpz_partition_size": 2}], ids=["3", "1", "hpz"])
def test_an_unfrozen_block_costs_what_a_trainable_one_costs(settings: dict[str, object]) -> None:
    for before, after, expected in run_ranks(4, sizes, settings, local_world_size=2):
        assert after == expected
        assert after["gradients"] > before["gradients"]
        assert after["frozen_weights"] < before["frozen_weights"]


def planned_sizes() -> tuple[list[int], list[int], list[int]]:
    """Sizes of units that plans count with: before, after biases have left their buffers, and as they are."""
    model = Tower().double()
    model.blocks.requires_grad_(False)
    optimizer = wrap(model)
    engine = optimizer.engine
    before = list(engine.schedule.holdings.numel)
    model.blocks[2].lin.bias.requires_grad_(True)
    model(batch(0, 0, 0))
    return before, engine.schedule.holdings.numel, [unit.numel for unit in engine.units]


def test_plans_count_with_the_new_sizes() -> None:
    for before, planned, sizes in run_ranks(2, planned_sizes):
        assert planned == sizes != before


def order(frozen: bool) -> list[tuple[tuple[int, int], ...]]:
    """Where reductions have their places in learned backwards."""
    model = Routed(4)
    optimizer = wrap(model)
    for block in model.blocks if frozen else ():
        block.lin.bias.requires_grad_(False)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    known = optimizer.engine.schedule.known._known
    return [variants.last.reductions for key, variants in known.items() if key[0] == "backward"]


def test_units_with_frozen_parameters_are_reduced_as_early_as_others() -> None:
    assert run_ranks(2, order, True) == run_ranks(2, order, False)


def exchanges(turns: int) -> list[tuple[int, dict[str, int]]]:
    """Agreements in each of some rounds in which two parts of a model take turns, and bytes reduced by unit."""
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
        assert rounds[2][0] == rounds[4][0] <= 1 + 2  # one for the change, one at the end of each short backward
        assert rounds[3][0] == rounds[5][0] <= 1 + 2
        assert not any(unit.startswith("head") for unit in rounds[4][1])
        assert not any(unit.startswith("blocks") for unit in rounds[5][1])
        assert rounds[4][1] and rounds[5][1]


def precision() -> tuple[Tensor, Tensor]:
    """A frozen float32 weight of a model that computes in bfloat16, before and after it is unfrozen."""
    model = Tower()
    model.blocks.requires_grad_(False)
    share(model)
    before = model.blocks[0].lin.weight.detach().clone()
    optimizer = wrap(model, bf16={"enabled": True})
    train(model, optimizer, 1)
    model.blocks.requires_grad_(True)
    model(torch.ones(1, WIDTH))
    assert all(buffer.trainable for buffer in optimizer.engine.buffers)
    return before, zeropp.full_state(model)["blocks.0.lin.weight"]


def test_an_unfrozen_weight_keeps_every_bit() -> None:
    for before, after in run_ranks(2, precision):
        assert torch.equal(before, after)


def forward_given_up() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A forward whose units are kept for a backward that never comes: one of them is unfrozen meanwhile."""
    model = Tower().double()
    model.norm.requires_grad_(False)
    share(model)
    plain = copy.deepcopy(model)
    optimizer, reference = wrap(model), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            if step == 2:
                each(batch(step, 0, 0))
                assert each is plain or "norm.weight" in kept(optimizer)
                each.norm.requires_grad_(True)
            each(batch(step, 1, 0)).square().mean().backward()
            stepper.step()
    return zeropp.full_state(model), plain.state_dict()


def kept(optimizer: zeropp.ZeroOptimizer) -> list[str]:
    units = [unit for unit in optimizer.engine.units if unit.state is not UnitState.SHARDED]
    return [name for unit in units for buffer in unit.buffers for name in buffer.names]


def test_units_kept_for_a_backward_that_never_comes() -> None:
    check(run_ranks(2, forward_given_up))


def clipped_before() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Between clipping and the step a block is unfrozen, and the model runs."""
    model = Tower().double()
    model.blocks[1].requires_grad_(False)
    share(model)
    plain = copy.deepcopy(model)
    optimizer, reference = wrap(model), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            each(batch(step, 0, 0)).square().mean().backward()
            if each is model:
                optimizer.clip_grad_norm_(0.05)
            else:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            each.blocks[1].requires_grad_(step > 0)
            each(batch(step, 1, 0))
            stepper.step()
    return zeropp.full_state(model), plain.state_dict()


def test_unfrozen_between_clipping_and_the_step() -> None:
    check(run_ranks(2, clipped_before))


class Beside(Block):
    """Is given a tensor that it makes nothing of, so that backward never comes to that."""

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
    """Most elements gathered at once in backward, and those of one block; all blocks but the first are frozen."""
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


@pytest.mark.parametrize("kind", [Routed, GivenMore], ids=["plain", "unused inputs"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_blocks_are_released_in_backward(when: str, kind: type[Routed]) -> None:
    for most, block in run_ranks(2, live_in_backward, when, kind):
        assert block <= most <= 2 * block


class Scaled(nn.Module):
    """Its own frozen weight and a frozen layer are one unit, which two calls use; a trained block comes before both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * self.scale
        return self.blocks[1](torch.tanh(self.inner(x)))


class Shifted(nn.Module):
    """The trained one of its own weights is done with in backward before the frozen one; they are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x) * self.scale + self.shift)


def frozen_outside(kind: type[nn.Module], grad: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(2)
    model = kind().double()
    plain = copy.deepcopy(model)
    optimizer = wrap(model, live=0, prefetch=0, reuse=0)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            each(batch(step, 0, 0).requires_grad_(grad)).square().mean().backward()
            stepper.step()
    return zeropp.full_state(model), plain.state_dict()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Scaled, Shifted])
def test_frozen_weights_around_trained_blocks_stay_until_backward_has_used_them(
    kind: type[nn.Module], grad: bool
) -> None:
    """Also where no gradient of the model's inputs is computed, which would tell."""
    check(run_ranks(2, frozen_outside, kind, grad))


def kept_graphs(which: str) -> tuple[dict[str, Tensor], dict[str, Tensor]] | str:
    """Two forwards, with a change between them, before one backward."""
    model = Tower().double()
    model.norm.requires_grad_(False)
    share(model)
    plain = copy.deepcopy(model)
    optimizer = wrap(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def change(each: Tower, on: bool) -> None:
        if which == "unfrozen":
            each.norm.requires_grad_(True)
        else:
            each.blocks[:2].requires_grad_(on)  # torch itself refuses that for checkpointed ones

    for step in range(4):
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            first = each(batch(step, 0, 0)).square().mean()
            change(each, on=False)
            second = each(batch(step, 1, 0)).square().mean()
            optimizer.backward(first + second) if each is model else (first + second).backward()
            change(each, on=True)
            stepper.step()
    return zeropp.full_state(model), plain.state_dict()


def test_graphs_from_before_a_parameter_was_frozen_still_have_their_backward() -> None:
    check(run_ranks(2, kept_graphs, "frozen"))


def test_graphs_from_before_a_parameter_was_unfrozen_are_refused() -> None:
    for failure in run_ranks(2, kept_graphs, "unfrozen", catch=True):
        assert isinstance(failure, RankFailure)
        assert "changed since forward" in failure.message and "unfrozen" in failure.message


# Refusals.


def attempt(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagreement() -> tuple[str, str, float]:
    """Rank 1 freezes another block than rank 0; afterwards both come to terms."""
    model = Tower().double()
    optimizer = wrap(model)
    train(model, optimizer, 2)
    rank = dist.get_rank()
    model.blocks[rank].requires_grad_(False)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    first = attempt(lambda: model(x))
    again = attempt(lambda: model(x))
    model.blocks[1].requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    train(model, optimizer, 2)
    return first, again, float(model(x).detach().sum())


def test_ranks_that_disagree_are_told_and_may_come_to_terms() -> None:
    found = run_ranks(2, disagreement)
    for first, again, _ in found:
        assert first == again
        assert "ranks 0 and 1 disagree whether 'blocks.0.lin.weight' is trained" in first
        assert "False and True" in first and "same value on every rank" in first
    assert found[0][2] == found[1][2]


def alone() -> str:
    model = Tower().double()
    optimizer = wrap(model, hang_timeout=2)
    train(model, optimizer, 3)
    if dist.get_rank() == 0:
        model.blocks[0].requires_grad_(False)
    return attempt(lambda: train(model, optimizer, 1))


def test_one_rank_alone_is_an_error_on_all() -> None:
    for said in run_ranks(2, alone):
        assert "The ranks are no longer in step" in said
        assert "rank 0 was changing which parameters are trained" in said


class Eager(nn.Module):
    """Unfreezes a part of itself while it runs."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "before it is there":
            self.first.weight.requires_grad_(True)
        x = self.first(x)
        return self.last(x)


def in_forward(which: str) -> tuple[str, str, bool]:
    model = Eager(which).double()
    optimizer = wrap(model)
    hook = None
    if which == "while it is there":
        hook = model.first.register_forward_pre_hook(lambda module, _: module.weight.requires_grad_(True))
    first = attempt(lambda: model(batch(0, 0, 0)))
    model.which = "no more"
    if hook is not None:
        hook.remove()
    second = attempt(lambda: train(model, optimizer, 1))
    return first, second, model.first.weight.requires_grad


@pytest.mark.parametrize("which", ["before it is there", "while it is there"])
def test_not_while_the_model_runs(which: str) -> None:
    for first, second, flag in run_ranks(2, in_forward, which):
        assert "requires_grad" in first and "between passes" in first
        assert second == "nothing" and not flag


def lent() -> tuple[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Unfrozen where the values are whole."""
    model = Tower().double()
    model.blocks[0].requires_grad_(False)
    share(model)
    plain = copy.deepcopy(model)
    optimizer, reference = wrap(model), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        if step == 1:
            with zeropp.zero.GatheredParameters(model.blocks[0]):
                model.blocks[0].requires_grad_(True)
            plain.blocks[0].requires_grad_(True)
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            each(batch(step, 0, 0)).square().mean().backward()
            stepper.step()
    return model.blocks[0].lin.weight.requires_grad, (zeropp.full_state(model), plain.state_dict())


def test_inside_gathered_parameters() -> None:
    for flag, result in run_ranks(2, lent):
        assert flag
        check([result])


def lent_and_frozen() -> tuple[dict[str, int], dict[str, int]]:
    """Bytes reduced by unit, before and after the blocks are frozen where their values are whole."""
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
    """Weights are right also where nobody has heard of it, but zeros are sent."""
    for before, after in run_ranks(2, lent_and_frozen):
        assert any(unit.startswith("blocks") for unit in before)
        assert after == {unit: sent for unit, sent in before.items() if not unit.startswith("blocks")} and after


WRONG_GROUPS: dict[str, tuple[Callable[[Tower], object], str]] = {
    "no dict": (lambda m: [m.norm.weight], "TypeError: param_group is"),
    "no params": (lambda m: {"lr": 1.0}, "TypeError: param_group is"),
    "a set": (lambda m: {"params": {m.norm.weight}}, "TypeError: params is a set"),
    "foreign": (lambda m: {"params": [nn.Parameter(torch.ones(1))]}, "ValueError: entry 0 of params, a Parameter"),
    "no parameter": (lambda m: {"params": ["norm.weight"]}, "ValueError: entry 0 of params, a str"),
    "there already": (lambda m: {"params": m.head.parameters()}, "ValueError: parameter 'head.weight' is in a group"),
    "twice": (lambda m: {"params": [m.norm.weight, m.norm.weight]}, "ValueError: parameter 'norm.weight'"),
}


def wrong_groups(ranks: list[int]) -> list[str]:
    model = Tower().double()
    model.norm.requires_grad_(False)
    inner = torch.optim.SGD(trained(model), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    train(model, optimizer, 1)
    found = []
    for make, _ in WRONG_GROUPS.values():
        wrong = dist.get_rank() in ranks
        group = make(model) if wrong else {"params": [model.norm.weight]}
        found.append(attempt(lambda given=group: optimizer.add_param_group(given)))
    optimizer.add_param_group({"params": [model.norm.weight]})
    model.norm.requires_grad_(True)
    train(model, optimizer, 1)
    return [*found, str(len(inner.param_groups))]


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "one"])
def test_wrong_groups_are_refused_on_every_rank(ranks: list[int]) -> None:
    for rank, found in enumerate(run_ranks(2, wrong_groups, ranks)):
        assert found.pop() == "2"
        for said, (_, expected) in zip(found, WRONG_GROUPS.values(), strict=True):
            assert said.startswith(expected if rank in ranks else "RuntimeError: ranks [1] called add_param_group()")


def scaled() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A group is added between backward and GradScaler's step; and its gradients are edited by hand, too."""
    model = Tower().double()
    share(model)
    plain = copy.deepcopy(model)
    made = []
    for each in (model, plain):
        inner = torch.optim.SGD(each.head.parameters(), lr=0.1)
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config()) if each is model else inner
        made.append((each, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)))
    for step in range(3):
        for each, optimizer, scaler in made:
            each.zero_grad()
            scaler.scale(each(batch(step, 0, 0)).square().mean()).backward()
            if step == 1:
                optimizer.add_param_group({"params": each.blocks.parameters()})
                for parameter in optimizer.param_groups[1]["params"]:
                    parameter.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
    return zeropp.full_state(model), plain.state_dict()


def test_a_group_that_comes_after_backward_has_its_gradients_at_once() -> None:
    check(run_ranks(2, scaled))


def added_early() -> list[bool]:
    """Whether slices of a group that is added where no gradient is have one: at the start, and between two steps."""
    model = Tower().double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), model, make_config())
    shown = []
    for added in (model.blocks[0], model.blocks[1]):
        optimizer.add_param_group({"params": added.parameters()})
        shown += [p.grad is not None for group in optimizer.param_groups for p in group["params"]]
        train(model, optimizer, 1)
        optimizer.zero_grad()
    return shown


def test_a_group_that_comes_before_backward_has_no_gradients() -> None:
    for shown in run_ranks(2, added_early):
        assert shown and not any(shown)


def in_inference_mode(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Validation comes first after a block is unfrozen, and a group is added in inference mode."""
    model = Tower().double()
    model.blocks[:2].requires_grad_(False)
    share(model)
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(trained(model), lr=0.1), model, make_config(stage=stage))
    reference = torch.optim.SGD(trained(plain), lr=0.1)
    for step in range(3):
        for each, stepper in ((model, optimizer), (plain, reference)):
            if step == 1:
                each.blocks[:2].requires_grad_(True)
                with torch.inference_mode():
                    each(batch(step, 1, 0))
                    stepper.add_param_group({"params": each.blocks[:2].parameters()})
            stepper.zero_grad()
            each(batch(step, 0, 0)).square().mean().backward()
            stepper.step()
    return zeropp.full_state(model), plain.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_inference_mode_around_changes(stage: int) -> None:
    check(run_ranks(2, in_inference_mode, stage))


class Phase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (self.turn * (1 + 1j)).real


def complex_unfrozen() -> tuple[str, str]:
    model = Phase()
    optimizer = wrap(model)
    model.turn.requires_grad_(True)
    first = attempt(lambda: model(torch.ones(1, WIDTH)))
    model.turn.requires_grad_(False)
    second = attempt(lambda: (model(torch.ones(1, WIDTH)).sum().backward(), optimizer.step()))
    return first, second


def test_complex_parameters_are_refused_by_name() -> None:
    for first, second in run_ranks(2, complex_unfrozen):
        assert "parameter 'turn' is complex" in first and "view_as_real" in first
        assert second == "nothing"


def there_and_back() -> str:
    """Rank 0 freezes a block and thinks again, and unfreezes another that is trained; that concerns nobody."""
    model = Tower().double()
    optimizer = wrap(model, hang_timeout=3)
    train(model, optimizer, 2)
    if dist.get_rank() == 0:
        model.blocks[0].requires_grad_(False)
        model.blocks[0].requires_grad_(True)
        model.blocks[1].requires_grad_(True)
    return attempt(lambda: train(model, optimizer, 2))


def test_a_change_that_is_taken_back_is_none() -> None:
    assert run_ranks(2, there_and_back) == ["nothing"] * 2


def wrong_ways() -> tuple[str, str, str]:
    """The wrapped optimizer's own method; a group taken away; a state with other groups."""
    model = Tower().double()
    model.blocks.requires_grad_(False)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), model, make_config())
    train(model, optimizer, 1)
    inner = attempt(lambda: optimizer.inner.add_param_group({"params": [model.norm.weight]}))
    before, state = zeropp.full_state(model), optimizer.state_dict()
    optimizer.add_param_group({"params": model.norm.parameters()})
    loaded = attempt(lambda: optimizer.load_state_dict(state))
    assert all(torch.equal(before[name], value) for name, value in zeropp.full_state(model).items())
    del optimizer.param_groups[1]
    model.blocks.requires_grad_(True)
    return inner, loaded, attempt(lambda: train(model, optimizer, 1))


def test_wrong_ways_are_named() -> None:
    for inner, loaded, taken in run_ranks(2, wrong_ways):
        assert "call add_param_group() on that" in inner
        assert "parameter groups of [" in loaded and "before loading" in loaded
        assert "had 2 parameter groups and has 1 now" in taken


def wholly_frozen(unfrozen_before_loading: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """A model that starts wholly frozen, is unfrozen and trained; its state goes on elsewhere."""
    model = Tower().double().requires_grad_(False)
    share(model)
    optimizer = wrap(model)
    model.requires_grad_(True)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())  # torch would let both optimizers share their moments
    other = Tower().double().requires_grad_(unfrozen_before_loading == "before wrapping")
    wrapped = wrap(other)
    other.requires_grad_(True)
    said = attempt(lambda: wrapped.load_state_dict(state))
    for each, stepper in ((model, optimizer), (other, wrapped)):
        train(each, stepper, 1)
    return said, zeropp.full_state(model), zeropp.full_state(other)


@pytest.mark.parametrize("when", ["before wrapping", "before loading"])
def test_a_state_goes_on_where_the_same_was_unfrozen(when: str) -> None:
    for said, weights, found in run_ranks(2, wholly_frozen, when):
        assert said == "nothing"
        assert all(torch.equal(weights[name], found[name]) for name in weights)


def history_saved() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Moments of a block that is frozen when the model is wrapped survive being saved and loaded before it thaws."""
    states = []
    for saved in (False, True):
        model, optimizer = with_history()
        model.blocks[1].requires_grad_(False)
        wrapped = zeropp.ZeroOptimizer(optimizer, model, make_config())
        if saved:
            state, fresh = copy.deepcopy(wrapped.state_dict()), Tower().double()
            fresh.load_state_dict(zeropp.full_state(model))
            fresh.blocks[1].requires_grad_(False)
            inner = torch.optim.AdamW(fresh.parameters(), lr=0.01)
            model, wrapped = fresh, zeropp.ZeroOptimizer(inner, fresh, make_config())
            wrapped.load_state_dict(state)
        model.blocks[1].requires_grad_(True)
        train(model, wrapped, 2)
        states.append(zeropp.full_state(model))
    return states[0], states[1]


def test_waiting_states_are_saved() -> None:
    check(run_ranks(2, history_saved))


def saved(late: bool) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """A state saved after a block was unfrozen, in a model wrapped with the block trainable, or frozen."""
    model = Tower().double()
    share(model)
    model.blocks[3].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, 1)
    model.blocks[3].requires_grad_(True)
    train(model, optimizer, 2)
    state, weights = optimizer.state_dict(), zeropp.full_state(model)
    other = Tower().double()
    other.blocks[3].requires_grad_(not late)
    wrapped = wrap(other)
    said = attempt(lambda: wrapped.load_state_dict(state))
    return said, weights, zeropp.full_state(other)


@pytest.mark.parametrize("late", [False, True])
def test_saved_states_know_what_was_unfrozen(late: bool) -> None:
    for said, weights, found in run_ranks(2, saved, late):
        if late:
            assert "another partition" in said and "unfrozen" in said
        else:
            assert said == "nothing"
            assert all(torch.equal(weights[name], found[name]) for name in weights)


def rolled_back() -> tuple[str, dict[str, Tensor], dict[str, Tensor], bool]:
    """A state from before a block was unfrozen, loaded before the next forward unfreezes it; whether it is trained."""
    model = Tower().double()
    share(model)
    model.blocks[3].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, 1)
    state, weights = copy.deepcopy(optimizer.state_dict()), zeropp.full_state(model)
    train(model, optimizer, 1)
    model.blocks[3].requires_grad_(True)
    said = attempt(lambda: optimizer.load_state_dict(state))
    found = zeropp.full_state(model)
    train(model, optimizer, 1)
    name = "blocks.3.lin.weight"
    return said, weights, found, not torch.equal(zeropp.full_state(model)[name], weights[name])


def test_a_state_that_fits_is_loaded_before_what_was_asked_for_is_unfrozen() -> None:
    for said, weights, found, trained in run_ranks(2, rolled_back):
        assert said == "nothing" and trained
        assert all(torch.equal(weights[name], found[name]) for name in weights)
