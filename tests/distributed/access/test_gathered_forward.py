"""A no_grad forward inside GatheredParameters sends nothing, so ranks may run different numbers of forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.branching_models import make_config
from tests.support.gathered_model import PLACED, Stack, data, lent
from tests.support.rank_pool import run_ranks, some
from zeropp.zero import GatheredParameters


def generated(settings: dict[str, Any]) -> list[str]:
    """Run 1 + 3 * rank forwards inside GatheredParameters between training steps.

    Returns:
        Errors: outputs that differ from plain torch's, forwards that sent bytes, or no gather on entry.
    """
    pair, wrong = lent(settings), []
    for _ in range(3):
        bytes_before = total(pair.model)
        with GatheredParameters(pair.model.parameters()):
            entered = total(pair.model)
            for number in range(1 + 3 * pair.rank):
                with torch.no_grad():
                    out = pair.model(data(number, pair.rank))
                    same = torch.allclose(out, pair.plain(data(number, pair.rank)), rtol=0, atol=1e-9)
                    wrong += [] if same else [f"forward {number}"]
            # A submodule can be called on its own, too.
            with torch.inference_mode():
                pair.model.blocks[0](torch.randn(2, 16, dtype=torch.float64))
            wrong += [] if total(pair.model) == entered else ["a forward inside has sent something"]
        wrong += [] if entered > bytes_before or dist.get_world_size() == 1 else ["nothing was gathered"]
        pair.train()
    pair.check(1e-9)
    return wrong


def total(model: Any) -> int:
    return sum(row.bytes for row in zeropp.comm_report(model).rows)


@pytest.mark.parametrize("name", some(sorted(PLACED, key="hpz".__ne__), 20))
def test_each_rank_runs_it_as_often_as_it_likes(name: str) -> None:
    assert run_ranks(4, generated, PLACED[name], local_world_size=2) == [[]] * 4


def in_bf16() -> tuple[Tensor, Tensor, list[torch.dtype], bool]:
    torch.manual_seed(0)
    model = Stack()
    config = make_config(bf16={"enabled": True})
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    before = zeropp.full_state(model)
    with torch.no_grad():
        outside = model(data(0, 0).float())
        with GatheredParameters(model):
            held = [parameter.dtype for parameter in model.parameters()]
            inside = model(data(0, 0).float())
            held += [parameter.dtype for parameter in model.parameters()]
    after = zeropp.full_state(model)
    optimizer.close()
    floating = sorted({dtype for dtype in held if dtype.is_floating_point}, key=str)
    return outside, inside, floating, all(torch.equal(before[name], after[name]) for name in before)


def test_it_computes_in_the_dtype_that_it_is_trained_in_and_main_weights_stay() -> None:
    for outside, inside, held, same in run_ranks(2, in_bf16):
        assert torch.equal(outside, inside) and outside.dtype == torch.bfloat16 and same
        assert held == [torch.bfloat16, torch.float32]


def with_a_graph(model: Stack) -> None:
    with GatheredParameters(model):
        model(data(0, 0))


def of_a_part(model: Stack) -> None:
    with GatheredParameters(model.conv), torch.no_grad():
        model(data(0, 0))


def after_an_error(model: Stack) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with GatheredParameters(model), torch.no_grad():
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 1, dtype=torch.float64))
        handle = model.blocks[1].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(data(0, 0))
        handle.remove()
        raise KeyError("the user's own")


REFUSED: dict[str, tuple[Callable[[Stack], None], str]] = {
    "with a graph": (with_a_graph, r"the model was called inside GatheredParameters; .*torch.no_grad\(\)"),
    "of a part": (of_a_part, "or gather all of its parameters"),
    "after an error": (after_an_error, "the user's own"),
}


def refuse(name: str) -> bool:
    pair = lent({})
    work, message = REFUSED[name]
    with pytest.raises((RuntimeError, KeyError), match=message):
        work(pair.model)
    pair.train()
    pair.check(1e-9)
    return torch.is_grad_enabled()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_leave_the_model_trainable(name: str) -> None:
    assert run_ranks(2, refuse, name) == [True, True]


def edited(kept: bool) -> str:
    model = Stack()
    config = make_config(bf16={"enabled": True})
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    gathered = GatheredParameters(model, modifier_rank=0 if kept else None)
    with pytest.raises(RuntimeError) as caught, torch.no_grad(), gathered:
        model.conv.bias.fill_(1 / 3)
        model(data(0, 0).float())
    optimizer.close()
    return str(caught.value)


@pytest.mark.every(2)
@pytest.mark.parametrize("kept", [True, False])
def test_edits_are_not_rounded(kept: bool) -> None:
    for message in run_ranks(2, edited, kept):
        assert "its forward would round" in message and "to torch.bfloat16" in message
