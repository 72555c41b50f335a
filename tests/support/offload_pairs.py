"""Training with offload compared bit for bit with the same training without offload, on every rank."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from bench.offload import spans
from tests.support.branching_models import make_config
from tests.support.small_models import MODELS
from zeropp.offload import swap
from zeropp.offload.read_ahead import PendingRead
from zeropp.offload.storage_tiers import MemoryTensor
from zeropp.optimizer import host_step
from zeropp.params.wire_copy import WireCopy

__all__ = ["Run", "States", "compare", "delayed", "host_apart", "run", "same", "states_of"]

States = dict[str, dict[str, Tensor]]
_DELAYED: dict[str, tuple[Any, str]] = {
    "step": (host_step.HostStep, "_step"),
    "read": (swap, "read_at"),
    "write": (swap, "write_at"),
    "copy from a row": (MemoryTensor, "read"),
    "copy to a row": (MemoryTensor, "write"),
    "copy to the device": (PendingRead, "copy_to"),
    "new weights": (WireCopy, "take_new_weights"),
}


def _go_on(model: nn.Module, optimizer: zeropp.ZeroOptimizer, when: str) -> None:
    """Do nothing; the default of ``Run.paused``."""


@dataclass(frozen=True)
class Run:
    """The description of one training run.

    Attributes:
        settings: keys for :func:`make_config`.
        model: key of MODELS.
        accumulation: micro-batches per step.
        how: "backward" (accumulation configured), "no_sync", or "plain" (several backwards, each of which reduces).
        scaled: True to scale losses with torch's GradScaler.
        optimizer: class of the optimizer.
        options: arguments of the optimizer.
        steps: number of steps.
        skipped: steps at which rank 0's loss is NaN.
        resumed: step before which model and optimizer are made anew and load the optimizer's state dict; -1 for none.
        saved: step after which a checkpoint is saved, whose weights are compared, too; -1 for none.
        folder: folder of that checkpoint.
        paused: called after each backward and each step with the model, the optimizer, and "backward" or "step".
    """

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    accumulation: int = 1
    how: str = "backward"
    scaled: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-3, "fused": True})
    steps: int = 6
    skipped: tuple[int, ...] = ()
    resumed: int = -1
    saved: int = -1
    folder: str = ""
    paused: Callable[[nn.Module, zeropp.ZeroOptimizer, str], None] = _go_on


@dataclass
class Outcome:
    """The results of a run: losses, norms of each step, full weights, and this rank's optimizer states.

    ``saved`` has the weights that a checkpoint contains, or nothing.
    """

    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]
    states: States
    saved: dict[str, Tensor]


def _make(run: Run) -> tuple[nn.Module, zeropp.ZeroOptimizer, Any, Any]:
    torch.manual_seed(3)
    model = MODELS[run.model].build().float()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "lr": 2 * run.options["lr"]}]
    inner = run.optimizer(groups, **run.options)
    settings = dict(run.settings)
    if run.how == "backward":
        settings["gradient_accumulation_steps"] = run.accumulation
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
    # The rate changes strongly at every step, right after the step. A step that runs late must use the rate from
    # before.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if run.scaled else None
    return model, optimizer, scheduler, scaler


def _micro(run: Run, step: int, micro: int, rank: int) -> Any:
    return MODELS[run.model].batch(torch.Generator().manual_seed(1 + 1009 * step + 101 * micro + rank))


def run(run: Run) -> Outcome:
    """Train as the description says, and return the results."""
    model, optimizer, scheduler, scaler = _make(run)
    rank, loss_of = dist.get_rank() if dist.is_initialized() else 0, MODELS[run.model].loss
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(run.steps):
        if step == run.resumed:
            kept = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            model, optimizer, scheduler, _ = _make(run)
            optimizer.load_state_dict(kept[0])
            scheduler.load_state_dict(kept[1])
        optimizer.zero_grad()
        for micro in range(run.accumulation):
            alone = run.how == "no_sync" and micro + 1 < run.accumulation
            with optimizer.no_sync() if alone else contextlib.nullcontext():
                loss = loss_of(model, _micro(run, step, micro, rank))
                losses.append(loss.item())
                if step in run.skipped and rank == 0:
                    loss = loss * float("nan")
                loss = scaler.scale(loss) if scaler is not None else loss
                optimizer.backward(loss) if run.how == "backward" else (loss / run.accumulation).backward()
                del loss
                run.paused(model, optimizer, "backward")
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        norms.append(optimizer.grad_norm)
        if optimizer.step_was_taken:
            scheduler.step()
        run.paused(model, optimizer, "step")
        if step == run.saved:
            zeropp.checkpoint.save(run.folder, model, optimizer)
    states = states_of(optimizer)
    outcome = Outcome(losses, norms, zeropp.full_state(model), states, {})
    if run.saved >= 0:
        other, empty, _, _ = _make(run)
        zeropp.checkpoint.load(run.folder, other, empty)
        outcome.saved = zeropp.full_state(other)
        empty.close()
    optimizer.close()
    return outcome


def states_of(optimizer: zeropp.ZeroOptimizer) -> States:
    """Return this rank's optimizer states by "parameter name:first element"; adjacent slices are joined."""
    found: States = {}
    name, stop = "", ("", 0)
    for part in optimizer.slices.all:
        states = {key: value for key, value in optimizer.state[part.parameter].items() if isinstance(value, Tensor)}
        if (part.name, part.start) != stop:
            name = f"{part.name}:{part.start}"
            found[name] = {key: value.clone() for key, value in states.items()}
        else:
            found[name] = {
                key: torch.cat([found[name][key], value]) if value.dim() else value for key, value in states.items()
            }
        stop = (part.name, part.start + part.parameter.numel())
    return found


