"""ZeRO-Inference: partition a model that is not trained. Gathers, offload and codecs work; there are no gradients."""

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

__all__ = ["unfreeze", "wrap_for_inference"]

# Engine -> parameters that wrap_for_inference has frozen. The references are weak: a parameter may refer to its module,
# the module owns the engine, and then the engine would never be freed.
_frozen: weakref.WeakKeyDictionary[Core, list[weakref.ref[nn.Parameter]]] = weakref.WeakKeyDictionary()


class _NullListener(Listener):
    """Listener of an engine without an optimizer; ignores all calls of the engine."""

    accumulation_type = CalledWindows


def wrap_for_inference(model: nn.Module, config: Config, group: Group, device: torch.device | None) -> Core:
    """Partition a model for inference and freeze all its parameters. Collective.

    Args:
        model: model to partition in place, with rank 0's values.
        config: configuration. Only partitioning, ``offload_param``, ``bf16`` or ``fp16``, and quantization of weights
            have an effect.
        group: process group to partition over; None for all ranks.
        device: device to compute on; None for the model's device.

    Returns:
        The engine, which the model's modules own.

    Raises:
        ConfigError, TypeError, ValueError: configuration, model or group cannot be used. The parameters' requires_grad
            is restored.
    """
    if config.steps_on_host:
        # A notice and no error: scripts use one configuration for training and evaluation. transformers removes only
        # the optimizer block for evaluation. TRL reuses a stage 2 configuration with stage 0 for its reference model.
        notify_once("offload_optimizer has no effect: there is no optimizer, so nothing is stepped")
    zero = config.zero.model_copy(update={"offload_optimizer": None})
    config = config.model_copy(update={"zero_optimization": zero})
    require_supported(config)
    # Freeze all parameters. A trainable parameter would get fp32 main weights and a gradient buffer, which inference
    # never uses.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # If no parameter requires gradients, an earlier engine for inference may have frozen them; take over its list.
    frozen = trained or _frozen_before(model)
    model.requires_grad_(False)
    try:
        # The engine keeps only a weak reference to its listener, so this one is freed at once. An engine without a
        # listener lets the model be wrapped again, for training.
        plan = partial(plan_space, settings=config, states=lambda: 0)
        engine = build_engine(model, config, group, _NullListener(), None, device, lambda: ["inference"], plan)
    except BaseException:
        _unfreeze(trained)
        raise
    _frozen[engine] = [weakref.ref(parameter) for parameter in frozen]
    return engine


def _frozen_before(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that earlier engines of :func:`wrap_for_inference` have frozen in this model."""
    engines = {handler for handler in map(handler_of, model.parameters()) if isinstance(handler, Core)}
    return [parameter for engine in engines for ref in _frozen.get(engine, ()) if (parameter := ref()) is not None]


def unfreeze(engine: Core, model: nn.Module) -> None:
    """Unfreeze the parameters that :func:`wrap_for_inference` has frozen.

    If the user has made some parameters trainable since, nothing is changed. A notice is given if frozen parameters
    remain.

    Args:
        engine: engine of :func:`wrap_for_inference`; other engines have frozen nothing.
        model: its model.
    """
    frozen = [parameter for ref in _frozen.pop(engine, ()) if (parameter := ref()) is not None]
    # Trainable parameters at this point come from the user's code. peft, for example, freezes all parameters and adds
    # trainable ones.
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _unfreeze(frozen)
    elif not all(parameter.requires_grad for parameter in frozen):
        notify_once(
            "parameters that were frozen for inference stay frozen, since others have been made trainable meanwhile; "
            "call requires_grad_() on each parameter that is to be trained",
            first=engine.comm.rank == 0,
        )


def _unfreeze(parameters: list[nn.Parameter]) -> None:
    """Set requires_grad on parameters, without raising."""
    # This cleanup may run while another error is handled, and an error here would hide that one. A KeyError comes from
    # a model whose wrapping failed half-way.
    with contextlib.suppress(RuntimeError, KeyError):
        for parameter in parameters:
            parameter.requires_grad_(True)
