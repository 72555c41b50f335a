"""Compiled modules that replay CUDA graphs are refused if zeropp moves their weights. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeropp
from tests.support.branching_models import Routed, make_config
from zeropp._compat import replays_cuda_graphs
from zeropp.access.refusals import refuse_cuda_graphs

CARD = torch.device("cuda")
GRAPHS: dict[str, dict[str, Any]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "option": {"options": {"triton.cudagraphs": True}},
    "backend": {"backend": "cudagraphs"},
}
NONE: dict[str, dict[str, Any]] = {
    "default": {},
    "without graphs": {"mode": "max-autotune-no-cudagraphs"},
    "eager": {"backend": "eager"},
}


def outside(module: nn.Module, **given: Any) -> nn.Module:
    return torch.compile(module, **given)  # type: ignore[return-value]


def in_place(module: nn.Module, **given: Any) -> nn.Module:
    module.compile(**given)
    return module


# The case "backend" uses torch.compile(module) only, because ``module.compile()`` does not record a backend without
# options.
@pytest.mark.parametrize(
    ("how", "name"), [(outside, "backend"), *product((outside, in_place), [*list(GRAPHS)[:3], *NONE])]
)
def test_modules_that_replay_cuda_graphs_are_recognized(how: Callable[..., nn.Module], name: str) -> None:
    assert replays_cuda_graphs(how(nn.Linear(2, 2), **{**GRAPHS, **NONE}[name])) == (name in GRAPHS)
    assert not replays_cuda_graphs(nn.Linear(2, 2))


def test_only_on_a_card_and_where_weights_move() -> None:
    model = Routed(3)
    model.blocks[1] = outside(model.blocks[1], mode="reduce-overhead")
    with pytest.raises(ValueError, match=r"modules \['blocks.1'\] are compiled to CUDA graphs.*no-cudagraphs"):
        refuse_cuda_graphs(model, CARD, lambda parameter: parameter.dim() == 2)
    refuse_cuda_graphs(model, CARD, lambda parameter: parameter.dim() == 3)
    refuse_cuda_graphs(model, torch.device("cpu"), lambda parameter: True)


@pytest.mark.parametrize(("settings", "refused"), [({}, True), ({"stage": 2}, False), ({"persist": 10**6}, False)])
def test_wrapping_asks(settings: dict[str, object], refused: bool) -> None:
    model = Routed(2)
    in_place(model.blocks[1], mode="reduce-overhead")
    asked = mock.patch(
        "zeropp.setup.build.refuse_cuda_graphs", lambda model, _, moves: refuse_cuda_graphs(model, CARD, moves)
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with asked:
        if refused:
            with pytest.raises(ValueError, match="CUDA graphs"):
                zeropp.ZeroOptimizer(inner, model, make_config(**settings))
        else:
            zeropp.ZeroOptimizer(inner, model, make_config(**settings))


def test_modules_compiled_after_wrapping_are_refused_at_the_next_forward() -> None:
    model = Routed(2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model.blocks[1] = outside(model.blocks[1], mode="reduce-overhead")
    asked = mock.patch(
        "zeropp.access.refusals.refuse_cuda_graphs", lambda model, _, moves: refuse_cuda_graphs(model, CARD, moves)
    )
    with asked, pytest.raises(ValueError, match="CUDA graphs"):
        model(torch.ones(2, 8))
    del optimizer
