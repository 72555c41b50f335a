"""Training, evaluation and branches that alternate: nothing is learned again, and nothing is sent in vain."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.branch_routes import ALL, agreements
from tests.support.branching_models import Route, Routed, chain, gathers, logged, make_config
from tests.support.rank_pool import run_ranks, some
from tests.support.sharded_and_plain import Pair


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


LIMITS: dict[str, dict[str, object]] = {"default": {}, "prefetch": {"reuse": 0}, "bare": {"reuse": 0, "prefetch": 0}}


@pytest.mark.parametrize("limits", some(LIMITS, 3))
def test_train_and_eval_alternate(limits: str) -> None:
    """Both orders are known: nothing is learned again, and nothing is gathered in vain."""
    for last, alones, talked in run_ranks(2, alternate, [(chain(6), True), (chain(6), False)], LIMITS[limits], 3):
        assert last == alones
        assert talked == 0


@pytest.mark.parametrize("limits", some(["prefetch", "bare", "default"], 3))
def test_two_branches_alternate(limits: str) -> None:
    """A flag that is the same on all ranks chooses between two halves of the model."""
    passes = [(chain(0, 1, 2), True), (chain(3, 4, 5), True)]
    for last, alones, _ in run_ranks(2, alternate, passes, LIMITS[limits], 4):
        for found, needed in zip(last, alones, strict=True):
            assert found <= needed, f"gathered {found}, alone {needed}"


@pytest.mark.parametrize("limits", some(LIMITS, 3))
def test_two_branches_with_a_common_stem_alternate(limits: str) -> None:
    """Behind the stem the branch is a guess: a wrong one may fetch the other branch's two units, once."""
    passes = [(chain(0, 1, 2, 5), True), (chain(0, 3, 4, 5), True)]
    wrong = [Counter({"blocks.3": 1, "blocks.4": 1}), Counter({"blocks.1": 1, "blocks.2": 1})]
    for last, alones, _ in run_ranks(2, alternate, passes, LIMITS[limits], 4):
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
        assert any("blocks.2" in message and "learn the order anew" in message for message in steps[1])
    for steps in run_ranks(2, relearned, False):
        assert steps == [[]] * 5


def reductions(pair: Pair) -> int:
    return sum(row.calls for row in pair.optimizer.engine.comm.ledger.rows if row.kind == "reduce")


def evaluated_in_a_window() -> list[int]:
    """Reductions during evaluations, the first of them while no_sync keeps gradients back."""
    pair = Pair(Routed(), make_config())
    pair.train(ALL)
    pair.zero_grad()
    with pair.optimizer.no_sync():
        pair.backward(ALL)
    found = []
    for _ in range(3):
        before = reductions(pair)
        with torch.no_grad():
            pair.model.eval()(pair.batch(pair.rank), ALL)
        pair.model.train()
        found.append(reductions(pair) - before)
    pair.backward(ALL)
    pair.step()
    pair.check()
    return found


def test_a_forward_sends_no_gradients() -> None:
    assert run_ranks(2, evaluated_in_a_window) == [[0, 0, 0]] * 2


def other_kinds(first: str) -> None:
    """A kind of phase whose first time uses less than others of its sort; then one rank alone uses more."""
    pair = Pair(Routed(), make_config())
    pair.train(ALL)
    for routes in ([chain(0, 1)], [chain(0, 1), ALL]):
        pair.zero_grad()
        if first == "no_sync":
            with pair.optimizer.no_sync():
                pair.backward(*routes)
            pair.backward(ALL)
            pair.step()
        else:
            with torch.no_grad():
                pair.model.eval()(pair.batch(pair.rank), routes[pair.rank % len(routes)])
            pair.model.train()
        pair.check()


@pytest.mark.parametrize("first", ["no_sync", "eval"])
def test_what_one_kind_of_phase_knows_another_may_use(first: str) -> None:
    run_ranks(2, other_kinds, first)
