"""Checks of an optimizer that is to be wrapped, and stand-ins for its methods afterwards.

An optimizer may step slices of parameters if it treats every element alike: known classes are told by their names, and
others by trial steps of a :class:`Twin`.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from zeropp.config import Config
from zeropp.engine.accumulation import GradAccumulation
from zeropp.engine.engine import Engine
from zeropp.optimizer.step_sync import StepStats

__all__ = [
    "Twin",
    "check_elementwise",
    "check_optimizer",
    "check_scale",
    "count_states",
    "describe_optimizer",
    "plain_settings",
    "reason_for_whole",
    "refusal_of_early_unscale",
    "refusal_of_scaler",
    "refuse_inner_group",
    "refuse_inner_step",
    "refuse_unused",
    "treats_each_alone",
    "trial_states",
    "weakly",
    "zero_grad_by",
]


_P = ParamSpec("_P")
_T = TypeVar("_T")


# Checks before wrapping.


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
    states = trial_states(optimizer, optimizer.param_groups[0], torch.float32)
    return {name for name, value in states.items() if value.shape == (_TRIED,)}


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


# The check that an optimizer may step slices.

_TRIED = 64  # elements of the parameter of a trial step


_ELEMENTWISE = frozenset(
    {
        "Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Lion",
        "FusedAdam", "FusedLion", "CPUAdam",
    }
)  # fmt: skip


_WHOLE_MATRIX = {
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "factors second moments over rows and columns",
    "LAMB": "scales each layer by its weights' norm",
    "Lamb": "scales each layer by its weights' norm",
    "LARS": "scales each layer by its weights' norm",
    "Shampoo": "preconditions whole matrices",
    "DistributedShampoo": "preconditions whole matrices",
    "SOAP": "preconditions whole matrices",
    "GaLoreAdamW": "projects whole matrices",
    "LBFGS": "searches along one direction over all parameters",
    "SparseAdam": "needs sparse gradients",
}


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse optimizers whose step on slices differs from their step on whole parameters.

    Known names are decided by name. An unknown optimizer is tried out: steps on a matrix must equal, bit for bit,
    steps on two slices of it.

    Raises:
        TypeError: the optimizer needs whole matrices, or failed the trial; with the reason.
    """
    if reason := reason_for_whole(type(optimizer)):
        raise TypeError(
            f"{type(optimizer).__name__} {reason}, and zeropp gives optimizers slices of "
            "parameters; not in this version. Use an elementwise optimizer: AdamW, Adam, SGD, Lion, RMSprop"
        )
    if treats_each_alone(optimizer):
        return
    try:
        same = _steps_alike(optimizer)
    except Exception as error:
        raise TypeError(
            f"{type(optimizer).__name__} is unknown, and a trial step on a small vector failed with "
            f"{type(error).__name__}: {error}. zeropp can use optimizers that work elementwise on any parameters"
        ) from error
    if not same:
        raise TypeError(
            f"a trial step of {type(optimizer).__name__} on a matrix differs from its steps on two slices of it, so it "
            "is not elementwise, and zeropp gives optimizers slices of parameters. Use an elementwise optimizer"
        )


def reason_for_whole(kind: type[Optimizer]) -> str:
    """A clause that says why a known class cannot step slices of parameters; empty for every other class."""
    # Classes that are derived from one of these work on whole matrices as well.
    return next((_WHOLE_MATRIX[cls.__name__] for cls in kind.__mro__ if cls.__name__ in _WHOLE_MATRIX), "")


def treats_each_alone(optimizer: Optimizer) -> bool:
    """Tell whether this is one of torch's own whose step on some parameters does not depend on the others."""
    return type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")


def _steps_alike(optimizer: Optimizer) -> bool:
    # The same numbers on every rank: all accept the optimizer, or none.
    generator = torch.Generator().manual_seed(20)
    values, gradient = torch.randn(2, 64, generator=generator, device="cpu").unbind()
    # So that anything scaled by a norm shows.
    gradient[32:] *= 100
    # As a matrix: some optimizers treat vectors alike and matrices in their own way.
    whole = _trial(optimizer, [values.view(8, 8)], [gradient.view(8, 8)])
    halves = _trial(optimizer, list(values.chunk(2)), list(gradient.chunk(2)))
    return torch.equal(whole, halves)


