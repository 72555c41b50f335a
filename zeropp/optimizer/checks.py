"""Checks of an optimizer that is to be wrapped, and stand-ins for its methods afterwards."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from zeropp.config import Config
from zeropp.engine.engine import Engine
from zeropp.engine.window import Window
from zeropp.optimizer.elementwise import Twin
from zeropp.optimizer.step_sync import Verdict

__all__ = [
    "check_optimizer",
    "check_scale",
    "describe_optimizer",
    "not_for_torch_s_state_dict",
    "plain_settings",
    "refuse_inner_group",
    "refuse_inner_step",
    "refuse_scaler",
    "refuse_unused",
    "weakly",
    "zero_grad_by",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def not_for_torch_s_state_dict(optimizer: Optimizer) -> Optimizer:
    """The optimizer; unless asked for by torch's ``get_optimizer_state_dict``, which would find slices nameless.

    Raises:
        RuntimeError: so it is, with what to use.
    """
    # It asks for the state before anything else, and then fails with "KeyError: 0". The caller's caller: a property's.
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        raise RuntimeError(
            "torch's get_optimizer_state_dict and its kin know nothing of slices; zeropp.checkpoint.state(model, "
            "optimizer) has model and optimizer as they would give them, for torch.distributed.checkpoint"
        )
    return optimizer


def check_optimizer(optimizer: Optimizer, model: nn.Module, config: Config) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        TypeError: no optimizer, or no model.
        ValueError: foreign parameters, already wrapped, or not with this configuration.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    # By its attributes: the class cannot be imported here, since its module imports this one.
    if hasattr(optimizer, "engine") and hasattr(optimizer, "inner"):
        raise ValueError("the optimizer is a ZeroOptimizer already; give it the plain torch optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            # By identity: two models of one class have parameters of the same names and shapes.
            if id(parameter) not in own:
                raise ValueError(
                    f"parameter {position} of group {index}, shape {tuple(parameter.shape)}, does not belong to the "
                    "model; make the optimizer from model.parameters() of the very model that is wrapped. Make a new "
                    "one if this one was wrapped before: it has slices, which an earlier engine made"
                )
            state = optimizer.state.get(parameter, {})
            if any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values()):
                raise ValueError(
                    f"the optimizer's state of parameter {position} of group {index} is on the meta device and has no "
                    "values; load it after wrapping"
                )
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(f"{key} of group {index} is on the meta device and has no value; make it on the CPU")
    _check_states(optimizer, config)
    _check_shapes(optimizer)


def check_scale(gradient_scale: object) -> None:
    """Refuse a factor on gradients that is no number.

    Raises:
        TypeError, ValueError: with what was given.
    """
    if gradient_scale is None:
        return
    # True is an int, and would be taken for a factor of 1.
    if isinstance(gradient_scale, bool) or not isinstance(gradient_scale, (int, float)):
        raise TypeError(f"gradient_scale is {gradient_scale!r}; expected a number, or None for the configured mean")
    if not math.isfinite(gradient_scale):
        raise ValueError(f"gradient_scale is {gradient_scale}; expected a finite number")


def _check_states(optimizer: Optimizer, config: Config) -> None:
    """Refuse states in float16 of an optimizer that divides by them.

    Raises:
        ValueError: the configuration asks for them.
    """
    # Whoever divides by a moment has an eps beside it.
    if config.fp16.fp16_master_weights_and_grads and any("eps" in group for group in optimizer.param_groups):
        raise ValueError(
            f"fp16_master_weights_and_grads has {type(optimizer).__name__} keep its states in float16. It divides by "
            "second moments, and those of gradients below 0.008 would be 0 there. Leave the key out, use bf16 and "
            "bf16_master_weights_and_grads, or an optimizer without second moments, such as SGD"
        )


def _check_shapes(optimizer: Optimizer) -> None:
    """Refuse states of one value an element that have not the shape of their parameter: they are a rank's slices.

    Raises:
        ValueError: some are; with what to do.
    """
    of_elements: set[str] | None = None
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or key == "step" or value.shape in ((), parameter.shape):
                    continue
                # Asked only now, since it takes a trial step: a table of codes, say, may have any shape.
                of_elements = _states_of_elements(optimizer) if of_elements is None else of_elements
                if key in of_elements:
                    raise ValueError(
                        f"the optimizer's state {key!r} of parameter {position} of group {index} has shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}. If it was saved by "
                        "ZeroOptimizer.state_dict(), it is of one rank's slices: wrap the optimizer without it, and "
                        "let each rank load its own by ZeroOptimizer.load_state_dict()"
                    )


def _states_of_elements(optimizer: Optimizer) -> set[str]:
    """Names of states that have the shape of their parameter, by a trial step on a vector; none if it fails."""
    parameter = nn.Parameter(torch.zeros(64, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    # Steps that a graph replays are taken on a card only.
    settings = {key: False if key == "capturable" else value for key, value in optimizer.param_groups[0].items()}
    twin = Twin(optimizer, settings, [parameter])
    try:
        twin.step()
    except Exception:
        return set()
    return {k for k, v in twin.state[parameter].items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape}


def describe_optimizer(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Lines that must be the same on every rank: the class, and each group's parameters and plain settings."""
    # By name: parameters in another order would be cut for other groups, and nothing later would show it.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = [f"optimizer {type(optimizer).__name__}"]
    for index, group in enumerate(optimizer.param_groups):
        lines.append(f"group {index} of {[names[id(p)] for p in group['params']]} with {plain_settings(group)}")
        # A slice lies on several ranks, and all of them step it from the same state.
        lines.append(f"states of {[names[id(p)] for p in group['params'] if optimizer.state.get(p)]}")
    return lines


