"""When training, evaluation and branches alternate, no known order is learned again and no gather is superfluous."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.branch_routes import ALL, agreements
from tests.support.branching_models import Route, Routed, chain, gathers, logged, make_config
from tests.support.rank_pool import run_ranks, some
from tests.support.sharded_and_plain import Pair


def gathered_by(pair: Pair, routes: list[Route], training: bool) -> Counter[str]:
    """Run one training step or one evaluation, and return its gathers by unit.

    Args:
        pair: sharded model and plain model.
        routes: one route for all ranks, or one route per rank.
        training: True for a training step of both models; False for a forward of the sharded model.
    """
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
    """Return the gathers of the third pass of one kind if no other pass runs in between."""
    pair = Pair(Routed(6), make_config(**settings))
    found = Counter[str]()
    for _ in range(3):
        found = gathered_by(pair, [route], training)
    return found


def alternate(
    passes: list[tuple[Route, bool]], settings: dict[str, object], rounds: int
) -> tuple[list[Counter[str]], list[Counter[str]], int]:
    """Run several passes in turn.

    Args:
        passes: route of each pass, and True if the pass is a training step.
        settings: keys for ``make_config``.
        rounds: number of times that all passes run.

    Returns:
        Gathers of each pass in the last round, gathers of each pass without the others, and number of exchanges in the
        last round.
    """
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
    """The orders of both kinds of forward are known after the first round, so the last round has no exchange."""
    for last, alones, talked in run_ranks(2, alternate, [(chain(6), True), (chain(6), False)], LIMITS[limits], 3):
        assert last == alones
        assert talked == 0


@pytest.mark.parametrize("limits", some(["prefetch", "bare", "default"], 3))
def test_two_branches_alternate(limits: str) -> None:
    """A flag that is equal on all ranks chooses one half of the model. The alternation is predicted."""
    passes = [(chain(0, 1, 2), True), (chain(3, 4, 5), True)]
    for last, alones, _ in run_ranks(2, alternate, passes, LIMITS[limits], 4):
        for found, needed in zip(last, alones, strict=True):
            assert found <= needed, f"gathered {found}, alone {needed}"


@pytest.mark.parametrize("limits", some(LIMITS, 3))
def test_two_branches_with_a_common_stem_alternate(limits: str) -> None:
    """The branch behind the stem is predicted. A wrong prediction may gather the two units of the other branch once."""
    passes = [(chain(0, 1, 2, 5), True), (chain(0, 3, 4, 5), True)]
    wrong = [Counter({"blocks.3": 1, "blocks.4": 1}), Counter({"blocks.1": 1, "blocks.2": 1})]
    for last, alones, _ in run_ranks(2, alternate, passes, LIMITS[limits], 4):
        for found, needed, guessed in zip(last, alones, wrong, strict=True):
            assert found <= needed + guessed, f"gathered {found}, alone {needed}"


def relearned(log: bool) -> list[list[str]]:
    """Return the logged messages of each of five steps along two alternating branches.

    Args:
        log: True to log when a known order is given up.
    """
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
    """Return the exchanges of an evaluation that is equal on all ranks.

    The first number is from before a training step in which ranks differ, the second from after it.
    """
    pair = Pair(Routed(3), make_config())

    def evaluate() -> int:
        before = agreements(pair.optimizer)
        with torch.no_grad():
            pair.model(pair.batch(pair.rank))
        return agreements(pair.optimizer) - before

    evaluate()
    quiet = evaluate()
    pair.train(chain(3))
    pair.train(chain(3), chain(0, 2))  # rank 1 skips block 1
    return quiet, evaluate()


def test_only_phases_since_the_last_boundary_vary_where_ranks_part() -> None:
    """If ranks differ, only the kinds of phases since the last step sync are marked as varying.

    The evaluation ran before that step sync, so it still needs no exchange.
    """
    assert run_ranks(2, talk_in_evaluation) == [(0, 0)] * 2


def test_relearning_happens_once_and_is_logged_on_demand() -> None:
    for steps in run_ranks(2, relearned, True):
        assert [bool(step) for step in steps] == [False, True, False, False, False]
        assert any("blocks.2" in message and "learn the order anew" in message for message in steps[1])
    for steps in run_ranks(2, relearned, False):
        assert steps == [[]] * 5


def reductions(pair: Pair) -> int:
    """Return the number of reductions so far, over all hops."""
    return sum(row.calls for row in pair.optimizer.engine.comm.ledger.rows if row.kind == "reduce")


def evaluated_in_a_window() -> list[int]:
    """Return the reductions during three evaluations inside an accumulation window.

    Gradients are held by ``no_sync`` when the evaluations run.
    """
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
    """Run a new kind of phase that uses two blocks, and then use all blocks in it on one rank alone.

    Args:
        first: the new kind of phase, "no_sync" (a backward inside no_sync) or "eval" (a forward without gradients).
    """
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
def test_units_of_one_kind_of_phase_may_be_used_by_another(first: str) -> None:
    """A unit that other phases have used may be needed in the new kind of phase, too.

    So ranks exchange at the end of such a phase, although all phases of this kind were equal so far.
    """
    run_ranks(2, other_kinds, first)
