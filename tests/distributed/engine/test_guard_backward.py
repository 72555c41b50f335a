"""A backward that is late, repeated, begun inside a block, or run after a failed one is right, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branch_routes import BARE
from tests.support.branching_models import Routed, chain, make_config, worst
from tests.support.rank_pool import RankFailure, run_ranks
from tests.support.sharded_and_plain import Pair


def late(how: str, settings: dict[str, object]) -> tuple[str, float]:
    """Train two steps, and run a backward that reaches weights long after their release, in a plain model, too.

    Args:
        how: name of the variant.
        settings: keys for ``make_config``.

    Returns:
        The error, with "torch refuses, too; " before it if plain torch raises as well; "torch refuses" if only plain
        torch raises; "" if neither does. And the largest difference of weights from plain torch.
    """
    torch.manual_seed(3)
    model = Routed(3).double()
    plain = copy.deepcopy(model)
    settings = {"reuse": 0, "prefetch": 0, **settings}
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)

    def run(m: nn.Module, step: Callable[[], None], zero_grad: Callable[[], None]) -> None:
        for _ in range(2):
            zero_grad()
            m(x).square().mean().backward()
            step()
        zero_grad()
        if how == "old graph":  # weights change between forward and backward, so plain torch refuses, too
            loss = m(x).square().mean()
            m(x).sum().backward()
            step()
            loss.backward()
        elif how == "twice":  # two backwards through one graph
            loss = m(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            step()
        elif how == "two graphs":  # both forwards first, then both backwards
            one, two = m(x).square().mean(), m(2 * x).sum()
            one.backward()
            two.backward()
            step()
        elif how == "reversed graphs":
            one, two = m(x).square().mean(), m(2 * x).sum()
            two.backward()
            one.backward()
            step()
        elif how == "autograd.grad":
            torch.autograd.grad(m(x).square().mean(), x)
            m(x).square().mean().backward()
            step()
        elif how == "part of it":  # backward begins at the output of the second block
            inner = []
            handle = m.blocks[1].register_forward_hook(lambda mod, args, out: inner.append(out))
            m(x)
            handle.remove()
            inner[0].square().mean().backward()
            step()
        elif how == "read by a hook":  # autograd runs the hook on the loss before backward reaches the model
            loss = m(x).square().mean()
            loss.register_hook(lambda gradient: gradient * (1 + m.blocks[0].lin.weight.detach().square().sum()))
            loss.backward()
            step()
        elif how == "saved view":  # the loss has a term that a forward hook computes from a weight
            with torch.enable_grad():
                made = []
                handle = m.blocks[0].register_forward_hook(lambda mod, args, out: made.append(mod.lin.weight.sum()))
                out = m(x).square().mean()
                handle.remove()
            (out + made[0]).backward()
            step()

    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    try:
        run(plain, plain_optimizer.step, plain_optimizer.zero_grad)
    except RuntimeError as error:
        refused = str(error)
    else:
        refused = ""
    try:
        run(model, optimizer.step, optimizer.zero_grad)
    except RuntimeError as error:
        return f"{refused and 'torch refuses, too; '}{error}", 0.0
    return "torch refuses" if refused else "", worst(zeropp.full_state(model), plain.state_dict())


WORKS = ["twice", "two graphs", "reversed graphs", "autograd.grad", "part of it", "read by a hook", "saved view"]


@pytest.mark.every(12)
@pytest.mark.parametrize("settings", [{}, {"reuse": 10**9, "prefetch": 10**6}], ids=["bare", "kept"])
@pytest.mark.parametrize("how", WORKS)
def test_a_late_backward_is_right(how: str, settings: dict[str, object]) -> None:
    for message, off in run_ranks(2, late, how, settings):
        assert message == ""
        assert off < 1e-12


def test_a_backward_through_changed_weights_is_refused() -> None:
    for message, _ in run_ranks(2, late, "old graph", {}):
        assert message.startswith("torch refuses, too; ")
        assert "modified by an inplace operation" in message


def inside_a_block(settings: dict[str, object]) -> str:
    """Run a backward that begins at a tensor inside a block, and train two steps afterwards.

    No hook on the block's output runs, so nothing unshards the block's unit for this backward.

    Returns:
        The error of the backward.
    """
    pair = Pair(Routed(3), make_config(**settings))
    pair.train(chain(3))
    inner: list[Tensor] = []
    handle = pair.model.blocks[1].lin.register_forward_hook(lambda module, args, out: inner.append(out))
    pair.model(pair.batch(pair.rank))
    handle.remove()
    with pytest.raises(RuntimeError) as caught:
        pair.optimizer.backward(inner[0].sum())
    for _ in range(2):
        pair.train(chain(3))
    pair.check()
    return str(caught.value)


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{"reuse": 0, "prefetch": 0}, {}], ids=["bare", "kept"])
def test_a_backward_that_comes_to_a_weight_that_is_away_is_refused(settings: dict[str, object]) -> None:
    for message in run_ranks(2, inside_a_block, settings):
        assert message.startswith("backward reached a weight") and "modified by an inplace operation" in message


def read_after_a_failure(who: list[int]) -> None:
    """Let a backward fail on all ranks, read a weight on some ranks, and train two more steps.

    Args:
        who: ranks that read the weight.
    """
    pair = Pair(Routed(3), make_config())
    pair.train(chain(3))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("of the user")

    first, second, third = pair.model.blocks
    hidden = second(first(pair.batch(pair.rank)))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        third(hidden).sum().backward()
    if pair.rank in who:
        with pytest.raises(RuntimeError, match="zeropp keeps its values elsewhere"):
            first.lin.weight.sum()
    pair.zero_grad()
    pair.train(chain(3))
    pair.train(chain(3))
    pair.check()


@pytest.mark.every(2)
@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_values_are_refused_after_a_backward_that_failed(who: list[int]) -> None:
    run_ranks(2, read_after_a_failure, who)


def backward_that_failed_once_more(settings: dict[str, object]) -> float:
    """Let a backward fail half-way through a retained graph, and run it again; then train one more step.

    Returns:
        Largest difference of weights from plain torch.
    """
    pair = Pair(Routed(4), make_config(**settings))
    pair.train(chain(4))
    fails = [True]

    def fail_once(gradient: Tensor) -> None:
        if fails and fails.pop():
            raise ArithmeticError("of the user")

    def watch(module: nn.Module, args: object, out: Tensor) -> None:
        out.register_hook(fail_once)

    with pair.model.blocks[1].register_forward_hook(watch):
        for _ in range(2):
            pair.zero_grad()
            pair.whole.backward(chain(4))
            loss = pair.model(pair.batch(pair.rank), chain(4)).square().mean()
            if fails:
                with pytest.raises(ArithmeticError):
                    loss.backward(retain_graph=True)
                pair.optimizer.zero_grad()
            loss.backward()
            pair.step()
    return pair.difference()


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [BARE, {}, {"stage": 1}], ids=["bare", "3", "1"])
def test_a_backward_that_failed_is_run_again(settings: dict[str, object]) -> None:
    assert max(run_ranks(2, backward_that_failed_once_more, settings)) < 1e-12


def backward_after_a_failure(settings: dict[str, object], again: bool) -> tuple[bool, float]:
    """Make two graphs, let the backward of one fail, and run the backward of the other and a step.

    Args:
        settings: keys for ``make_config``.
        again: True to call ``zero_grad()`` between the two backwards.

    Returns:
        True if the step was taken, and the gradient norm.
    """
    pair = Pair(Routed(3), make_config(**settings))
    pair.train(chain(3))
    pair.zero_grad()
    first, second, third = pair.model.blocks
    hidden = second(first(pair.batch(pair.rank)))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("of the user")

    hidden.register_hook(fail)
    lost, kept = third(hidden).sum(), pair.model(pair.batch(pair.rank)).square().mean()
    with pytest.raises(ArithmeticError):
        lost.backward()
    if again:
        pair.optimizer.zero_grad()
    kept.backward()
    pair.optimizer.step()
    return pair.optimizer.step_was_taken, pair.optimizer.grad_norm


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, {"stage": 1}], ids=["3", "1"])
@pytest.mark.parametrize("again", [False, True])
def test_a_backward_of_another_graph_after_one_that_failed(settings: dict[str, object], again: bool) -> None:
    """The second backward gives a gradient or raises an error; its gradient is never lost silently.

    It raises torch's error about edited weights if the failed backward has released the weights of its graph.
    """
    for result in run_ranks(2, backward_after_a_failure, settings, again, catch=True):
        if isinstance(result, RankFailure):
            assert result.is_a(RuntimeError)
            assert "needed for gradient computation has been modified by an inplace operation" in result.message
        else:
            taken, norm = result
            assert taken and norm > 0


def two_losses(settings: dict[str, object]) -> None:
    """Train three steps with two losses of one graph and a backward for each."""
    pair = Pair(Routed(3), make_config(**settings))
    for _ in range(3):
        pair.zero_grad()
        out = pair.model(pair.batch(pair.rank))
        pair.optimizer.backward(out.square().mean(), retain_graph=True)
        out.sum().mul(0.1).backward()
        for rank in range(pair.world):
            out = pair.plain(pair.batch(rank))
            (out.square().mean() / pair.world).backward(retain_graph=True)
            (out.sum() * 0.1 / pair.world).backward()
        pair.step()
    pair.check()


PLACED: dict[str, dict[str, object]] = {"hpz": {"zero_hpz_partition_size": 2}, "stage 3": {}, "stage 1": {"stage": 1}}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PLACED)
def test_two_backwards_of_one_graph(name: str) -> None:
    run_ranks(4, two_losses, PLACED[name], local_world_size=2)


def penalised(settings: dict[str, object]) -> bool:
    """Try a gradient penalty, which needs a backward through gradients (``create_graph=True``) and is refused.

    Returns:
        True if the next forward equals that of plain torch within 1e-12.
    """
    pair = Pair(Routed(3), make_config(**settings))
    x = pair.batch(0).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        (gradient,) = torch.autograd.grad(pair.model(x).square().mean(), x, create_graph=True)
        pair.optimizer.backward(gradient.square().mean())
    pair.optimizer.zero_grad()
    return torch.allclose(pair.model(pair.batch(1)), pair.plain(pair.batch(1)), rtol=0, atol=1e-12)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 3", "stage 1"])
def test_backward_through_gradients_is_refused_by_name(name: str) -> None:
    assert run_ranks(2, penalised, PLACED[name]) == [True, True]
