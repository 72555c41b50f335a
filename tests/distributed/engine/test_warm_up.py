"""Wrapping calls all kernels that a run calls, with the same dtypes and options, and sends nothing.

The tests run on the CPU, where nothing is compiled. They record calls of kernel operations instead of compilations, and
let sums go through kernels as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
import zeropp_kernels
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from zeropp.comm.hops import Hop
from zeropp.config import load_config
from zeropp.setup import build
from zeropp.setup.blueprint import draw_blueprint
from zeropp.setup.warm_up import warm_up

OPERATIONS = [name for name in zeropp_kernels.__all__ if name.endswith("_")]
Call = tuple[Any, ...]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.norm = nn.LayerNorm(40)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss: Tensor = self.norm(x).square().mean()
        return loss


def described(value: object) -> object:
    """Return the properties of an argument that a compiler distinguishes: dtypes, options, and None, but not sizes."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, (list, tuple)):
        return sorted({str(described(each)) for each in value})
    if isinstance(value, bool) or value is None:
        return value
    return type(value).__name__


@contextlib.contextmanager
def calls() -> Iterator[set[Call]]:
    """Record the kernel operations that are called inside the block on any thread.

    Yields:
        A set of tuples: name of the operation, and descriptions of its arguments. The set fills while the block runs.
    """
    found: set[Call] = set()

    def noting(name: str) -> Any:
        operation = getattr(zeropp_kernels, name)

        def noted(*args: Any, **options: Any) -> Any:
            chosen = {key: value if key == "bits" else described(value) for key, value in options.items()}
            found.add(
                (name, *map(str, map(described, args)), *sorted(f"{key} {value}" for key, value in chosen.items()))
            )
            return operation(*args, **options)

        return noted

    with contextlib.ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(zeropp_kernels, name, noting(name)))
        for module in ("zeropp.wire.codecs", "zeropp.params.gradient"):
            by_kernels = mock.patch(f"{module}.summed_by_kernels", lambda out: out.dtype == torch.float32)
            stack.enter_context(by_kernels)
        yield found


def missing(settings: dict[str, object]) -> tuple[list[str], int]:
    """Warm up, and then train three steps of two micro-batches with evaluations.

    Args:
        settings: keys for ``make_config``.

    Returns:
        Calls of the training that the warm-up has not made, and number of different calls of the warm-up.
    """
    torch.manual_seed(1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    source = make_config(gradient_accumulation_steps=2, **settings)
    config, local, model = load_config(source), min(world, 2), Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with calls() as warmed, mock.patch.object(Hop, "all_gather", side_effect=AssertionError("something was sent")):
        warm_up(draw_blueprint(model, config, world, local, torch.device("cpu"), rank=rank))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with calls() as made:
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, source)
        for _ in range(3):
            for _ in range(2):
                optimizer.backward(model(torch.randn(4, 40)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(4, 40))
    return [str(call) for call in sorted(made - warmed)], len(warmed)


BF16: dict[str, object] = {"bf16": {"enabled": True}}
CODED: dict[str, object] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
GROUPS: dict[str, object] = {"zero_hpz_partition_size": 2}
SETTINGS: dict[str, dict[str, object]] = {
    "delta4, some persistent": {**GROUPS, **BF16, "weight_codec": "delta4", "persist": 100},
    "stage 3": {},
    "qwZ, qgZ": CODED,
    "rotated, LoCo": {"zero_quantized_gradients": True, "hadamard": True, "zeropp_loco_param": {}, "feedback": "both"},
    "hpZ, codes, bf16": {**CODED, **GROUPS, **BF16, "secondary": "codes"},
    "lossless": {**BF16, "stage": 1, "weight_codec": "lossless"},
    "frozen in codes, deferred": {
        "zero_quantized_nontrainable_weights": True,
        "zero_quantized_gradients": True,
        "defer_cross_reduction": True,
    },
    "MiCS": {"mics_shard_size": 2, "zero_quantized_gradients": True},
    "plain sums by the backend": {**BF16, "reduce_scatter": "backend", "communication_data_type": "fp32"},
}


@pytest.mark.every(20)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_calls_nothing_that_wrapping_has_not(name: str) -> None:
    for absent, warmed in run_ranks(4, missing, SETTINGS[name], local_world_size=2):
        assert absent == [] and warmed > 0


@pytest.mark.parametrize("name", ["stage 3", "qwZ, qgZ"])
def test_one_rank_alone(name: str) -> None:
    ((absent, warmed),) = run_ranks(1, missing, SETTINGS[name])
    assert absent == [] and warmed > 0


@pytest.mark.parametrize("chosen", [True, False])
def test_on_a_card_wrapping_warms_up_unless_it_is_told_not_to(chosen: bool) -> None:
    """Wrapping warms up if the model is on a CUDA device and ``warm_up`` is True.

    The test replaces the function that finds the device. There is no GPU, so wrapping fails soon after the warm-up.
    """
    for device, expected in (("cuda", chosen), ("cpu", False)):
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        found = mock.patch.object(build, "_check_model", lambda *given, device=device: torch.device(device))
        limits = mock.patch.object(build, "processors", lambda device: 132)
        with found, limits, mock.patch.object(build, "warm_up") as warmed, contextlib.suppress(Exception):
            zeropp.ZeroOptimizer(inner, model, make_config(warm_up=chosen))
        assert warmed.called == expected
