"""All ranks issue the same collectives in the same order, whatever each of them computes; or all of them stop."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Block, Pair, Route, Routed, chain, gathers, logged, make_config, shards
from tests.owned import live_numel

ALL = chain(4)


# Ranks that differ, within what is allowed.


def follow(steps: list[list[Route]], settings: dict[str, object], zero_grad: bool = True, device: str = "cpu") -> int:
    """Train along per-step, per-rank routes beside a plain model; rounds of agreement in the last step."""
    pair = Pair(Routed(), make_config(**settings), device=device)
    rounds = 0
    for routes in steps:
        rounds = -agreements(pair.optimizer)
        if zero_grad:
            pair.zero_grad()
        pair.backward(*routes)
        pair.step()
        rounds += agreements(pair.optimizer)
        pair.check()
    return rounds


def agreements(optimizer: zeropp.ZeroOptimizer) -> int:
    return sum(row.calls for row in optimizer.engine.comm.ledger.rows if row.unit == "<agreement>")


BRANCHES = [((0, 1), (2, 3)), ((1, 0), (3, 2))]


@pytest.mark.parametrize(
    "settings",
    [{}, {"reuse": 0, "prefetch": 0}, {"live": 0}, {"overlap_comm": False}],
    ids=["default", "bare", "live0", "inline"],
)
def test_gradients_finished_in_opposite_orders(settings: dict[str, object]) -> None:
    """Two equal units swapped between ranks would corrupt both without any error."""
    assert run_ranks(2, follow, [BRANCHES] * 3, settings) == [0, 0]


def test_opposite_orders_after_a_common_one() -> None:
    run_ranks(2, follow, [[BRANCHES[0]], [BRANCHES[0]], BRANCHES, BRANCHES[::-1]], {})


def test_opposite_orders_on_four_ranks() -> None:
    routes = [((0, 1), (2, 3)), ((1, 0), (2, 3)), ((0, 1), (3, 2)), ((1, 0), (3, 2))]
    run_ranks(4, follow, [routes] * 2 + [routes[::-1]], {}, local_world_size=2)


PARTS = [{}, {"reuse": 0, "prefetch": 0}, {"live": 0}, {"persist": 1000}]


@pytest.mark.parametrize("settings", PARTS, ids=["default", "bare", "live0", "persistent"])
def test_parts_of_a_known_sequence(settings: dict[str, object]) -> None:
    """A rank joins gathers and reductions of what it skips; a round at the end of each phase asks who wants more."""
    steps = [
        [ALL],
        [ALL, chain(0, 3)],
        [chain(0, 2), chain(1, 3)],
        [((3,),), ALL],
        [((0,),), ALL],
        [chain(1, 2), chain(1, 2)],
    ]
    assert run_ranks(2, follow, steps, settings) == [0 if "persist" in settings else 2] * 2


def test_used_on_one_rank_only_counts_zero_elsewhere() -> None:
    routes = [ALL, chain(0, 3), chain(0, 3), chain(0, 2, 3)]
    run_ranks(4, follow, [routes] * 3, {})


def test_unused_module_keeps_its_weights_and_momentum() -> None:
    """Not updated by the gradient of the step before, nor decayed: as with ``grad is None`` in plain torch."""
    run_ranks(2, follow, [[ALL], [ALL], [chain(0, 1)], [chain(2, 3)], [ALL]], {})


def test_gradients_stay_until_zero_grad() -> None:
    run_ranks(2, follow, [[ALL], [chain(0, 1)], [ALL, chain(0, 3)]], {}, zero_grad=False)


KNOWN = {"first": chain(0, 1), "last": chain(2, 3)}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("persist", [0, 1000], ids=["partitioned", "persistent"])
def test_first_use_after_several_steps(persist: int, known: str) -> None:
    """Where the last blocks are known, backward reaches the new ones after their unit has been sent."""
    run_ranks(2, follow, [[KNOWN[known]]] * 3 + [[ALL]] * 2 + [[KNOWN[known]]], {"persist": persist})


@pytest.mark.parametrize("known", KNOWN)
def test_late_gradient_on_one_rank(known: str) -> None:
    """Whole weights need no gather, so one rank may use them first; its gradient is found at the boundary."""
    steps = [[KNOWN[known]]] * 3 + [[KNOWN[known], ALL]] * 2 + [[ALL]]
    run_ranks(2, follow, steps, {"persist": 1000})


class Detached(Routed):
    """Blocks from ``cut`` on run in forward, but no gradient reaches them."""

    def forward(self, x: Tensor, cut: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = x + y.detach() if index >= cut else y
        return x


def detached(settings: dict[str, object]) -> None:
    pair = Pair(Detached(), make_config(**settings))
    for cut in (2, 2, 4, 2, 4):
        pair.train(cut)
        pair.check()


@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}], ids=["default", "bare"])
def test_gradient_that_comes_late(settings: dict[str, object]) -> None:
    run_ranks(2, detached, settings)


# Ranks that use different parts of what is known.


def test_ranks_take_different_branches() -> None:
    """Both are known, from steps in which all ranks took the same; the others learn of a wish at the phase's end."""
    branches = [chain(0, 1), chain(2, 3)]
    common = [[branches[0]], [branches[1]], [branches[0]], [branches[1]]]
    run_ranks(2, follow, [*common, branches, branches[::-1], [ALL], branches, [branches[1]]], {})


