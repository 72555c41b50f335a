"""Optimizers and schedulers made from the ``optimizer`` and ``scheduler`` blocks of a JSON configuration.

This module defines two optimizers that torch lacks: Lion, and Adam without bias correction. Both are elementwise, so
each rank can step its own slices.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeropp.config import ConfigError
from zeropp.config.blocks import OptimizerConfig, SchedulerConfig
from zeropp.config.describe import value_text
from zeropp.config.foreign_keys import meaning, meant_type, place
from zeropp.deepspeed.schedulers import SCHEDULERS
from zeropp.optimizer.checks import reason_for_whole

__all__ = ["Lion", "UncorrectedAdam", "make_optimizer", "make_scheduler"]


def _check_numbers(name: str, betas: tuple[float, float], **others: float) -> None:
    """Raise ValueError unless ``betas`` are in [0, 1) and all ``others`` are at least 0.

    Args:
        name: optimizer's name, for the error.
        betas: decay rates of the averages.
        **others: further settings by name.
    """
    if min(others.values()) < 0 or not all(0 <= beta < 1 for beta in betas):
        given = ", ".join(f"{key} {value}" for key, value in others.items())
        *most, last = others
        raise ValueError(
            f"{name} got {given} and betas {betas}; expected {', '.join(most)} and {last} of at least 0, and betas "
            "from 0 to below 1"
        )


class Lion(Optimizer):
    """The Lion optimizer: Algorithm 2 of Chen et al., arXiv:2302.06675.

    With the gradient g, the average m and the weight w, a step is::

        w = w * (1 - lr * weight_decay)
        w = w - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    Args:
        params: tensors, or parameter groups.
        lr: learning rate; a third to a tenth of AdamW's is usual.
        betas: beta1 and beta2, each from 0 to below 1.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _check_numbers("Lion", betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, and return the loss of ``closure`` or None."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            stepping, keeping = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                # Only elementwise operations, so that stepping a parameter in slices gives the same result.
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = torch.lerp(parameter.grad, average, stepping).sign_()
                parameter.add_(direction * -group["lr"])
                # The average is updated last, because the step uses the average of earlier gradients.
                average.lerp_(parameter.grad, 1 - keeping)
        return loss


class UncorrectedAdam(Optimizer):
    """Adam without bias correction, as DeepSpeed's Adam with ``bias_correction`` false and in BERT's recipes.

    Algorithm 1 of Kingma and Ba, arXiv:1412.6980, but with m and v instead of their bias-corrected values. The first
    step is ``(1 - beta1) / sqrt(1 - beta2)`` times as long as Adam's.

    Args:
        params: tensors, or parameter groups.
        lr: learning rate.
        betas: decay rates of the averages of gradients and of squared gradients, each from 0 to below 1.
        eps: number added to the square root of v.
        weight_decay: weight decay.
        decoupled: True to decay the weights themselves, as AdamW does; False to add the decay to gradients, as Adam
            does.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        _check_numbers("Adam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, and return the loss of ``closure`` or None."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                if group["decoupled"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    # Not in place, because the user may read the gradients after the step.
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                average, square = state["exp_avg"], state["exp_avg_sq"]
                average.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                parameter.addcdiv_(average, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss


# Arguments that only DeepSpeed's own Adam takes, with their defaults.
_FLAGS = {
    "adam_w_mode": True, "torch_adam": False, "bias_correction": True, "fp32_optimizer_states": True,
    "set_grad_none": True,
}  # fmt: skip
# Optimizer names in lower case -> reason or remedy. zeropp refuses optimizers that need whole parameters, that compress
# gradients in their own way, or that only the user's code can make.
_REFUSED = {
    "lamb": "its steps need norms of whole parameters, and a rank has parts of them; use AdamW",
    "fusedlamb": "its steps need norms of whole parameters, and a rank has parts of them; use AdamW",
    "onebitlamb": "its steps need norms of whole parameters, and a rank has parts of them; use AdamW",
    "onebitadam": "use AdamW, and zero_optimization.zero_quantized_gradients for fewer bytes",
    "zerooneadam": "use AdamW, and zero_optimization.zero_quantized_gradients for fewer bytes",
    "muon": "its steps need whole matrices, and a rank has parts of them; use AdamW",
    "muadam": "make mup's optimizer in your code and pass it in",
    "muadamw": "make mup's optimizer in your code and pass it in",
    "musgd": "make mup's optimizer in your code and pass it in",
}
# torch schedulers whose arguments can be written in JSON, for error messages.
_TORCH_SCHEDULERS = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
# Argument of torch optimizers that is refused if true: the step would modify weights while autograd records, and
# autograd raises for an in-place change of a parameter.
_FAILS = "differentiable"


def make_optimizer(block: OptimizerConfig, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that the ``optimizer`` block describes, with torch's fused step if the class has one.

    As in DeepSpeed, ``Adam`` means AdamW unless ``adam_w_mode`` is false. The weight decay of both is 0 by default;
    with ``torch_adam`` true, torch's defaults hold. ``Lion`` is :class:`Lion`. Adam and AdamW with ``bias_correction``
    false are :class:`UncorrectedAdam`. All other names are torch's classes, in upper or lower case.

    Args:
        block: type and arguments of the optimizer.
        params: tensors, or parameter groups.

    Raises:
        ConfigError: the type is unknown, its step needs whole parameters, or it does not take the arguments.
    """
    name = str(block.type)
    given = dict(block.params)
    _require_resolved("optimizer", block)
    if "max_grad_norm" in given:
        raise ConfigError('optimizer.params.max_grad_norm is not an argument of an optimizer; set "gradient_clipping"')
    if (why := _REFUSED.get(name.lower())) is not None:
        raise ConfigError(f"optimizer.type {name!r} is not in zeropp: {why}")
    made: type[Optimizer]
    # Names are compared in lower case, because configurations have both "AdamW" and "adamw".
    if name.lower() in ("adam", "adamw"):
        made = _adam(name, given)
    elif name.lower() == "lion":
        made = Lion
    else:
        made = _find(name)
    # torch does not enable its fused step by itself. The fused step reads and writes each state once, and applies the
    # clipping factor in the same kernel.
    if "fused" in inspect.signature(made).parameters and not ({"fused", "foreach", "differentiable"} & set(given)):
        given["fused"] = True
    optimizer: Optimizer = _call("optimizer", name, made, params, given)
    return optimizer


def make_scheduler(block: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler that the ``scheduler`` block describes: one of DeepSpeed's five, or one of torch's.

    Args:
        block: type and arguments of the scheduler.
        optimizer: optimizer whose learning rates the scheduler sets.

    Raises:
        ConfigError: the type is unknown, or it does not take the arguments.
    """
    name = str(block.type)
    _require_resolved("scheduler", block)
    # DeepSpeed's names come first, because torch may add a scheduler of the same name with other arguments.
    made = SCHEDULERS.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not (inspect.isclass(made) and issubclass(made, LRScheduler)):
        raise ConfigError(_unknown_type("scheduler", name, [*SCHEDULERS, *_TORCH_SCHEDULERS]))
    scheduler: LRScheduler = _call("scheduler", name, made, optimizer, dict(block.params))
    return scheduler


def _adam(name: str, given: dict[str, Any]) -> type[Optimizer]:
    """Return the class for ``Adam`` or ``AdamW``, and turn DeepSpeed's own arguments into those of the class.

    Args:
        name: "Adam" or "AdamW", in upper or lower case.
        given: arguments of the optimizer; changed in place.
    """
    flags = {**_FLAGS, **_fitted("optimizer", {key: given.pop(key) for key in _FLAGS if key in given}, _FLAGS)}
    decoupled = flags["adam_w_mode"] or name.lower() == "adamw"
    # set_grad_none is ignored: zero_grad() always sets gradients to None.
    if not flags["fp32_optimizer_states"]:
        raise ConfigError(
            "optimizer.params.fp32_optimizer_states: false is not in zeropp, whose states have the type of the main "
            "weights; remove it, or set bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states for states "
            "in 16 bits"
        )
    # The default weight decay is 0 in DeepSpeed's fused Adam, and 0.01 in torch's AdamW.
    if not flags["torch_adam"]:
        given.setdefault("weight_decay", 0.0)
    if flags["bias_correction"]:
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if flags["torch_adam"] or given.pop("amsgrad", False):
        raise ConfigError(
            "optimizer.params.bias_correction: false goes neither with torch_adam nor with amsgrad; remove one of them"
        )
    given["decoupled"] = decoupled
    return UncorrectedAdam


def _find(name: str) -> type[Optimizer]:
    """Return torch's optimizer class of a given name, ignoring case; raise ConfigError if it cannot be used."""
    # getattr would need the exact spelling, and configurations have both "sgd" and "SGD".
    classes = {
        key.lower(): each
        for key, each in vars(torch.optim).items()
        if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
    }
    found = classes.get(name.lower())
    if found is None:
        trained = [each.__name__ for each in classes.values() if not reason_for_whole(each)]
        raise ConfigError(_unknown_type("optimizer", name, sorted([*trained, "Lion"])))
    if why := reason_for_whole(found):
        raise ConfigError(
            f"optimizer.type {name!r} is not in zeropp: it {why}, and a rank steps slices of parameters; use AdamW"
        )
    return found


def _unknown_type(key: str, name: str, known: Sequence[str]) -> str:
    """Return the error for an unknown type, with the most similar known name.

    Args:
        key: "optimizer" or "scheduler".
        name: type in the configuration.
        known: types that are supported.
    """
    meant = meant_type(name)
    if meant not in known:
        small = {each.lower(): each for each in known}
        # Compare the class name only: with a path such as "torch.optim." no name would be similar.
        near = difflib.get_close_matches(name.rpartition(".")[2].lower(), small, n=1, cutoff=0.8)
        guess = f"did you mean {small[near[0]]!r}? Else " if near else ""
        return f"{key}.type {name!r} is unknown; {guess}set one of {', '.join(known)}"
    told = f'{key}.type {name!r} is unknown; set "{meant}"'
    if meant == "Adam":
        # The user wrote one of DeepSpeed's classes, FusedAdam or DeepSpeedCPUAdam, which also decay as AdamW.
        told += " (weight decay is that of AdamW, as in DeepSpeed, unless optimizer.params.adam_w_mode is false)"
    return told


def _require_resolved(key: str, block: OptimizerConfig | SchedulerConfig) -> None:
    """Raise ConfigError if a block has no type, or if an argument still has the value "auto"."""
    if block.type is None:
        raise ConfigError(f"{key}.type is missing; name one, or leave the {key} block out")
    if block.unresolved:
        raise ConfigError(
            f'{key}.params has "auto" for {", ".join(block.unresolved)}, which a trainer was to fill in; give values'
        )


def _call(key: str, name: str, made: Any, first: object, given: dict[str, Any]) -> Any:
    """Return ``made(first, **given)`` after checking the arguments.

    Args:
        key: "optimizer" or "scheduler", for errors.
        name: type in the configuration, for errors.
        made: class to call.
        first: first argument of the class: parameters, or an optimizer.
        given: arguments from the configuration.

    Raises:
        ConfigError: arguments are unknown, missing, of wrong types or out of range.
    """
    # Checked before the call: Python's own error would not name the keys of the configuration.
    parameters = list(inspect.signature(made).parameters.values())[1:]
    accepted = {each.name for each in parameters}
    if unknown := sorted(set(given) - accepted):
        accepted.discard(_FAILS)
        # _adam has taken DeepSpeed's own arguments out of ``given``, but the error lists them as accepted.
        accepted |= {"adam_w_mode", "bias_correction", "torch_adam"} if name.lower() in ("adam", "adamw") else set()
        hints = [f"; {each}: {told}" for each in unknown if (told := _hint(key, each, accepted))]
        raise ConfigError(
            f"{key}.params has {unknown}, which {name} does not take; it takes {sorted(accepted)}{''.join(hints)}"
        )
    if given.get(_FAILS):
        raise ConfigError(
            f"{key}.params.{_FAILS}: true is not in zeropp, whose steps autograd does not record; remove it"
        )
    if missing := [each.name for each in parameters if each.default is each.empty and each.name not in given]:
        absent = [f"{key}.params.{each} is missing; set it for {name}{_described(made, each)}" for each in missing]
        raise ConfigError(absent)
    numbers = {each.name for each in parameters if _takes_numbers_alone(each)}
    fitted = _fitted(key, given, {each.name: each.default for each in parameters}, numbers)
    try:
        return made(first, **fitted)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.params of {name}: {error}") from error


def _described(made: Any, argument: str) -> str:
    """Return ": " and the first sentence about an argument in the class's docstring; empty if there is none."""
    text = inspect.getdoc(made) or ""
    found = re.search(rf"^ *{argument}\b[^:\n]*: (.+?)\.\s", text, re.MULTILINE | re.DOTALL)
    return f": {' '.join(found[1].split())}" if found else ""


def _takes_numbers_alone(parameter: inspect.Parameter) -> bool:
    """Return True if the annotation of a parameter allows only numbers, None, or one number per group."""
    kind = parameter.annotation
    # Annotations are strings in zeropp's files, because of ``from __future__ import annotations``, but types in some of
    # torch's files.
    named = kind.__name__ if isinstance(kind, type) else str(kind)
    return {"None", "int", "float", "PerGroup"}.issuperset(named.split(" | "))


def _hint(key: str, argument: str, accepted: set[str]) -> str:
    """Return a remedy for an unknown argument; empty if none is known.

    Args:
        key: "optimizer" or "scheduler".
        argument: unknown argument in the configuration.
        accepted: names of the arguments that the optimizer or scheduler takes.
    """
    path = (key, "params", argument)
    inside, _, target = place(path).rpartition(".")
    if inside == f"{key}.params" and target not in accepted:
        return ""
    near = difflib.get_close_matches(argument.lower(), {each.lower(): each for each in accepted}, n=1, cutoff=0.75)
    return meaning(path) or (f"did you mean {near[0]!r}?" if near else "")


def _fitted(
    key: str, given: Mapping[str, Any], defaults: Mapping[str, Any], numbers: Collection[str] = ()
) -> dict[str, Any]:
    """Return the given arguments after checking that each has the type of its default.

    The strings "true" and "false" become booleans, if the default is a boolean.

    Args:
        key: "optimizer" or "scheduler". A scheduler may get a list of numbers for any argument.
        given: arguments from the configuration.
        defaults: default of each argument that the class takes.
        numbers: names of arguments that must be numbers even though their default gives no type.

    Raises:
        ConfigError: arguments have wrong types; the error lists all of them.
    """
    fitted = dict(given)
    wrong = []
    for name, value in given.items():
        default = defaults.get(name)
        if isinstance(default, bool) and isinstance(value, str):
            # Without this conversion the string "false" would count as True.
            value = fitted[name] = {"true": True, "false": False}.get(value.lower(), value)
        # A scheduler's argument may be a list with one number for each parameter group.
        expected = _expected(value, default) or (
            "a number" if name in numbers and value is not None and not _is_number(value) else ""
        )
        if expected and not (key == "scheduler" and _is_numbers(value)):
            wrong.append(f"{key}.params.{name}: got {value_text(value)}; expected {expected}")
    if wrong:
        raise ConfigError(wrong)
    return fitted


def _expected(value: object, default: object) -> str:
    """Return a description of the expected type, taken from the default; empty if ``value`` has that type.

    The result is also empty if the default gives no type, such as None or a string.
    """
    if isinstance(default, bool):
        return "" if isinstance(value, bool) or value in (0, 1) else f"true or false (default {value_text(default)})"
    if isinstance(default, int | float):
        return "" if _is_number(value) else f"a number (default {default})"
    if isinstance(default, tuple) and not (_is_numbers(value) and len(value) == len(default)):
        return f"a list of {len(default)} numbers (default {value_text(default)})"
    return ""


def _is_number(value: object) -> bool:
    """Return True for an int or a float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numbers(value: object) -> TypeGuard[list[Any]]:
    """Return True for a list of numbers."""
    return isinstance(value, list) and all(map(_is_number, value))
