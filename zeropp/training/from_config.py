"""Optimizers and schedulers that the JSON names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeropp.config import ConfigError
from zeropp.config.runtime import OptimizerConfig, SchedulerConfig
from zeropp.training.lion import Lion
from zeropp.training.schedulers import SCHEDULERS

__all__ = ["make_optimizer", "make_scheduler"]

# Whose moments are of whole matrices or of messages that zeropp has its own way to make smaller.
_REFUSED = {
    "lamb": "its steps need norms of whole parameters, and a rank has parts of them; use AdamW",
    "onebitlamb": "its steps need norms of whole parameters, and a rank has parts of them; use AdamW",
    "onebitadam": "use AdamW, and zero_quantized_gradients for fewer bytes",
    "zerooneadam": "use AdamW, and zero_quantized_gradients for fewer bytes",
    "muon": "its steps need whole matrices, and a rank has parts of them; use AdamW",
    "muadam": "make mup's optimizer in your code and pass it in",
    "muadamw": "make mup's optimizer in your code and pass it in",
    "musgd": "make mup's optimizer in your code and pass it in",
}


def make_optimizer(block: OptimizerConfig, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
    """The optimizer that the ``optimizer`` block names, by torch's fused step where there is one.

    ``Adam`` is AdamW, as in DeepSpeed, unless ``adam_w_mode`` is false; both decay by 0 where ``weight_decay`` is not
    given, unless ``torch_adam`` asks for torch's own defaults. ``Lion`` is zeropp's; other names are torch's.

    Args:
        block: a type and its arguments.
        params: tensors, or groups.

    Raises:
        ConfigError: no such optimizer, one that cannot step parts of parameters, or other arguments than it takes.
    """
    name, given = str(block.type), dict(block.params)
    _require_resolved("optimizer", block)
    if "max_grad_norm" in given:
        raise ConfigError('optimizer.params.max_grad_norm is not an argument of an optimizer; set "gradient_clipping"')
    if (why := _REFUSED.get(name.lower())) is not None:
        raise ConfigError(f"optimizer.type {name!r} is not in zeropp: {why}")
    made: type[Optimizer]
    # In DeepSpeed these are its own, in any letters; whatever else is named is torch's, in torch's.
    if name.lower() in ("adam", "adamw"):
        made = _adam(name, given)
    elif name.lower() == "lion":
        made = Lion
    else:
        made = _find(name)
    # torch chooses it by itself only where it thinks it safe, which on CPUs is never; one pass, and clipping for free.
    if "fused" in inspect.signature(made).parameters and not ({"fused", "foreach", "differentiable"} & set(given)):
        given["fused"] = True
    optimizer: Optimizer = _call("optimizer", name, made, params, given)
    return optimizer


def make_scheduler(block: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """The scheduler that the ``scheduler`` block names: one of DeepSpeed's five, or torch's.

    Args:
        block: a type and its arguments.
        optimizer: whose rates it sets.

    Raises:
        ConfigError: no such scheduler, or other arguments than it takes.
    """
    name = str(block.type)
    _require_resolved("scheduler", block)
    # DeepSpeed's names first: torch may come to have one of them with other arguments.
    made = SCHEDULERS.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not (inspect.isclass(made) and issubclass(made, LRScheduler)):
        raise ConfigError(
            f"scheduler.type {name!r} is none of {', '.join(SCHEDULERS)} or of torch.optim.lr_scheduler's classes"
        )
    scheduler: LRScheduler = _call("scheduler", name, made, optimizer, dict(block.params))
    return scheduler


def _adam(name: str, given: dict[str, Any]) -> type[Optimizer]:
    """Adam or AdamW, with DeepSpeed's own arguments taken out of what is given."""
    decoupled = given.pop("adam_w_mode", True) or name.lower() == "adamw"
    # The fused Adam of DeepSpeed decays by 0 unless it is told to, torch's AdamW by a hundredth.
    if not given.pop("torch_adam", False):
        given.setdefault("weight_decay", 0.0)
    if not given.pop("bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction false is not in zeropp; leave it out")
    if not given.pop("fp32_optimizer_states", True):
        raise ConfigError("optimizer.params.fp32_optimizer_states false is not in zeropp; leave it out")
    given.pop("set_grad_none", None)  # gradients are always forgotten
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _find(name: str) -> type[Optimizer]:
    """torch's optimizer of a name, in letters of either case."""
    # Not by getattr of the name as it is: files have "sgd" and "SGD".
    classes = {
        key.lower(): each
        for key, each in vars(torch.optim).items()
        if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
    }
    found = classes.get(name.lower())
    if found is None:
        raise ConfigError(
            f"optimizer.type {name!r} is neither Lion nor one of torch.optim's: "
            f"{', '.join(sorted(each.__name__ for each in classes.values()))}"
        )
    return found


def _require_resolved(key: str, block: OptimizerConfig | SchedulerConfig) -> None:
    if block.type is None:
        raise ConfigError(f"{key}.type is missing; name one, or leave the {key} block out")
    if block.unresolved:
        raise ConfigError(
            f'{key}.params has "auto" for {", ".join(block.unresolved)}, which a trainer was to fill in; give values'
        )


def _call(key: str, name: str, made: Any, first: object, given: dict[str, Any]) -> Any:
    # Before the call, whose own words would name Python's frames and none of the file's keys.
    accepted = set(inspect.signature(made).parameters)
    if unknown := set(given) - accepted:
        raise ConfigError(
            f"{key}.params has {sorted(unknown)}, which {name} does not take; it takes {sorted(accepted)}"
        )
    try:
        return made(first, **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.params of {name}: {error}") from error