def random_routes(seed: int, world: int) -> list[list[Route]]:
    """A common pass through all blocks, then steps in which every rank takes blocks and orders of its own."""
    rng = random.Random(seed)

    def route() -> Route:
        blocks = rng.sample(range(4), rng.randint(1, 4))
        cut = rng.randint(0, len(blocks))
        return tuple(stage for stage in (tuple(blocks[:cut]), *((block,) for block in blocks[cut:])) if stage)

    steps: list[list[Route]] = [[ALL]]
    for _ in range(6):
        same = route()
        steps.append([same if rng.random() < 0.3 else route() for _ in range(world)])
    return steps


def random_settings(seed: int) -> dict[str, object]:
    rng = random.Random(-seed)
    return {
        "prefetch": rng.choice([0, 512, 10**9]),
        "reuse": rng.choice([0, 1024, 10**9]),
        "live": rng.choice([0, 600, 10**9]),
        "overlap_comm": rng.random() < 0.7,
        "hang_timeout": 10,
    }


@pytest.mark.parametrize("seed", range(8))
def test_random_parts_on_every_rank(seed: int) -> None:
    run_ranks(2, follow, random_routes(seed, 2), random_settings(seed))


@pytest.mark.parametrize("seed", range(8, 10))
def test_random_parts_on_four_ranks(seed: int) -> None:
    run_ranks(4, follow, random_routes(seed, 4), random_settings(seed), local_world_size=2)


@pytest.mark.campaign
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", range(10, 60))
def test_random_parts(seed: int, world: int) -> None:
    run_ranks(world, follow, random_routes(seed, world), random_settings(seed))


# Phases that alternate.


def gathered_by(pair: Pair, routes: list[Route], training: bool) -> Counter[str]:
    before = Counter(gathers(pair.optimizer))
    if training:
        pair.train(*routes)
    else:
        pair.model.eval()
        with torch.no_grad():
            pair.model(pair.batch(pair.rank), routes[pair.rank % len(routes)])
        pair.model.train()
    return Counter(gathers(pair.optimizer)) - before


def alone(route: Route, training: bool, settings: dict[str, object]) -> Counter[str]:
    """Gathers of the third pass of one kind, when nothing else runs."""
    pair = Pair(Routed(6), make_config(**settings))
    found = Counter[str]()
    for _ in range(3):
        found = gathered_by(pair, [route], training)
    return found


def alternate(
    passes: list[tuple[Route, bool]], settings: dict[str, object], rounds: int
) -> tuple[list[Counter[str]], list[Counter[str]], int]:
    """Gathers of each pass in the last round, of each pass alone, and agreements in the last round."""
    alones = [alone(route, training, settings) for route, training in passes]
    pair = Pair(Routed(6), make_config(**settings))
    last: list[Counter[str]] = []
    talked = 0
    for _ in range(rounds):
        talked = -agreements(pair.optimizer)
        last = [gathered_by(pair, [route], training) for route, training in passes]
        talked += agreements(pair.optimizer)
    pair.check()
    return last, alones, talked


LIMITS = [{}, {"reuse": 0, "prefetch": 0}, {"reuse": 0}]
LIMIT_NAMES = ["default", "bare", "prefetch"]


@pytest.mark.parametrize("settings", LIMITS, ids=LIMIT_NAMES)
def test_train_and_eval_alternate(settings: dict[str, object]) -> None:
    """Both orders are known: nothing is learned again, and nothing is gathered in vain."""
    for last, alones, talked in run_ranks(2, alternate, [(chain(6), True), (chain(6), False)], settings, 3):
        assert last == alones
        assert talked == 0