def plain_settings(group: dict[str, Any]) -> dict[str, object]:
    """A group's settings in a form that ranks can compare."""
    return {key: _plain(value) for key, value in group.items() if key != "params"}


def _plain(value: object) -> object:
    """A setting in a form that ranks can compare: numbers and text, in tensors and sequences too; else its type."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    # Other objects by their type: what repr says of them, an address perhaps, may differ between ranks.
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def zero_grad_by(optimizer: Optimizer, wrapper: Callable[[bool], bool | None]) -> Callable[..., None]:
    """Make a substitute for the wrapped optimizer's ``zero_grad``, which does not see gradients that are held.

    Args:
        optimizer: the wrapped one.
        wrapper: calls that of the ZeroOptimizer; False if that does nothing now, None if it is gone or closed.
    """
    # The optimizer holds this function in its __dict__: a strong reference would be a circle.
    ref = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        done, target = wrapper(set_to_none), ref()
        # A class may do more in a method of its own.
        if target is not None and (done is None or (done and type(target).zero_grad is not Optimizer.zero_grad)):
            type(target).zero_grad(target, set_to_none)

    return zero_grad


def weakly(method: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """The method, unless its object is gone: the engine must not keep its wrapper alive."""
    ref = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        target = ref()
        return None if target is None else target(*args, **kwargs)

    return call


def refuse_scaler(window: Window) -> None:
    """Refuse torch's GradScaler inside an unfinished window: it would unscale a part of the gradients, and then again.

    All that it does to an optimizer before ``step()`` is to look at ``param_groups``, so that is where it is met.

    Raises:
        RuntimeError: a GradScaler's method asked for the parameter groups.
    """
    # The frame that reads param_groups; between it and this one there is the property's.
    if isinstance(sys._getframe(2).f_locals.get("self"), torch.amp.GradScaler):
        raise RuntimeError(
            f"GradScaler.unscale_() or step() after {window.count} of gradient_accumulation_steps {window.steps} "
            "micro-batches, and the boundary of the window is where gradients are unscaled: call them, and update(), "
            'after its last backward, or set {"managed_gradient_accumulation": false} to step whenever you say so'
        )


def refuse_inner_step(*args: object, **kwargs: object) -> None:
    """Stand in for the wrapped optimizer's ``step``, which would change weights behind the engine's back."""
    raise RuntimeError(
        "this optimizer is wrapped by a ZeroOptimizer; call step() on that one, or the new weights would never be "
        "gathered. If that one was closed or destroyed, make a new optimizer: this one has slices, not parameters"
    )


def refuse_inner_group(*args: object, **kwargs: object) -> None:
    """Stand in for the wrapped optimizer's ``add_param_group``, whose parameters would never become slices."""
    raise RuntimeError("this optimizer is wrapped by a ZeroOptimizer; call add_param_group() on that, on every rank")


class UnusedParameterError(RuntimeError, AssertionError):
    """Trained parameters had no gradient anywhere; DeepSpeed raises an AssertionError then."""


def refuse_unused(engine: Engine, verdict: Verdict) -> None:
    """Refuse a step in which a trained parameter had no gradient anywhere.

    Raises:
        UnusedParameterError: with its name; the same on every rank.
    """
    unused = [
        name
        for unit in engine.units
        for name, trained, used in zip(
            # In the order of Unit.trained and of the verdict: buffer by buffer.
            (n for buffer in unit.trainable_buffers for n in buffer.names),
            unit.trained,
            verdict.used[unit.index],
            strict=True,
        )
        if trained and not used
    ]
    if unused:
        raise UnusedParameterError(
            f"{len(unused)} parameters had no gradient on any rank: {unused[:10]}{'...' if unused[10:] else ''}. "
            "Use them, freeze them with requires_grad_(False), or set "
            '{"zero_optimization": {"ignore_unused_parameters": true}}'
        )


# Schedulers on either optimizer look for this mark: without it they warn that step() was replaced behind them.
refuse_inner_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
