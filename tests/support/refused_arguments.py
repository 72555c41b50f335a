"""Errors that ZeroOptimizer raises for unusable arguments, on every rank, and the seconds until they arrive.

A case is a function that each rank runs. The case receives a fresh model and returns the arguments for
``ZeroOptimizer``. Each call to the pool runs one case. The pool's processes are reused, so each case also shows that
earlier refusals left no state behind.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.branching_models import Routed, make_config

__all__ = ["SECONDS", "Args", "Case", "attempt", "check", "plain", "sgd"]

SECONDS = 8.0  # each refusal takes milliseconds; the rest is room for a busy machine


@dataclass(frozen=True)
class Args:
    optimizer: object
    model: object
    config: object = None
    group: object = None
    scale: object = None


Case = Callable[[nn.Module, int], Args]


def sgd(model: nn.Module, **settings: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def plain(model: nn.Module, **settings: object) -> Args:
    return Args(sgd(model), model, make_config(**settings))


def attempt(case: Case) -> tuple[str, str, float]:
    """Return the type names, the message and the seconds of the error that ``ZeroOptimizer`` raises.

    The type names are those of the whole class hierarchy, joined by "|". The result is "nothing" if no error is raised,
    and "damage" if the refused call has left a parameter with another class.
    """
    model = Routed()
    before = {name: (p.shape, type(p)) for name, p in model.named_parameters()}
    args = case(model, dist.get_rank())
    dist.barrier()
    start = time.monotonic()
    try:
        zeropp.ZeroOptimizer(
            args.optimizer, args.model, args.config, process_group=args.group, gradient_scale=args.scale
        )
    except Exception as error:
        names = "|".join(cls.__name__ for cls in type(error).__mro__)
        result = (names, " ".join(str(error).split()), time.monotonic() - start)
    else:
        return "nothing", "", time.monotonic() - start
    for name, parameter in model.named_parameters():
        if name in before and type(parameter) is not before[name][1] and not hasattr(model, "held"):
            return "damage", f"{name} is a {type(parameter).__name__} after the refusal", 0.0
    return result


def check(results: list[tuple[str, str, float]], kinds: str, pattern: str) -> None:
    for rank, (names, message, seconds) in enumerate(results):
        assert set(kinds.split("|")) & set(names.split("|")), f"rank {rank}: {names}: {message}"
        assert re.search(pattern, message), f"rank {rank}: {message}"
        assert seconds < SECONDS, f"rank {rank} took {seconds:.1f} s"