def _trial(optimizer: Optimizer, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Two steps of a twin of the optimizer, with its first group's settings."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    settings = dict(optimizer.param_groups[0])
    if not float(settings.get("lr", 1.0)):
        # A warm-up that starts at 0 would hide everything.
        settings["lr"] = 1e-3
    twin = Twin(optimizer, settings, parameters)
    # Momentum and the like show from the second step on.
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def count_states(optimizer: Optimizer) -> int:
    """States of one value an element that an optimizer keeps, in the dtype of what it steps: those after a trial step.

    0 where it cannot step a small vector on the CPU: what is counted by it then is too low, and never too high.
    """
    states = trial_states(optimizer, optimizer.param_groups[0], torch.float32).values()
    return sum(value.numel() == _TRIED and value.dtype == torch.float32 for value in states)


def trial_states(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors that an optimizer makes as states of one parameter; none if it cannot step a small vector on the CPU.

    Args:
        optimizer: stays as it is.
        group: with the settings to step by.
        dtype: of the parameter.
    """
    parameter = nn.Parameter(torch.zeros(_TRIED, dtype=dtype, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    # Steps that a graph replays are taken on a card only.
    twin = Twin(optimizer, {**group, **({"capturable": False} if "capturable" in group else {})}, [parameter])
    try:
        twin.step()
    except Exception:
        return {}
    return {key: value for key, value in twin.state[parameter].items() if isinstance(value, torch.Tensor)}


class Twin:
    """A copy of an optimizer without states, for steps on other parameters that leave it as it is.

    Args:
        optimizer: to copy.
        settings: of the one group that the copy has; parameters in it are left out.
        parameters: of that group.

    Attributes:
        state: of the copy.
    """

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        # copy.copy would leave out attributes that torch does not know: Optimizer pickles three of them.
        self._copy = twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        for name in [name for name in twin.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]:
            # The user's hooks are for real steps. Shared dicts: new ones for the twin, and the user's stay as they are.
            twin.__dict__[name] = OrderedDict()
        settings = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
        twin.param_groups = [{**copy.deepcopy(settings), "params": parameters}]
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        twin.state = self.state
        switch = getattr(twin, "train", None)
        if callable(switch):
            # Schedule-free optimizers have two modes, and step in one.
            switch()

    def step(self) -> None:
        """Step on the gradients that the parameters have."""
        # Past torch's wrapper, which runs hooks that are registered for all optimizers; and past what a scheduler has
        # put into the object.
        kind = type(self._copy)
        getattr(kind.step, "__wrapped__", kind.step)(self._copy)


# Checks, and stand-ins for methods, after wrapping.


def refuse_unused(engine: Engine, stats: StepStats) -> None:
    """Refuse a step in which a trained parameter had no gradient anywhere.

    Raises:
        UnusedParameterError: with its name; the same on every rank.
    """
    unused = [
        name
        for unit in engine.units
        for name, trained, used in zip(
            # In the order of Unit.trained and of the step's statistics: buffer by buffer.
            (n for buffer in unit.trainable_buffers for n in buffer.names),
            unit.trained,
            stats.used[unit.index],
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


class UnusedParameterError(RuntimeError, AssertionError):
    """Trained parameters had no gradient anywhere; DeepSpeed raises an AssertionError then."""


def refusal_of_scaler(window: GradAccumulation) -> RuntimeError:
    """The error of a ``GradScaler.step()`` before all gradients are shown on every rank."""
    return RuntimeError(
        f"GradScaler.step() was called after {window.count} of gradient_accumulation_steps {window.steps} "
        "micro-batches, or after a backward inside no_sync(): some gradients wait for further ones, and GradScaler "
        "would not see them. Call unscale_(), step() and update() after the last backward of a whole window, and run "
        "that outside of no_sync(). Where windows differ in length, leave gradient_accumulation_steps out of the "
        "configuration, divide losses yourself and call step() where a window ends"
    )


def refusal_of_early_unscale() -> RuntimeError:
    """The error of a ``GradScaler.step()`` after ``unscale_()``, where that may have been called too early."""
    return RuntimeError(
        "GradScaler.step() was called after unscale_(), and optimizer.param_groups was read before the last backward, "
        "as unscale_() does: if it was unscale_(), later gradients are still multiplied by the scale. Call unscale_() "
        "once, after the last backward of a step; read learning rates between the backwards of a step from "
        "optimizer.inner.param_groups"
    )


def zero_grad_by(optimizer: Optimizer, wrapper: Callable[[bool], bool | None]) -> Callable[..., None]:
    """Make a substitute for the wrapped optimizer's ``zero_grad``, which does not see gradients that are held.

    Args:
        optimizer: the wrapped one.
        wrapper: calls that of the ZeroOptimizer; False if that does nothing now, None if it is gone or closed.
    """
    # The optimizer holds this function in its __dict__: a strong reference would be a circle.
    ref = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        done = wrapper(set_to_none)
        target = ref()
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


def refuse_inner_step(*args: object, **kwargs: object) -> None:
    """Stand in for the wrapped optimizer's ``step``, which would change weights behind the engine's back."""
    raise RuntimeError(
        "this optimizer is wrapped by a ZeroOptimizer; call step() on that one, or the new weights would never be "
        "gathered. If that one was closed or destroyed, make a new optimizer: this one has slices, not parameters"
    )


# Schedulers on either optimizer look for this mark: without it they warn that step() was replaced behind them.
refuse_inner_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def refuse_inner_group(*args: object, **kwargs: object) -> None:
    """Stand in for the wrapped optimizer's ``add_param_group``, whose parameters would never become slices."""
    raise RuntimeError("this optimizer is wrapped by a ZeroOptimizer; call add_param_group() on that, on every rank")
