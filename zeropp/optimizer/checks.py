"""Checks of an optimizer before ``ZeroOptimizer`` wraps it, and substitutes for the wrapped optimizer's methods.

An optimizer can step slices of parameters only if its step is elementwise. torch's elementwise classes are accepted by
name, and some other classes are refused by name. All others are tested by trial steps of a :class:`Twin`.
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
    "is_elementwise",
    "plain_settings",
    "reason_for_whole",
    "refusal_of_early_unscale",
    "refusal_of_scaler",
    "refuse_inner_group",
    "refuse_inner_step",
    "refuse_unused",
    "trial_states",
    "weakly",
    "zero_grad_by",
]


_P = ParamSpec("_P")
_T = TypeVar("_T")


# Checks before wrapping.


def check_optimizer(optimizer: Optimizer, model: nn.Module, config: Config) -> None:
    """Raise if ``ZeroOptimizer`` cannot wrap this optimizer and model.

    Args:
        optimizer: plain torch optimizer over parameters of ``model``.
        model: model whose parameters the optimizer steps.
        config: loaded configuration.

    Raises:
        TypeError: ``optimizer`` is no torch optimizer, or ``model`` is no ``nn.Module``.
        ValueError: the optimizer is already wrapped, has a parameter that is not the model's, has a state or setting on
            the meta device, has states of one rank's slices, or cannot keep its states in the configured dtype.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    # Recognize a ZeroOptimizer by its attributes. Importing the class here would be circular.
    if hasattr(optimizer, "engine") and hasattr(optimizer, "inner"):
        raise ValueError("the optimizer is a ZeroOptimizer already; give it the plain torch optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            # Compare by identity, because two models of one class have parameters of the same names and shapes.
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
    """Raise if the user's factor on gradients is not a finite number.

    Args:
        gradient_scale: the argument of ``ZeroOptimizer``; None selects the configured mean or sum.

    Raises:
        TypeError: the factor is neither a number nor None.
        ValueError: the factor is infinite or NaN.
    """
    if gradient_scale is None:
        return
    # Refuse bool first: True is an int, and would pass as a factor of 1.
    if isinstance(gradient_scale, bool) or not isinstance(gradient_scale, (int, float)):
        raise TypeError(f"gradient_scale is {gradient_scale!r}; expected a number, or None for the configured mean")
    if not math.isfinite(gradient_scale):
        raise ValueError(f"gradient_scale is {gradient_scale}; expected a finite number")


def _check_states(optimizer: Optimizer, config: Config) -> None:
    """Raise if float16 states are configured for an optimizer that divides by second moments.

    Raises:
        ValueError: ``fp16_master_weights_and_grads`` is set and the optimizer has an ``eps``.
    """
    # Optimizers that divide by a second moment have an eps setting.
    if config.fp16.fp16_master_weights_and_grads and any("eps" in group for group in optimizer.param_groups):
        raise ValueError(
            f"fp16_master_weights_and_grads has {type(optimizer).__name__} keep its states in float16. It divides by "
            "second moments, and those of gradients below 0.008 would be 0 there. Leave the key out, use bf16 and "
            "bf16_master_weights_and_grads, or an optimizer without second moments, such as SGD"
        )


def _check_shapes(optimizer: Optimizer) -> None:
    """Raise if an elementwise state does not have its parameter's shape, because the state is of one rank's slice.

    Raises:
        ValueError: a state has another shape; the message says how to load the states of slices.
    """
    of_elements: set[str] | None = None
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or key == "step" or value.shape in ((), parameter.shape):
                    continue
                # Run the trial step only for a state of another shape. States that are not elementwise, such as a table
                # of codes, may have any shape.
                of_elements = _states_of_elements(optimizer) if of_elements is None else of_elements
                if key in of_elements:
                    raise ValueError(
                        f"the optimizer's state {key!r} of parameter {position} of group {index} has shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}. If it was saved by "
                        "ZeroOptimizer.state_dict(), it is of one rank's slices: wrap the optimizer without it, and "
                        "let each rank load its own by ZeroOptimizer.load_state_dict()"
                    )


def _states_of_elements(optimizer: Optimizer) -> set[str]:
    """Return the names of the states with one value per element, found by a trial step; empty if the step fails."""
    states = trial_states(optimizer, optimizer.param_groups[0], torch.float32)
    return {name for name, value in states.items() if value.shape == (_TRIED,)}


def describe_optimizer(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return lines that must be the same on every rank.

    The lines have the optimizer's class, and for each group its parameter names, its plain settings, and the names of
    the parameters that have states.

    Args:
        optimizer: optimizer that is to be wrapped.
        model: model that the optimizer's parameters belong to.
    """
    # Compare names, because parameters in another order would be cut into slices for other groups, and no later check
    # would notice.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = [f"optimizer {type(optimizer).__name__}"]
    for index, group in enumerate(optimizer.param_groups):
        lines.append(f"group {index} of {[names[id(p)] for p in group['params']]} with {plain_settings(group)}")
        # Ranks that step slices of one parameter, or replicas of one slice, must start from the same state.
        lines.append(f"states of {[names[id(p)] for p in group['params'] if optimizer.state.get(p)]}")
    return lines


def plain_settings(group: dict[str, Any]) -> dict[str, object]:
    """Return a parameter group's settings, without its parameters, in a form that ranks can compare."""
    return {key: _plain(value) for key, value in group.items() if key != "params"}


def _plain(value: object) -> object:
    """Return a setting in a comparable form: numbers, text, lists of both, or the name of any other type."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    # Objects of other types are compared by type name: their repr may contain an address, which differs between ranks.
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


# The check that an optimizer may step slices.

_TRIED = 64  # number of elements of the parameter that a trial step updates


_ELEMENTWISE = frozenset(
    {
        "Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD",
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
    """Raise if the optimizer's step on slices differs from its step on whole parameters.

    Known classes are decided by name. An unknown optimizer takes trial steps: steps on an 8 x 8 matrix must equal steps
    on the two halves of its elements, each a vector of 32, bit for bit.

    Args:
        optimizer: optimizer that is to be wrapped; it is not changed.

    Raises:
        TypeError: the optimizer is not elementwise, or its trial step failed; the message gives the reason.
    """
    if reason := reason_for_whole(type(optimizer)):
        raise TypeError(
            f"{type(optimizer).__name__} {reason}, and zeropp gives optimizers slices of "
            "parameters; not in this version. Use an elementwise optimizer: AdamW, Adam, SGD, Lion, RMSprop"
        )
    if is_elementwise(optimizer):
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
    """Return a clause that says why a known class cannot step slices; an empty string for all other classes.

    Args:
        kind: class of the optimizer.
    """
    # Subclasses of these classes also work on whole matrices, so look through all base classes.
    return next((_WHOLE_MATRIX[cls.__name__] for cls in kind.__mro__ if cls.__name__ in _WHOLE_MATRIX), "")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if this is a known elementwise optimizer of torch.optim, which steps each parameter by itself."""
    return type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")


def _steps_alike(optimizer: Optimizer) -> bool:
    # A fixed seed gives every rank the same numbers, so all ranks accept the optimizer or all refuse it.
    generator = torch.Generator().manual_seed(20)
    values, gradient = torch.randn(2, 64, generator=generator, device="cpu").unbind()
    # Make one half much larger, so that scaling by a norm shows in the result.
    gradient[32:] *= 100
    # Use a matrix as the whole parameter, because some optimizers treat vectors elementwise but matrices as a whole.
    whole = _trial(optimizer, [values.view(8, 8)], [gradient.view(8, 8)])
    halves = _trial(optimizer, list(values.chunk(2)), list(gradient.chunk(2)))
    return torch.equal(whole, halves)


def _trial(optimizer: Optimizer, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Take two steps of a twin with the first group's settings, and return the new values as one vector."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    settings = dict(optimizer.param_groups[0])
    if not float(settings.get("lr", 1.0)):
        # With a learning rate of 0, as at the start of a warm-up, no step would change anything.
        settings["lr"] = 1e-3
    twin = Twin(optimizer, settings, parameters)
    # Take two steps, because momentum has an effect from the second step on.
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def count_states(optimizer: Optimizer) -> int:
    """Return the number of float32 states with one value per element that the optimizer keeps.

    The states are counted after a trial step. The count is 0 if the optimizer cannot step a small vector on the CPU, so
    a memory estimate by this count may be too low but never too high.
    """
    states = trial_states(optimizer, optimizer.param_groups[0], torch.float32).values()
    return sum(value.numel() == _TRIED and value.dtype == torch.float32 for value in states)


def trial_states(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that the optimizer creates as states of one parameter, by their keys.

    The parameter has 64 elements. The result is empty if the optimizer cannot step a small vector on the CPU.

    Args:
        optimizer: optimizer whose class takes the trial step; it is not changed.
        group: parameter group with the settings of the trial step.
        dtype: dtype of the trial parameter.
    """
    parameter = nn.Parameter(torch.zeros(_TRIED, dtype=dtype, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    # torch takes capturable steps on an accelerator only, and the trial parameter is on the CPU.
    twin = Twin(optimizer, {**group, **({"capturable": False} if "capturable" in group else {})}, [parameter])
    try:
        twin.step()
    except Exception:
        return {}
    return {key: value for key, value in twin.state[parameter].items() if isinstance(value, torch.Tensor)}


class Twin:
    """A shallow copy of an optimizer with own groups, states and hooks, to step other parameters.

    Args:
        optimizer: optimizer to copy.
        settings: settings of the copy's only parameter group; ``params`` in it is ignored.
        parameters: parameters of that group.

    Attributes:
        state: states of the copy, by parameter.
    """

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        # Copy __dict__ by hand: Optimizer.__getstate__ keeps three attributes, so copy.copy would drop those of a
        # subclass.
        self._copy = twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        for name in [name for name in twin.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]:
            # Give the twin empty hook dicts, since the user's hooks are for real steps. The originals are shared
            # objects, so they must not be cleared.
            twin.__dict__[name] = OrderedDict()
        settings = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
        twin.param_groups = [{**copy.deepcopy(settings), "params": parameters}]
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        twin.state = self.state
        switch = getattr(twin, "train", None)
        if callable(switch):
            # Schedule-free optimizers have two modes and can step in one only.
            switch()

    def step(self) -> None:
        """Step the twin's parameters with their current ``.grad``."""
        # Call the class's own step. torch's wrapper around it would run hooks that are registered for all optimizers,
        # and a scheduler may have replaced ``step`` on the object.
        kind = type(self._copy)
        getattr(kind.step, "__wrapped__", kind.step)(self._copy)


# Checks after wrapping, and substitutes for methods of the wrapped optimizer.


def refuse_unused(engine: Engine, stats: StepStats) -> None:
    """Raise if a trained parameter had no gradient on any rank.

    Args:
        engine: engine of the model.
        stats: statistics of the step, with the used mask of every unit.

    Raises:
        UnusedParameterError: some trained parameters are unused; the message names them and is the same on every rank.
    """
    unused = [
        name
        for unit in engine.units
        for name, trained, used in zip(
            # Unit.trained and stats.used list parameters buffer by buffer, so the names must be in that order, too.
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
    """Error for trained parameters without a gradient on any rank. DeepSpeed raises an AssertionError in this case."""


def refusal_of_scaler(window: GradAccumulation) -> RuntimeError:
    """Return the error for a ``GradScaler.step()`` while some gradients are not shown in the groups yet.

    Args:
        window: counter of micro-batches, for the numbers in the message.
    """
    return RuntimeError(
        f"GradScaler.step() was called after {window.count} of gradient_accumulation_steps {window.steps} "
        "micro-batches, or after a backward inside no_sync(): some gradients wait for further ones, and GradScaler "
        "would not see them. Call unscale_(), step() and update() after the last backward of a whole window, and run "
        "that outside of no_sync(). Where windows differ in length, leave gradient_accumulation_steps out of the "
        "configuration, divide losses yourself and call step() where a window ends"
    )


def refusal_of_early_unscale() -> RuntimeError:
    """Return the error for a ``GradScaler.step()`` whose ``unscale_()`` may have come before the last backward."""
    return RuntimeError(
        "GradScaler.step() was called after unscale_(), and optimizer.param_groups was read before the last backward, "
        "as unscale_() does: if it was unscale_(), later gradients are still multiplied by the scale. Call unscale_() "
        "once, after the last backward of a step; read learning rates between the backwards of a step from "
        "optimizer.inner.param_groups"
    )


def zero_grad_by(optimizer: Optimizer, wrapper: Callable[[bool], bool | None]) -> Callable[..., None]:
    """Return a substitute for the wrapped optimizer's ``zero_grad``.

    The optimizer's own method would not clear gradients that the engine holds for a later reduction.

    Args:
        optimizer: the wrapped optimizer.
        wrapper: function that calls ``ZeroOptimizer.zero_grad`` with ``set_to_none``. It returns True if gradients were
            cleared, False if the call does nothing now, and None if the ZeroOptimizer is closed or garbage-collected.
    """
    # Refer to the optimizer weakly, because this function is stored in the optimizer's __dict__.
    ref = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        done = wrapper(set_to_none)
        target = ref()
        # Also run a zero_grad that the optimizer's class overrides: it may do more than clear gradients.
        if target is not None and (done is None or (done and type(target).zero_grad is not Optimizer.zero_grad)):
            type(target).zero_grad(target, set_to_none)

    return zero_grad


def weakly(method: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Return a function that calls a bound method, or returns None if the method's object is garbage-collected.

    The function holds the object weakly, so its owner (for example the engine) does not keep the object alive.

    Args:
        method: bound method to call.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        target = ref()
        return None if target is None else target(*args, **kwargs)

    return call


def refuse_inner_step(*args: object, **kwargs: object) -> None:
    """Raise in place of the wrapped optimizer's ``step``, because cached weights would not be renewed after it."""
    raise RuntimeError(
        "this optimizer is wrapped by a ZeroOptimizer; call step() on that one, or the new weights would never be "
        "gathered. If that one was closed or destroyed, make a new optimizer: this one has slices, not parameters"
    )


# Schedulers look for this mark on step(). Without it they warn that step() was replaced after they were created.
refuse_inner_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def refuse_inner_group(*args: object, **kwargs: object) -> None:
    """Raise in place of the wrapped optimizer's ``add_param_group``: the parameters would not become slices."""
    raise RuntimeError("this optimizer is wrapped by a ZeroOptimizer; call add_param_group() on that, on every rank")
