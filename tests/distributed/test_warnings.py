"""Every warning points at the line of user code that led to it, by whatever way."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Routed, make_config
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


WARNINGS: dict[str, tuple[Callable[[], None], str]] = {
    "no stage": (no_stage, "does not set zero_optimization.stage"),
    "no effect": (no_effect, "zero_hpz_partition_size 2 has no effect"),
    "unknown leaves": (unknown_leaves, "the model has no modules"),
    "a step that does nothing": (a_step_that_does_nothing, "gradient_accumulation_steps"),
    "a step by way of a scheduler": (a_step_by_way_of_a_scheduler, "gradient_accumulation_steps"),
    "a graph that is kept": (a_graph_that_is_kept, "inside GatheredParameters"),
    "errors that do not fit": (errors_that_do_not_fit, "they begin anew"),
    "values given up": (values_given_up, "are given up"),
}


def warned(name: str) -> tuple[list[tuple[str, str]], int]:
    """(message, file) of each warning, and this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNINGS[name][0]()
    return [(str(each.message), each.filename) for each in caught], dist.get_rank()


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_points_at_the_line_of_user_code(name: str) -> None:
    results = run_ranks(2, warned, name)
    found = [(text, file) for said, _ in results for text, file in said if WARNINGS[name][1] in text]
    assert found, results
    assert {file for _, file in found} == {__file__}, found
