"""The calls of Python that the engine adds to a step, and the containers that it makes: exact on any machine.

The bounds are the counts of Python 3.11 and torch 2.13 with ten percent of room. Later versions of Python make fewer
calls, because comprehensions are no functions there. ``python -m bench.host_steps`` prints all counts.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from bench.host_steps import CASES, measure, run_case
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks

# Case of bench.host_steps -> calls over plain torch for one block and step.
CALLS = {"zeropp": 198, "zeropp, 2 ranks": 217, "zeropp, 2 ranks, codecs": 317, "zeropp, 64 ranks, hpZ": 360}
ROOM = 1.1
# World size -> displays, comprehensions and functions in the engine's code for one unit of 12 parameters and step.
CONTAINERS = {1: 10.2, 2: 17.2}


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


def own_containers(step: Callable[[], None]) -> int:
    """Return the number of displays, comprehensions and functions that zeropp's own code evaluates in a step.

    A display is an expression such as [a, b] or (a, b). Calls such as list() are not counted.
    """
    folder, found = str(Path(zeropp.__file__).parent), 0
    making = {code for name, code in dis.opmap.items() if name.startswith(("BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP"))}
    making |= {code for name, code in dis.opmap.items() if name.startswith(("BUILD_SET", "BUILD_CONST", "MAKE_FUNC"))}

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal found
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode" and frame.f_code.co_code[frame.f_lasti] in making
        return trace

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return found


def counted(count: Callable[[Callable[[], None]], int], parameters: int, units: int = 3) -> int:
    """Count what a step does with a model of equal units, once their work is prepared."""
    model = nn.Sequential(*(Wide(parameters) for _ in range(units)))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model, make_config(reuse=0))

    def step() -> None:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return count(step)


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_of_many_parameters_costs_little_more(world: int) -> None:
    found = zip(run_ranks(world, counted, own_calls, 12), run_ranks(world, counted, own_calls, 120), strict=True)
    for few, many in found:
        assert many <= 1.5 * few, (few, many)


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_makes_few_containers(world: int) -> None:
    found = []
    # A rank that waits for a slow one makes some more, so the least of three counts decides.
    while len(found) < 3 and not (found and min(found) <= ROOM * CONTAINERS[world]):
        (small, *_), (large, *_) = (run_ranks(world, counted, own_containers, 12, units) for units in (3, 9))
        found.append((large - small) / 6)
    assert min(found) <= ROOM * CONTAINERS[world], found
