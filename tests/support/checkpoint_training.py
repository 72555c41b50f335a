"""Training that saves and resumes from a checkpoint, and the state that both must agree on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.quantized_model import Model, tokens
from zeropp import checkpoint

__all__ = ["CONFIGS", "Went", "by_hand", "goes_on", "moments", "saves", "small", "states_of", "step", "train", "wrap"]

_CUT: dict[str, object] = {"stage3_param_persistence_threshold": 0}
_HPZ: dict[str, object] = {**_CUT, "stage": 3, "zero_hpz_partition_size": 2}
_BF16: dict[str, object] = {"bf16": {"enabled": True}}
_LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
_SMALL: dict[str, object] = {"unit_min_blocks": 0, "hang_timeout": 30}


def _config(zero: dict[str, object], top: dict[str, object] | None = None, **extension: object) -> dict[str, object]:
    return {"zero_optimization": zero, "zeropp": {**_SMALL, **extension}, **(top or {})}


CONFIGS: dict[str, dict[str, object]] = {
    "stage 0": _config({"stage": 0}),
    "stage 1": _config({"stage": 1}),
    "stage 2 bf16": _config({"stage": 2}, _BF16),
    "stage 3": _config({**_CUT, "stage": 3}),
    "stage 3 small kept": _config({"stage": 3, "stage3_param_persistence_threshold": 100}),
    "one unit": _config({**_CUT, "stage": 3}, unit_min_blocks=10_000),
    "mics": _config({**_CUT, "stage": 3, "mics_shard_size": 2}),
    "hpz loco bf16": _config({**_HPZ, **_LOCO}, _BF16),
    "hpz delta4": _config(_HPZ, _BF16, weight_codec="delta4"),
    "stage 1 delta4": _config({"stage": 1}, _BF16, weight_codec="delta4"),
    "hpz lossless": _config(_HPZ, _BF16, weight_codec="lossless"),
    "frozen": _config({**_CUT, "stage": 3}),
    "frozen codes": _config({**_CUT, "stage": 3, "zero_quantized_nontrainable_weights": True}),
    "frozen codes hpz": _config({**_HPZ, "zero_quantized_nontrainable_weights": True}, _BF16),
    "quantized weights": _config({**_CUT, "stage": 3, "zero_quantized_weights": True}, _BF16),
}


@dataclass
class Went:
    """The state of a rank after a save or a load, and the course of its further training.

    Attributes:
        state: full main weights and buffers.
        moments: optimizer states of this rank's slices: parameter name -> (first element, states).
        losses: losses of the steps after the save or load.
        drawn: the next random numbers of torch and of Python.
        skipped: number of skipped steps.
        found: result of the load.
    """

    state: dict[str, Tensor]
    moments: dict[str, tuple[int, dict[str, Any]]]
    losses: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    skipped: int = 0
    found: checkpoint.Loaded | None = None


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.03}, {"params": others, "lr": 2e-3}], lr=1e-3)


def wrap(name: str, make: Callable[[], nn.Module] = Model) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    model, config = make(), CONFIGS[name]
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("frozen" not in name or key.split(".")[-2:-1] == ["1"] or key == "head.bias")
    return model, zeropp.ZeroOptimizer(make_optimizer(model), model, config)


def train(model: nn.Module, optimizer: zeropp.ZeroOptimizer, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens(step, dist.get_rank() if dist.is_initialized() else 0))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def moments(optimizer: zeropp.ZeroOptimizer) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return copies of this rank's optimizer states: parameter name -> (first element of the slice, states)."""
    found = {}
    for part in optimizer.slices.all:
        state = optimizer.inner.state.get(part.parameter, {})
        found[part.name] = part.start, {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    return found


def went(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> Went:
    drawn = [torch.rand(()).item(), random.random()]
    return Went(zeropp.full_state(model), moments(optimizer), drawn=drawn, skipped=optimizer.skipped_steps)


def saves(path: Path, name: str, after: int = 4, asynchronous: bool = False) -> Went:
    """Train ``after`` steps and one step that is skipped, save, and train ten more steps."""
    model, optimizer = wrap(name)
    train(model, optimizer, range(after))
    optimizer.backward(model(tokens(0, 0)) * float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(path, model, optimizer, asynchronous=asynchronous)
    result = went(model, optimizer)
    result.losses = train(model, optimizer, range(after, after + 10))
    checkpoint.wait()
    return result


def goes_on(path: Path, name: str, after: int = 4, **how: Any) -> Went:
    """Train two other steps, load the checkpoint, and train steps ``after`` to ``after + 9``."""
    model, optimizer = wrap(name)
    train(model, optimizer, range(90, 92))
    torch.rand(3), random.random()
    found = checkpoint.load(path, model, optimizer, **how)
    result = went(model, optimizer)
    result.losses, result.found = train(model, optimizer, range(after, after + 10)), found
    return result


def by_hand(state: dict[str, Tensor], states: dict[str, dict[str, Any]], name: str, after: int = 4) -> list[float]:
    """Return the losses of training that starts from given full weights and optimizer states."""
    model = Model()
    model.load_state_dict(state)
    optimizer = make_optimizer(model)
    for key, parameter in model.named_parameters():
        optimizer.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in states[key].items()}
    return train(model, zeropp.ZeroOptimizer(optimizer, model, CONFIGS[name]), range(after, after + 10))


def states_of(ranks: Sequence[Went]) -> dict[str, dict[str, Any]]:
    """Return the full optimizer states, assembled from every rank's slices."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in Model().named_parameters():
        whole: dict[str, Tensor] = {}
        for rank in ranks:
            start, state = rank.moments.get(name, (0, {}))
            for key, value in state.items():
                if key == "step":
                    whole[key] = value
                    continue
                row = whole.setdefault(key, torch.full((parameter.numel(),), float("nan")))
                row[start : start + value.numel()] = value
        # Slices are in memory order, so the strides give the shape.
        found[name] = {
            k: v if k == "step" else torch.as_strided(v, parameter.shape, parameter.stride()) for k, v in whole.items()
        }
    return found


def small(model: nn.Module | None = None) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    """Return a model and its ZeroOptimizer in a single process, for tests that need no particular training."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)


def step(pair: tuple[nn.Module, zeropp.ZeroOptimizer]) -> None:
    """Train one step."""
    pair[1].backward(pair[0](torch.ones(2, 4)).square().mean())
    pair[1].step()
    pair[1].zero_grad()