def same(one: Outcome, other: Outcome) -> list[str]:
    """Return the names of all values that differ, even by one bit."""
    wrong = [name for name in ("losses", "norms") if repr(getattr(one, name)) != repr(getattr(other, name))]
    wrong += _differ("weights", one.weights, other.weights) + _differ("saved", one.saved, other.saved)
    if one.states.keys() != other.states.keys():
        return [*wrong, f"slices {one.states.keys() ^ other.states.keys()}"]
    for name, states in one.states.items():
        wrong += _differ(name, states, other.states[name])
    return wrong


def _differ(what: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    if one.keys() != other.keys():
        return [f"{what}: {one.keys() ^ other.keys()}"]
    return [f"{what} {key}" for key, value in one.items() if not torch.equal(value, other[key])]


@contextlib.contextmanager
def delayed(seed: int, most: float = 0.01) -> Iterator[dict[str, int]]:
    """Add random delays to steps, reads, writes and copies in the block; yield the number of calls of each kind.

    Args:
        seed: seed of the delays.
        most: longest delay in seconds.
    """
    rng, lock, seen = random.Random(seed), threading.Lock(), dict.fromkeys(_DELAYED, 0)

    def around(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **named: Any) -> Any:
            with lock:
                # Delay only some calls. If all were late, their relative order could stay the same.
                before, after = (rng.random() * most * (rng.random() < 0.05) for _ in range(2))
                seen[name] += 1
            time.sleep(before)
            result = plain(*arguments, **named)
            time.sleep(after)
            return result

        return slow

    with contextlib.ExitStack() as patched:
        for name, (place, attribute) in _DELAYED.items():
            plain = getattr(place, attribute)
            patched.enter_context(mock.patch.object(place, attribute, around(name, plain)))
        yield seen


@contextlib.contextmanager
def host_apart(apart: bool = True) -> Iterator[None]:
    """Separate host memory from device memory in the block, as with a GPU, although both are CPU memory."""
    with spans.apart() if apart else contextlib.nullcontext():
        yield


def compare(run_: Run, offloads: dict[str, dict[str, Any]], apart: bool) -> dict[str, tuple[list[str], dict[str, int]]]:
    """Return, for each offload, the differences from training without offload and the number of calls while delayed.

    Args:
        run_: the run without offload.
        offloads: settings to add to the run, by name.
        apart: True to separate host memory from device memory, as with a GPU.
    """
    plain, found = run(run_), {}
    for number, (name, settings) in enumerate(offloads.items()):
        with delayed(number + dist.get_rank()) as seen, host_apart(apart):
            other = run(replace(run_, settings={**run_.settings, **settings}))
        found[name] = same(plain, other), seen
    return found