@pytest.mark.parametrize("settings", LIMITS, ids=LIMIT_NAMES)
def test_two_branches_alternate(settings: dict[str, object]) -> None:
    """A flag that is the same on all ranks chooses between two halves of the model."""
    passes = [(chain(0, 1, 2), True), (chain(3, 4, 5), True)]
    for last, alones, _ in run_ranks(2, alternate, passes, settings, 4):
        for found, needed in zip(last, alones, strict=True):
            assert found <= needed, f"gathered {found}, alone {needed}"


@pytest.mark.parametrize("settings", LIMITS, ids=LIMIT_NAMES)
def test_two_branches_with_a_common_stem_alternate(settings: dict[str, object]) -> None:
    """Behind the stem the branch is a guess: a wrong one may fetch the other branch's two units, once."""
    passes = [(chain(0, 1, 2, 5), True), (chain(0, 3, 4, 5), True)]
    wrong = [Counter({"blocks.3": 1, "blocks.4": 1}), Counter({"blocks.1": 1, "blocks.2": 1})]
    for last, alones, _ in run_ranks(2, alternate, passes, settings, 4):
        for found, needed, guessed in zip(last, alones, wrong, strict=True):
            assert found <= needed + guessed, f"gathered {found}, alone {needed}"


def relearned(log: bool) -> list[list[str]]:
    """Messages of each of five steps along two alternating branches."""
    with logged() as messages:
        pair = Pair(Routed(), make_config(log_trace_cache_warnings=log))
        found = []
        for route in (chain(0, 1), chain(2, 3), chain(0, 1), chain(2, 3), chain(0, 1)):
            pair.train(route)
            pair.check()
            found.append(messages.copy())
            messages.clear()
        return found


def talk_in_evaluation() -> tuple[int, int]:
    """Agreements in a forward that is alike on all ranks: before ranks part in a step, and after."""
    pair = Pair(Routed(3), make_config())

    def evaluate() -> int:
        before = agreements(pair.optimizer)
        with torch.no_grad():
            pair.model(pair.batch(pair.rank))
        return agreements(pair.optimizer) - before

    evaluate()
    quiet = evaluate()
    pair.train(chain(3))
    pair.train(chain(3), chain(0, 2))  # rank 1 passes over a block
    return quiet, evaluate()


def test_only_phases_since_the_last_boundary_vary_where_ranks_part() -> None:
    assert run_ranks(2, talk_in_evaluation) == [(0, 0)] * 2


def test_relearning_happens_once_and_is_logged_on_demand() -> None:
    for steps in run_ranks(2, relearned, True):
        assert [bool(step) for step in steps] == [False, True, False, False, False]
        assert any("blocks.2" in message and "learning it anew" in message for message in steps[1])
    for steps in run_ranks(2, relearned, False):
        assert steps == [[]] * 5


# A rank that leaves.


