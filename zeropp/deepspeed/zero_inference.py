"""Inference with a partitioned model: gathers, offload and codecs, and nothing that trains (ZeRO-Inference)."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial

import torch
from torch import nn

from zeropp.comm.process_groups import Group
from zeropp.config import Config, require_supported
from zeropp.config.base import notify_once
from zeropp.deepspeed.training_optimizer import CalledWindows
from zeropp.engine.accumulation import Listener
from zeropp.engine.engine import Engine as Core
from zeropp.params.guard import handler_of
from zeropp.plan.memory import plan_space
from zeropp.setup.build import build_engine

__all__ = ["thaw", "wrap_for_inference"]

# Parameters that an engine has frozen for its time. Weakly: one that knew its module would keep the engine for good.
_frozen: weakref.WeakKeyDictionary[Core, list[weakref.ref[nn.Parameter]]] = weakref.WeakKeyDictionary()


class _Nobody(Listener):
    """Listens to an engine whose gradients nobody steps."""

    accumulation_type = CalledWindows


def wrap_for_inference(model: nn.Module, config: Config, group: Group, device: torch.device | None) -> Core:
    """Partition a model that is not going to be trained; all its parameters are frozen. Collective.

    Args:
        model: to partition in place; rank 0's values become everyone's.
        config: of which partitioning, ``offload_param``, ``bf16`` or ``fp16``, and what encodes weights have an effect.
        group: ranks to partition over; None for all.
        device: to compute on; None for the model's.

    Raises:
        ConfigError, TypeError, ValueError: configuration, model or group cannot be used.
    """
    if config.steps_on_host:
        # Scripts that train and evaluate have one file for both, from which transformers takes the optimizer alone, and
        # TRL's reference models have the file of stage 2 with the stage set to 0.
        notify_once("offload_optimizer has no effect: there is no optimizer, so nothing is stepped")
    zero = config.zero.model_copy(update={"offload_optimizer": None})
    config = config.model_copy(update={"zero_optimization": zero})
    require_supported(config)
    # Trained ones would have main weights in float32, gradients, and room for both, which nobody uses.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Of another engine for inference before this one, where nobody has chosen since.
    frozen = trained or _frozen_before(model)
    model.requires_grad_(False)
    try:
        # The engine keeps its listener weakly: gone at once, so that the model can be wrapped again, to be trained.
        plan = partial(plan_space, settings=config, states=lambda: 0)
        engine = build_engine(model, config, group, _Nobody(), None, device, lambda: ["inference"], plan)
    except BaseException:
        _unfreeze(trained)
        raise
    _frozen[engine] = [weakref.ref(parameter) for parameter in frozen]
    return engine


def _frozen_before(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that engines which have evaluated the model have frozen."""
    engines = {handler for handler in map(handler_of, model.parameters()) if isinstance(handler, Core)}
    return [parameter for engine in engines for ref in _frozen.get(engine, ()) if (parameter := ref()) is not None]


def thaw(engine: Core, model: nn.Module) -> None:
    """Let what :func:`wrap_for_inference` has frozen be trainable again, unless somebody has chosen what is."""
    frozen = [parameter for ref in _frozen.pop(engine, ()) if (parameter := ref()) is not None]
    # As peft does, which freezes all and adds what is trained.
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _unfreeze(frozen)
    elif not all(parameter.requires_grad for parameter in frozen):
        notify_once(
            "parameters that were frozen to evaluate stay so, since others have been made trainable meanwhile; call "
            "requires_grad_() of what is to be trained, too",
            first=engine.comm.rank == 0,
        )


def _unfreeze(parameters: list[nn.Parameter]) -> None:
    # Cleaning up, after an error perhaps, which another one would hide. A KeyError is of a wrap that failed half-way.
    with contextlib.suppress(RuntimeError, KeyError):
        for parameter in parameters:
            parameter.requires_grad_(True)
