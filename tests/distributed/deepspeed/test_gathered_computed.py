"""GatheredParameters behind a bf16 engine: bfloat16 values to read, float32 with modifier_rank or without optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.rank_pool import run_ranks
from zeropp.training import Engine
from zeropp.zero import GatheredParameters

WIDTH = 32


def engine_of(zero: dict[str, Any], *, trained: bool = True) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    zero = {"stage3_param_persistence_threshold": 0, **zero}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": zero}
    config["zeropp"] = {"unit_min_blocks": 0}
    if trained:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine: Engine = zeropp.initialize(model=model, config=config)[0]
    if trained:
        # The first step gives main weights that bfloat16 cannot represent exactly.
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    return engine


def gathered(engine: Engine) -> dict[str, int]:
    """Return the bytes of gathers between passes, by the dtype or codec in which elements are sent."""
    found: dict[str, int] = {}
    for row in zeropp.comm_report(engine.module).rows:
        if "<state>" in row.unit:
            found[row.codec] = found.get(row.codec, 0) + row.bytes
    return found


def reads(zero: dict[str, Any]) -> list[str]:
    """Read each parameter inside GatheredParameters, and broadcast it to the other rank.

    Returns:
        Errors of values and dtypes, gathers in float32, and changes of main weights.
    """
    engine, wrong = engine_of(zero), []
    main = zeropp.full_state(engine.module)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in main.values())
    before = gathered(engine)
    for name, parameter in engine.module.named_parameters():
        outside = parameter.dtype
        with GatheredParameters([parameter]):
            wrong += [] if parameter.dtype == outside == torch.bfloat16 else [f"{name} is {parameter.dtype}"]
            wrong += [] if torch.equal(parameter.data, main[name].bfloat16()) else [f"values of {name}"]
            # Broadcast into a tensor of the dtype that the parameter has outside of GatheredParameters.
            received = parameter.data.clone() if dist.get_rank() == 0 else torch.empty(parameter.shape, dtype=outside)
            dist.broadcast(received, 0)
            wrong += [] if torch.equal(received, main[name].bfloat16()) else [f"{name} was sent wrong"]
    sent = {codec: nbytes - before.get(codec, 0) for codec, nbytes in gathered(engine).items()}
    wrong += [] if sent["bf16"] > 0 == sent["fp32"] else [f"bytes that were gathered: {sent}"]
    after = zeropp.full_state(engine.module)
    return wrong + [f"{name} has changed" for name, value in main.items() if not torch.equal(value, after[name])]


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "zero",
    [{"stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": 0}}, {"stage": 3}, {"stage": 1}],
    ids=["files", "stage 3", "stage 1"],
)
def test_values_read_inside_have_the_dtype_of_outside(zero: dict[str, Any], tmp_path: Path) -> None:
    if "offload_param" in zero:
        zero = {**zero, "offload_param": {**zero["offload_param"], "nvme_path": str(tmp_path)}}
    assert run_ranks(2, reads, zero) == [[], []]


def edits(zero: dict[str, Any]) -> list[str]:
    """Edit parameters with equal edits on all ranks, and with an edit on rank 1 only.

    Returns:
        Parameters with wrong main weights, or not float32 while rank 1 edits. Elements that no rank edits must keep
        their float32 values.
    """
    engine, wrong = engine_of(zero), []
    wanted = zeropp.full_state(engine.module)
    with GatheredParameters(engine.module):
        for parameter in engine.module.parameters():
            parameter.data.view(-1)[3] = 1.5
    for value in wanted.values():
        value.view(-1)[3] = 1.5
    found = zeropp.full_state(engine.module)
    wrong += [f"{name} by all" for name, value in wanted.items() if not torch.equal(found[name], value)]
    with GatheredParameters(engine.module, modifier_rank=1):
        for parameter in engine.module.parameters():
            wrong += [] if parameter.dtype == torch.float32 else [f"to be edited in {parameter.dtype}"]
            if dist.get_rank() == 1:
                parameter.data.mul_(1 + 2**-16)  # smaller than bfloat16's precision
    wanted = {name: value * (1 + 2**-16) for name, value in wanted.items()}
    found = zeropp.full_state(engine.module)
    return wrong + [f"{name} by one" for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [3, 2])
def test_edits_change_only_the_edited_elements(stage: int) -> None:
    assert run_ranks(2, edits, {"stage": stage}) == [[], []]


def averages() -> tuple[Tensor, Tensor]:
    """Let a weight decay in steps that bfloat16 would lose, in an engine without an optimizer.

    Returns:
        The weight at the end, and the expected weight.
    """
    engine = engine_of({"stage": 3}, trained=False)
    weight = engine.module[0].weight
    start = zeropp.full_state(engine.module)["0.weight"]
    for _ in range(20):
        with GatheredParameters([weight]):
            weight.data.mul_(1 - 2**-12)
    return zeropp.full_state(engine.module)["0.weight"], start * (1 - 2**-12) ** 20


def test_an_average_is_kept_in_full() -> None:
    for found, wanted in run_ranks(2, averages):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=0)
