"""The calls of Python that the engine adds to a step: counted exactly, so a slow machine changes nothing.

The bounds are the counts of Python 3.11 and torch 2.13 with ten percent of room. Later versions of Python make fewer
calls, because comprehensions are no functions there. ``python -m bench.host_steps`` prints all counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeropp
from bench.host_steps import CASES, measure, run_case
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks

# Case of bench.host_steps -> calls over plain torch for one block and step.
CALLS = {"zeropp": 200, "zeropp, 2 ranks": 220, "zeropp, 2 ranks, codecs": 316, "zeropp, 64 ranks, hpZ": 363}
ROOM = 1.1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_step(name: str) -> None:
    _, world, fake, _, _ = CASES[name]
    (plain,) = run_ranks(1, measure, "plain", 0)
    row = run_case(name, 0) if fake else run_ranks(world, measure, name, 0)[0]
    assert (row["python"] - plain["python"]) / row["layers"] <= ROOM * CALLS[name]


class Wide(nn.Module):
    """A unit of many small parameters, which are used in one operation."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat(list(self.weights)).sum()


def own_calls(step: Callable[[], None]) -> int:
    """Return the number of calls of zeropp's own functions in a step."""
    folder, found = str(Path(zeropp.__file__).parent), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        code = frame.f_code  # type: ignore[attr-defined]
        # A generator expression or comprehension over parameters is an operation on a list.
        lists = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
        found += event == "call" and code.co_filename.startswith(folder) and code.co_name not in lists

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return found


def calls_of(count: int) -> int:
    """Return the calls of zeropp in a step of a model with units of ``count`` parameters."""
    model = nn.Sequential(*(Wide(count) for _ in range(3)))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model, make_config(reuse=0))

    def step() -> None:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return own_calls(step)


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_of_many_parameters_costs_little_more(world: int) -> None:
    for few, many in zip(run_ranks(world, calls_of, 12), run_ranks(world, calls_of, 120), strict=True):
        assert many <= 1.5 * few, (few, many)
