"""``offload_optimizer.ratio``: the border between elements that the device steps and elements that the host steps.

The tests check the border's position, steps on both sides of it, and checkpoints that are loaded with another border.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import apart, make_config
from tests.support.offload_pairs import Run, compare, host_apart, run
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from zeropp.optimizer.optimizer_step import OptimizerStep

KIND = MODELS["gpt"]


def make(ratio: float | None, **options: Any) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    torch.manual_seed(3)
    model = KIND.build().float()
    offload = {} if ratio is None else {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, **{"fused": True, **options})
    return model, zeropp.ZeroOptimizer(inner, model, make_config(**offload, gradient_clipping=0.3))


def train(model: nn.Module, optimizer: zeropp.ZeroOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = KIND.loss(model, KIND.batch(torch.Generator().manual_seed(step)))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def border(ratio: float) -> dict[str, Any]:
    """Train two steps with host memory separate from the device's, and describe the border.

    Returns:
        "shards": elements of all shards. "here": elements that the device steps. "ordered": True if the device's
        parameters come first in the model. "both": names of parameters on both sides of the border. "places": places of
        main weights and states of each buffer.
    """
    with host_apart():
        model, optimizer = make(ratio)
        train(model, optimizer, range(2))
        optimizer.engine.wait_for_step()
        here = [part for part in optimizer.slices.all if not part.on_host]
        there = [part for part in optimizer.slices.all if part.on_host]
        shards = sum(buffer.main.tensor.numel() for buffer in optimizer.engine.trainable_buffers)
        order = [name for name, _ in model.named_parameters()]
        found = {
            "shards": shards,
            "here": sum(
                min(buffer.tiers.device_numel, buffer.main.tensor.numel())
                for buffer in optimizer.engine.trainable_buffers
            ),
            "ordered": max(order.index(p.name) for p in here) <= min(order.index(p.name) for p in there),
            "both": {part.name for part in here} & {part.name for part in there},
            "places": {(buffer.main.place, buffer.tiers.states.place) for buffer in optimizer.engine.trainable_buffers},
        }
        optimizer.close()
        return found


@pytest.mark.parametrize(("world", "ratio"), [(1, 0.3), (2, 0.7)])
def test_the_border_lies_where_the_fraction_says(world: int, ratio: float) -> None:
    for found in run_ranks(world, border, ratio):
        assert 0 <= (1 - ratio) * found["shards"] - found["here"] <= 256
        assert found["ordered"] and len(found["both"]) == 1
        assert found["places"] == {("device", "device"), ("device", "host"), ("host", "host")}


@pytest.mark.parametrize("world", [1, 2])
def test_the_buffer_at_the_border_passes_through_the_host(world: int) -> None:
    """Main weights and gradients of the buffer at the border are read to the host and written back, as with a GPU."""
    part = {"a part": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}
    for found in run_ranks(world, compare, Run({"gradient_clipping": 0.3}), part, True):
        wrong, seen = found["a part"]
        assert wrong == [] and seen["copy from a row"] > 0 and seen["copy to a row"] > 0


def close_to(options: dict[str, Any], optimizer: type[torch.optim.Optimizer]) -> float:
    """Return the largest relative difference of losses from training without offload."""
    plain = Run({"gradient_clipping": 0.3}, optimizer=optimizer, options={"lr": 3e-3, **options})
    settings = {**plain.settings, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}
    with host_apart():
        other = run(replace(plain, settings=settings))
    losses = torch.tensor(run(plain).losses)
    return apart(torch.tensor(other.losses) / losses, torch.ones_like(losses))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("optimizer", "options", "bound"),
    [
        # The host steps with a fused kernel and the device without one, so losses differ by rounding.
        (torch.optim.AdamW, {"foreach": False}, 1e-6),
        (torch.optim.SGD, {"momentum": 0.9}, 1e-6),
        # The host has no kernel for these optimizers, so the optimizer's own code steps everything.
        (torch.optim.RMSprop, {}, 0.0),
        (torch.optim.NAdam, {}, 0.0),
    ],
)
def test_other_optimizers(optimizer: type[torch.optim.Optimizer], options: dict[str, Any], bound: float) -> None:
    assert all(distance <= bound for distance in run_ranks(2, close_to, options, optimizer))


def saves(ratio: float | None, path: Path, form: str) -> None:
    model, optimizer = make(ratio)
    train(model, optimizer, range(3))
    if form == "own":
        zeropp.checkpoint.save(path, model, optimizer)
    else:
        dcp.save({"app": zeropp.checkpoint.state(model, optimizer)}, checkpoint_id=path)
    optimizer.close()


def goes_on(ratio: float | None, path: Path | None, form: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two further steps, and the whole weights after them."""
    model, optimizer = make(ratio)
    if path is None:
        train(model, optimizer, range(3))
    elif form == "own":
        zeropp.checkpoint.load(path, model, optimizer)
    else:
        dcp.load({"app": zeropp.checkpoint.state(model, optimizer)}, checkpoint_id=path)
    found = train(model, optimizer, range(3, 5)), zeropp.full_state(model)
    optimizer.close()
    return found


