"""Every warning points at the line of user code that led to it, however many calls are between."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable

import pytest
import torch

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks
from zeropp.zero import GatheredParameters


def wrap(model: Routed, config: dict[str, object], lr: float = 0.1) -> zeropp.ZeroOptimizer:
    return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, config)


def no_stage() -> None:
    wrap(Routed(), {"zeropp": {"unit_min_blocks": 0}})


def no_effect() -> None:
    wrap(Routed(), make_config(zero_hpz_partition_size=2))


def unknown_leaves() -> None:
    wrap(Routed(), make_config(leaf_module={"names": ["nowhere"]}))


def a_step_that_does_nothing() -> None:
    model = Routed()
    optimizer = wrap(model, make_config(gradient_accumulation_steps=4))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def a_step_by_way_of_a_scheduler() -> None:
    model = Routed()
    optimizer = wrap(model, make_config(gradient_accumulation_steps=4))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def a_graph_that_is_kept() -> None:
    model = Routed()
    optimizer = wrap(model, make_config())
    with GatheredParameters(model):
        penalty = model.blocks[0].lin.weight.square().sum()
    assert penalty.requires_grad and optimizer is not None


def errors_that_do_not_fit() -> None:
    model = Routed()
    optimizer = wrap(model, make_config(zero_quantized_gradients=True, zeropp_loco_param={}))
    state = optimizer.state_dict()
    state["zeropp"]["carried"] = None
    optimizer.load_state_dict(state)


def values_given_up() -> None:
    model = Routed()
    optimizer = wrap(model, make_config())
    del optimizer
    model.blocks[3] = torch.nn.Identity()
    wrap(model, make_config())


WRAPS = "return zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, config)"
STEPS = "optimizer.step()"
# Name -> (function that leads to the warning, words of its message, text of the line of user code).
WARNINGS: dict[str, tuple[Callable[[], None], str, str]] = {
    "no stage": (no_stage, "does not set zero_optimization.stage", WRAPS),
    "no effect": (no_effect, "zero_hpz_partition_size 2 has no effect", WRAPS),
    "unknown leaves": (unknown_leaves, "the model has no modules", WRAPS),
    "a step that does nothing": (a_step_that_does_nothing, "gradient_accumulation_steps", STEPS),
    "a step by way of a scheduler": (a_step_by_way_of_a_scheduler, "gradient_accumulation_steps", STEPS),
    "a graph that is kept": (a_graph_that_is_kept, "inside GatheredParameters", "with GatheredParameters(model):"),
    "errors that do not fit": (errors_that_do_not_fit, "with zero errors", "optimizer.load_state_dict(state)"),
    "values given up": (values_given_up, "are given up", WRAPS),
}


def warned(name: str) -> list[tuple[str, str, str]]:
    """Run a function of WARNINGS, and return (message, file, text of the line) of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNINGS[name][0]()
    return [(str(w.message), w.filename, linecache.getline(w.filename, w.lineno).strip()) for w in caught]


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_points_at_the_line_of_user_code(name: str) -> None:
    _, words, line = WARNINGS[name]
    found = [(file, text) for said in run_ranks(2, warned, name) for message, file, text in said if words in message]
    assert found and set(found) == {(__file__, line)}, found