class Leaver:
    """What the last rank does in place of a step; everyone else trains."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.optimizer, self.model = pair.optimizer, pair.model

    def forward(self, route: Route = ALL) -> Tensor:
        loss: Tensor = self.model(self.pair.batch(0), route).square().mean()
        return loss

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def no_forward(self) -> None:
        """Goes straight to the step, as after a batch that was thrown away."""
        self.optimizer.zero_grad()
        self.optimizer.step()

    def second_step(self) -> None:
        """Steps again, with the gradients of the step before."""
        self.optimizer.step()

    def silent(self) -> None:
        """Does something else for longer than the others wait, and comes back."""
        time.sleep(5)
        self.train()

    def two_forwards(self) -> None:
        """One pass too many."""
        with torch.no_grad():
            self.forward()
        self.train()

    def no_backward(self) -> None:
        self.optimizer.zero_grad()
        self.forward()
        self.optimizer.step()

    def no_sync(self) -> None:
        with self.optimizer.no_sync():
            self.forward().backward()
        self.optimizer.step()

    def skipped_step(self) -> None:
        """Does not step; its weights are old in the step after, which must not count."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.train()

    def saves(self) -> None:
        """``state_dict`` gathers every unit, on one rank only."""
        self.model.state_dict()
        self.train()

    def saves_all(self) -> None:
        zeropp.full_state(self.model)
        self.train()

    def loads(self) -> None:
        """Loading refreshes what is kept whole, on one rank only."""
        self.model.load_state_dict(Routed(5).state_dict())
        self.train()

    def resumes(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.train()


def leave(how: str, settings: dict[str, object]) -> tuple[str, float, bool, bool]:
    """Three common steps, then the last rank leaves; error, seconds, whether weights changed, whether one was late."""
    pair = Pair(Routed(5), make_config(hang_timeout=3, **settings))
    for _ in range(3):
        pair.train(ALL)
    before = shards(pair.optimizer)
    dist.barrier()
    start = time.monotonic()
    leaver = Leaver(pair)
    stepped = False
    try:
        if pair.rank == pair.world - 1:
            getattr(leaver, how)()
        else:
            leaver.train()
            stepped = True
            before = shards(pair.optimizer)
            leaver.train()
    except RuntimeError as error:
        message = str(error)
    else:
        message = ""
    seconds = time.monotonic() - start
    after = shards(pair.optimizer)
    return message, seconds, not all(map(torch.equal, before, after)), stepped


LEAVES = [
    "no_forward", "second_step", "silent", "two_forwards", "no_backward", "no_sync", "skipped_step",
    "saves", "saves_all", "loads", "resumes",
]  # fmt: skip
GRACE = 5  # seconds beside hang_timeout: for the ranks' accounts of the failure, and for slow machines


def check_left(results: list[tuple[str, float, bool, bool]], how: str) -> None:
    for rank, (message, seconds, changed, stepped) in enumerate(results):
        assert "no longer in step" in message, f"rank {rank} said {message!r}"
        assert f"rank {rank} was" in message
        assert "hang_timeout" not in message or ("hang_timeout, 3 s, was reached" in message and seconds >= 3)
        assert not changed, f"rank {rank} changed weights, then said {message!r}"
        assert seconds < 3 + GRACE + (5 if how == "silent" else 0), f"rank {rank} took {seconds:.1f} s"
        assert not stepped or how == "skipped_step", f"rank {rank} stepped alone"
    if how == "silent":  # somebody has waited for it; the others may have seen that one go
        assert any("hang_timeout, 3 s, was reached" in message for message, *_ in results)


@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_that_leaves_stops_every_rank(how: str) -> None:
    check_left(run_ranks(2, leave, how, {}), how)


@pytest.mark.campaign
@pytest.mark.parametrize("settings", [{"persist": 1000}, {"reuse": 0, "prefetch": 0}], ids=["persistent", "bare"])
@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_that_leaves_four(how: str, settings: dict[str, object]) -> None:
    if how == "two_forwards" and "persist" in settings:
        pytest.skip("weights that are whole everywhere need no company: see test_beside.py, evaluation alone")
    check_left(run_ranks(4, leave, how, settings, local_world_size=2), how)


def hung_gather(settings: dict[str, object]) -> tuple[str, float]:
    """Rank 1 never calls the model; the others say which unit they wait for."""
    pair = Pair(Routed(), make_config(hang_timeout=1, **settings))
    for _ in range(2):
        pair.train(ALL)
    start = time.monotonic()
    if pair.rank == 1:
        time.sleep(6)
        return "", 0.0
    with pytest.raises(RuntimeError) as caught:
        pair.train(ALL)
    return str(caught.value), time.monotonic() - start


def test_the_unit_that_is_waited_for_is_named() -> None:
    message, seconds = run_ranks(2, hung_gather, {"reuse": 0, "prefetch": 0})[0]
    assert "rank 0 was waiting for the gather of unit 'blocks.0'" in message
    assert "rank 1 said nothing" in message and message.startswith("rank 1 does not wait for others")
    assert seconds < 1 + GRACE


# Unused parameters are an error on demand.


def strict() -> tuple[str, bool]:
    pair = Pair(Routed(), make_config(ignore_unused_parameters=False))
    pair.train(ALL, chain(0, 1))
    pair.check()
    before = shards(pair.optimizer)
    pair.zero_grad()
    pair.backward(chain(0, 1), chain(1, 2))
    with pytest.raises(RuntimeError) as caught:
        pair.optimizer.step()
    unchanged = all(map(torch.equal, before, shards(pair.optimizer)))
    pair.train(ALL)
    pair.plain_optimizer.zero_grad()
    pair.check()
    return str(caught.value), unchanged


def test_unused_parameters_stop_training_by_name() -> None:
    for message, unchanged in run_ranks(2, strict):
        assert "blocks.3.lin.weight" in message and "blocks.3.lin.bias" in message
        assert "blocks.2" not in message  # one rank used it
        assert "ignore_unused_parameters" in message
        assert unchanged


# Errors of the user's own code, on every rank.


class Refusing(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("told to fail in backward")


class Fragile(Routed):
    """Fails on demand: before a block, inside it, after it, in backward, or inside with the model going on."""

    fail: tuple[str, int] | None = None

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            how, where = self.fail or ("", -1)
            if index == where and how == "before":
                raise ArithmeticError("told to fail before a block")
            if index == where and how == "caught":
                try:
                    block("no tensor")
                except TypeError:
                    continue
            x = block("no tensor" if index == where and how == "inside" else x)
            if index == where and how == "backward":
                x = Refusing.apply(x)
        return x


def fail_and_go_on(how: str, where: int, at: int, settings: dict[str, object]) -> None:
    """A failure at one of four steps; the weights then follow a plain model that never saw that step."""
    pair = Pair(Fragile(), make_config(**settings))
    for step in range(4):
        if step == at:
            pair.model.fail = how, where
            pair.optimizer.zero_grad()
            with pytest.raises((ArithmeticError, TypeError)):
                pair.model(pair.batch(pair.rank)).square().mean().backward()
            pair.model.fail = None
            pair.optimizer.zero_grad()
            assert live_numel(pair.engine.units) == 0, "units are still gathered after the error"
        pair.train(None)
        pair.check()
    units = pair.engine.units
    assert live_numel(units) == sum(u.numel for u in units if u.index in pair.engine.schedule.holdings.planned)


FAILURES = [("before", 2), ("inside", 0), ("inside", 3), ("backward", 3), ("backward", 1)]


@pytest.mark.parametrize("at", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize(("how", "where"), FAILURES)
def test_an_error_on_every_rank_and_the_next_step(how: str, where: int, at: int) -> None:
    run_ranks(2, fail_and_go_on, how, where, at, {})


@pytest.mark.campaign
@pytest.mark.parametrize("settings", [{"reuse": 0, "prefetch": 0}, {"persist": 1000}, {"overlap_comm": False}])
@pytest.mark.parametrize(("how", "where"), FAILURES)
def test_an_error_on_every_rank_and_the_next_step_settings(how: str, where: int, settings: dict[str, object]) -> None:
    run_ranks(4, fail_and_go_on, how, where, 2, settings, local_world_size=2)


def caught_inside() -> None:
    """The model itself survives a block that fails."""
    pair = Pair(Fragile(), make_config())
    for fail in (None, ("caught", 1), ("caught", 1), None):
        pair.model.fail = pair.plain.fail = fail
        pair.train(None)
        pair.check()


def test_an_error_that_the_model_catches() -> None:
    run_ranks(2, caught_inside)


def kept_gradients() -> None:
    """A failure in the second micro-batch; the first one's gradients were reduced, and zero_grad drops them."""
    pair = Pair(Fragile(), make_config(gradient_accumulation_steps=2, managed_gradient_accumulation=False))
    pair.train(None)
    pair.check()
    pair.zero_grad()
    pair.model(pair.batch(pair.rank)).square().mean().backward()
    pair.model.fail = "backward", 1
    with pytest.raises(ArithmeticError):
        pair.model(pair.batch(pair.rank)).square().mean().backward()
    pair.model.fail = None
    pair.train(None)
    pair.check()


def test_an_error_in_a_later_micro_batch() -> None:
    run_ranks(2, kept_gradients)


class Twice(nn.Module):
    """A block called twice around another, and one called inside a loop whose length is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, loops: int) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(loops):
            x = self.blocks[1](x)
        return self.blocks[0](x)


def loops() -> None:
    pair = Pair(Twice(), make_config(reuse=0, prefetch=0))
    for routes in ((1,), (1,), (3,), (1, 3), (2, 1)):
        pair.train(*routes)
        pair.check()


def test_a_block_called_a_varying_number_of_times() -> None:
    run_ranks(2, loops)


class Deep(nn.Module):
    """Uses its own weight, calls itself, and uses it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return self(y, depth - 1) + y @ self.weight if depth else y


class Tower(nn.Module):
    """Two that call themselves, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Deep() for _ in range(2))

    def forward(self, x: Tensor, depths: tuple[int, int]) -> Tensor:
        return self.blocks[1](self.blocks[0](x, depths[0]), depths[1])


def depths() -> list[dict[str, int]]:
    """Gathers of a first evaluation, and of one more kind; training is checked beside them."""
    pair = Pair(Tower(), make_config(reuse=0, prefetch=0))
    found = []
    for each in ((3, 1), (2, 2)):
        before = gathers(pair.optimizer)
        pair.model.train(not found)
        with torch.no_grad():
            pair.model(pair.batch(0), each)
        after = gathers(pair.optimizer)
        found.append({unit: count - before.get(unit, 0) for unit, count in after.items()})
    pair.model.train()
    for each in ((2, 1), (0, 3)):
        pair.train(each)
        pair.check()
    return found


def test_a_module_that_calls_itself_is_gathered_once_while_that_is_learned() -> None:
    for found in run_ranks(2, depths):
        assert found == [{"blocks.0": 1, "blocks.1": 1}] * 2


class Uneven(nn.Module):
    """Blocks of different sizes, so that messages of ranks out of step do not fit each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (8, 32, 8, 48))
        self.spoil = False

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for block in self.blocks:
            x = block(torch.ones(1, block.lin.in_features) * total)
            total = total + x.sum()
            if self.spoil and block is self.blocks[1]:
                total.register_hook(_raise)
        return total


def _raise(gradient: Tensor) -> None:
    raise ValueError("a bad batch")


def skip_bad_batches(settings: dict[str, object], ranks: list[int]) -> str:
    """These ranks fail in a backward, skip that batch and go on."""
    model = Uneven()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, make_config(**settings))
    try:
        for step in range(6):
            model.spoil = step == 3 and dist.get_rank() in ranks
            optimizer.zero_grad()
            try:
                model(torch.ones(1)).backward()
            except ValueError:
                continue
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("stage", [pytest.param(n, marks=() if n == 1 else pytest.mark.campaign) for n in range(4)])
def test_a_batch_that_one_rank_skips_is_an_error_and_not_the_end_of_the_process(stage: int) -> None:
    for said in run_ranks(2, skip_bad_batches, {"stage": stage, "hang_timeout": 2}, [1]):
        assert "no longer in step" in said
    assert run_ranks(2, skip_bad_batches, {"stage": stage}, [0, 1]) == ["done", "done"]


def try_again(settings: dict[str, object], fail: bool) -> dict[str, Tensor]:
    """Weights after steps; one rank's forward may ``fail``, it takes another batch, and nobody else hears of it."""
    torch.manual_seed(1)
    model = Uneven()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, make_config(**settings))
    for step in range(5):
        optimizer.zero_grad()
        if fail and step > 1 and dist.get_rank() == 1:
            with pytest.raises(AttributeError):
                model(None)
        model(torch.ones(1)).backward()
        optimizer.step()
    return zeropp.full_state(model)


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}, {"persist": 10_000}], ids=str)
def test_a_forward_without_gathers_may_fail_on_one_rank_and_be_tried_again(settings: dict[str, object]) -> None:
    """The backward after it is the same kind of backward as elsewhere."""
    settings = {**settings, "hang_timeout": 5}
    expected, _ = run_ranks(2, try_again, settings, False)
    for found in run_ranks(2, try_again, settings, True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def skip_edits(ranks: list[int]) -> str:
    """These ranks skip a batch, after whose error what is released complains of an edit."""
    model = Uneven()
    config = make_config(hang_timeout=2, prefetch=0)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, config)
    said = []

    def edit_and_fail(block: nn.Module, *_: object) -> None:
        if bad:
            with torch.no_grad():
                block.lin.weight.mul_(2.0)  # it is kept for backward
            raise ValueError("a bad batch")

    model.blocks[1].register_forward_hook(edit_and_fail)
    try:
        for step in range(6):
            bad = step == 3 and dist.get_rank() in ranks
            optimizer.zero_grad()
            try:
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    model(torch.ones(1)).backward()
            except ValueError:
                said += [str(each.message) for each in found]
                continue
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return " ".join(said)


def test_an_error_upon_an_error_on_one_rank_is_not_the_end_of_the_process() -> None:
    """The second comes while everything is let go of for the first, which must not be forgotten for it."""
    for said in run_ranks(2, skip_edits, [1]):
        assert "no longer in step" in said
    for said in run_ranks(2, skip_edits, [0, 1]):
        assert "edited in place" in said and "no longer in step" not in said