@pytest.mark.every(8)
@pytest.mark.parametrize("form", ["own", "torch's"])
@pytest.mark.parametrize(("saved", "loaded"), [(0.3, None), (None, 0.3), (0.3, 0.7), (0.7, 1.0)], ids=str)
def test_a_checkpoint_moves_the_border(saved: float | None, loaded: float | None, form: str, tmp_path: Path) -> None:
    """Training resumes bit for bit with another border, because one kernel steps on both sides of it."""
    run_ranks(2, saves, saved, tmp_path, form)
    without, after = (run_ranks(2, goes_on, *which, form) for which in ((None, None), (loaded, tmp_path)))
    for (losses, weights), (expected, others) in zip(after, without, strict=True):
        assert losses == expected and all(torch.equal(weights[name], value) for name, value in others.items())


def refused(saved: float, loaded: float) -> str:
    model, optimizer = make(saved)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    _, other = make(loaded)
    with pytest.raises(ValueError, match="state") as caught:
        other.load_state_dict(state)
    return str(caught.value)


def test_a_state_dict_belongs_to_its_border() -> None:
    for message in run_ranks(2, refused, 0.3, 0.31):
        assert re.search("partition|slices", message), message


def unfreezes() -> tuple[list[float], list[float]]:
    """Return losses without offload and with a part on the host, for a model with a block unfrozen after two steps."""
    found = []
    for ratio in (None, 0.5):
        torch.manual_seed(3)
        model = KIND.build().float()
        frozen = [p for name, p in model.named_parameters() if name.startswith("blocks.1.")]
        assert frozen
        for parameter in frozen:
            parameter.requires_grad_(False)
        offload = {} if ratio is None else {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**offload))
        losses = train(model, optimizer, range(2))
        for parameter in frozen:
            parameter.requires_grad_(True)
        found.append(losses + train(model, optimizer, range(2, 5)))
        later = {part.on_host for part in optimizer.slices.all if part.name.startswith("blocks.1.")}
        assert later == {ratio is not None}
        optimizer.close()
    return found[0], found[1]


def test_parameters_unfrozen_later_are_stepped_on_the_host() -> None:
    for plain, offloaded in run_ranks(2, unfreezes):
        assert plain == offloaded


def failing_step(ratio: float) -> list[str]:
    """Let a step fail half way, and return the names of weights in use that differ from the main weights."""
    torch.manual_seed(3)
    model = KIND.build().float()
    offload = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    settings = make_config(**offload, persist=10**6, bf16={"enabled": True})
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), model, settings)
    train(model, optimizer, range(1))
    before, plain = zeropp.full_state(model), OptimizerStep._step

    def fails(update: OptimizerStep) -> None:
        plain(update)
        raise ValueError("of the optimizer's own")

    with mock.patch.object(OptimizerStep, "_step", fails), pytest.raises(ValueError, match="of the optimizer's own"):
        train(model, optimizer, range(1, 2))
    after, used = zeropp.full_state(model), dict[str, Tensor]()
    assert any(not torch.equal(after[name], value) for name, value in before.items()), "some have been stepped"

    def look(module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            used[f"{names[module]}.{name}"] = parameter.detach().clone()

    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        if module is not model:
            module.register_forward_hook(look)
    optimizer.zero_grad()
    with torch.no_grad():
        KIND.loss(model, KIND.batch(torch.Generator().manual_seed(1)))
    assert used
    return [name for name, value in used.items() if not torch.equal(value, after[name].bfloat16())]


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_a_forward_after_a_failed_step_uses_the_stepped_weights(ratio: float) -> None:
    assert run_ranks(1, failing_step, ratio) == [[]]
