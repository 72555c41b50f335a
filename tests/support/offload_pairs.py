"""Training with states off the device beside the same training without, on every rank, to the bit."""

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
from tests.support.branching_models import make_config
from tests.support.small_models import MODELS
from zeropp.offload import swap, tier_choice
from zeropp.offload.read_ahead import Arriving
from zeropp.offload.storage_tiers import HostMemory, MemoryTensor
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
    "copy to the device": (Arriving, "copy_to"),
    "new weights": (WireCopy, "take_new_weights"),
}


def _go_on(model: nn.Module, optimizer: zeropp.ZeroOptimizer, when: str) -> None:
    """Between two calls nothing happens."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        settings: of the configuration, as :func:`make_config` takes them.
        model: key of MODELS.
        accumulation: micro-batches in a step.
        how: "backward" (the window is configured), "no_sync", or "plain" (several backwards, each sends).
        scaled: torch's GradScaler scales losses.
        steps: to take.
        skipped: steps at which rank 0's loss is NaN.
        resumed: step before which everything is saved, made anew and loaded.
        saved: step after which a checkpoint is saved at once, to be compared with the weights of the other training.
        folder: for that.
        paused: called after each backward and each step, with the model, the optimizer, and "backward" or "step".
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
    """What a training comes to: losses and norms of each step, whole weights, this rank's states."""

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
    # Far from constant, and edited right after a step: what is stepped late must not see it.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if run.scaled else None
    return model, optimizer, scheduler, scaler


def _micro(run: Run, step: int, micro: int, rank: int) -> Any:
    return MODELS[run.model].batch(torch.Generator().manual_seed(1 + 1009 * step + 101 * micro + rank))


def run(run: Run) -> Outcome:
    """Train as it says."""
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
    """This rank's states, by name of the parameter and where its slice begins; slices side by side are one."""
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
    """What differs, by a bit or more."""
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
    """Steps, reads, writes and copies take some time longer, each another; yields how many of them there were."""
    rng, lock, seen = random.Random(seed), threading.Lock(), dict.fromkeys(_DELAYED, 0)

    def around(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **named: Any) -> Any:
            with lock:
                # Most at once and some late: what is always late might be in step again.
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
    """As on a machine with a card: the host's memory is no memory of the device, although both are the CPU's."""
    if not apart:
        yield
        return
    at_hand = property(lambda row: row.place == "host")
    with (
        mock.patch.object(tier_choice, "host_memory", lambda _: HostMemory()),
        mock.patch.object(MemoryTensor, "at_hand", at_hand),
    ):
        yield


def compare(run_: Run, offloads: dict[str, dict[str, Any]], apart: bool) -> dict[str, tuple[list[str], dict[str, int]]]:
    """For each offload: what differs from training without, and what was delayed meanwhile; on every rank.

    Args:
        run_: without offload.
        offloads: settings to add to it, by names.
        apart: the host's memory is no memory of the device, as on a GPU.
    """
    plain, found = run(run_), {}
    for number, (name, settings) in enumerate(offloads.items()):
        with delayed(number + dist.get_rank()) as seen, host_apart(apart):
            other = run(replace(run_, settings={**run_.settings, **settings}))
        found[name] = same(plain, other), seen
    return found
