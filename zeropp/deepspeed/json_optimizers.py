"""Optimizers and schedulers that the JSON names.

Two optimizers are not in torch: Lion, and Adam without bias correction. They treat every element by itself.
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
    """Refuse settings out of range; ``others`` are to be at least 0."""
    if min(others.values()) < 0 or not all(0 <= beta < 1 for beta in betas):
        given = ", ".join(f"{key} {value}" for key, value in others.items())
        *most, last = others
        raise ValueError(
            f"{name} got {given} and betas {betas}; expected {', '.join(most)} and {last} of at least 0, and betas "
            "from 0 to below 1"
        )


class Lion(Optimizer):
    """Steps each weight by the learning rate, up or down, by the sign of an average of gradients.

    Algorithm 2 of Chen et al., arXiv:2302.06675.

    Args:
        params: tensors, or groups.
        lr: of each step; a third to a tenth of AdamW's.
        betas: weights of the past in what is stepped by, and in what is kept.
        weight_decay: decoupled.

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
        """See :meth:`torch.optim.Optimizer.step`."""
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
                # In place and element by element, so that the halves of a slice step as the whole does.
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = torch.lerp(parameter.grad, average, stepping).sign_()
                parameter.add_(direction * -group["lr"])
                # After the step: the sign is of the older average and this gradient.
                average.lerp_(parameter.grad, 1 - keeping)
        return loss


class UncorrectedAdam(Optimizer):
    """Adam whose averages are taken as they are, without the correction for their start at zero.

    Algorithm 1 of Kingma and Ba, arXiv:1412.6980, with m and v in place of their corrected values, as DeepSpeed's Adam
    with ``bias_correction`` false and BERT's recipes. The first step is (1 - beta1) / sqrt(1 - beta2) times as long.

    Args:
        params: tensors, or groups.
        lr: of each step.
        betas: weights of the past in the averages of gradients and of their squares.
        eps: added to the root of the second average.
        weight_decay: share of the weights that is taken off.
        decoupled: take it off the weights, as AdamW does; otherwise it is added to gradients.

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
        """See :meth:`torch.optim.Optimizer.step`."""
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
                    # Not in place: the user may look at gradients after the step.
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                average, square = state["exp_avg"], state["exp_avg_sq"]
                average.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                parameter.addcdiv_(average, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss


# Arguments of DeepSpeed's own Adam, and what holds without them.
_FLAGS = {
    "adam_w_mode": True, "torch_adam": False, "bias_correction": True, "fp32_optimizer_states": True,
    "set_grad_none": True,
}  # fmt: skip
# Whose moments are of whole matrices or of messages that zeropp has its own way to make smaller.
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
# Of torch's schedulers, those whose arguments a JSON file can hold.
_TORCH_SCHEDULERS = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
# torch's step then changes weights under autograd, which refuses that for any parameter.
_FAILS = "differentiable"


def make_optimizer(block: OptimizerConfig, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
    """The optimizer that the ``optimizer`` block names, by torch's fused step where there is one.

    ``Adam`` is AdamW, as in DeepSpeed, unless ``adam_w_mode`` is false; both decay by 0 where ``weight_decay`` is not
    given, unless ``torch_adam`` asks for torch's own defaults. ``Lion`` is zeropp's, and so is either Adam with
    ``bias_correction`` false; other names are torch's.

    Args:
        block: a type and its arguments.
        params: tensors, or groups.

    Raises:
        ConfigError: no such optimizer, one that cannot step parts of parameters, or other arguments than it takes.
    """
    name = str(block.type)
    given = dict(block.params)
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
        raise ConfigError(_unknown_type("scheduler", name, [*SCHEDULERS, *_TORCH_SCHEDULERS]))
    scheduler: LRScheduler = _call("scheduler", name, made, optimizer, dict(block.params))
    return scheduler


def _adam(name: str, given: dict[str, Any]) -> type[Optimizer]:
    """Adam or AdamW, with DeepSpeed's own arguments taken out of what is given."""
    flags = {**_FLAGS, **_fitted("optimizer", {key: given.pop(key) for key in _FLAGS if key in given}, _FLAGS)}
    decoupled = flags["adam_w_mode"] or name.lower() == "adamw"
    # Gradients are always forgotten, so set_grad_none has nothing to do.
    if not flags["fp32_optimizer_states"]:
        raise ConfigError(
            "optimizer.params.fp32_optimizer_states: false is not in zeropp, whose states have the type of the main "
            "weights; remove it, or set bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states for states "
            "in 16 bits"
        )
    # The fused Adam of DeepSpeed decays by 0 unless it is told to, torch's AdamW by a hundredth.
    if not flags["torch_adam"]:
        given.setdefault("weight_decay", 0.0)
    if flags["bias_correction"]:
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if flags["torch_adam"] or given.pop("amsgrad", False):
        raise ConfigError(
            "optimizer.params.bias_correction: false goes neither with torch_adam nor with amsgrad; set one of them"
        )
    given["decoupled"] = decoupled
    return UncorrectedAdam


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
        trained = [each.__name__ for each in classes.values() if not reason_for_whole(each)]
        raise ConfigError(_unknown_type("optimizer", name, sorted([*trained, "Lion"])))
    if why := reason_for_whole(found):
        raise ConfigError(
            f"optimizer.type {name!r} is not in zeropp: it {why}, and a rank steps slices of parameters; use AdamW"
        )
    return found


def _unknown_type(key: str, name: str, known: Sequence[str]) -> str:
    meant = meant_type(name)
    if meant not in known:
        small = {each.lower(): each for each in known}
        # The class alone: a path such as torch.optim is like no name.
        near = difflib.get_close_matches(name.rpartition(".")[2].lower(), small, n=1, cutoff=0.8)
        guess = f"did you mean {small[near[0]]!r}? Else " if near else ""
        return f"{key}.type {name!r} is unknown; {guess}set one of {', '.join(known)}"
    told = f'{key}.type {name!r} is unknown; set "{meant}"'
    if meant == "Adam":
        # The default of DeepSpeed's classes FusedAdam and DeepSpeedCPUAdam, too.
        told += " (weight decay is that of AdamW, as in DeepSpeed, unless optimizer.params.adam_w_mode is false)"
    return told


def _require_resolved(key: str, block: OptimizerConfig | SchedulerConfig) -> None:
    if block.type is None:
        raise ConfigError(f"{key}.type is missing; name one, or leave the {key} block out")
    if block.unresolved:
        raise ConfigError(
            f'{key}.params has "auto" for {", ".join(block.unresolved)}, which a trainer was to fill in; give values'
        )


def _call(key: str, name: str, made: Any, first: object, given: dict[str, Any]) -> Any:
    # Before the call, whose own words would name Python's frames and none of the file's keys.
    parameters = list(inspect.signature(made).parameters.values())[1:]
    accepted = {each.name for each in parameters}
    if unknown := sorted(set(given) - accepted):
        accepted.discard(_FAILS)
        # DeepSpeed's own arguments have been handled and removed before this.
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
    """The first sentence about an argument in the docstring of its class; empty where there is none."""
    text = inspect.getdoc(made) or ""
    found = re.search(rf"^ *{argument}\b[^:\n]*: (.+?)\.\s", text, re.MULTILINE | re.DOTALL)
    return f": {' '.join(found[1].split())}" if found else ""


def _takes_numbers_alone(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    # Annotations are strings in zeropp's own files, and types in some of torch's.
    named = kind.__name__ if isinstance(kind, type) else str(kind)
    return {"None", "int", "float", "PerGroup"}.issuperset(named.split(" | "))


def _hint(key: str, argument: str, accepted: set[str]) -> str:
    """A remedy for an argument of another name, unless this optimizer or scheduler takes no such thing."""
    path = (key, "params", argument)
    inside, _, target = place(path).rpartition(".")
    if inside == f"{key}.params" and target not in accepted:
        return ""
    near = difflib.get_close_matches(argument.lower(), {each.lower(): each for each in accepted}, n=1, cutoff=0.75)
    return meaning(path) or (f"did you mean {near[0]!r}?" if near else "")


def _fitted(
    key: str, given: Mapping[str, Any], defaults: Mapping[str, Any], numbers: Collection[str] = ()
) -> dict[str, Any]:
    """Arguments of the types that their defaults have; those in ``numbers`` must be numbers, also without one.

    Raises:
        ConfigError: some are of other types; with all of them.
    """
    fitted = dict(given)
    wrong = []
    for name, value in given.items():
        default = defaults.get(name)
        if isinstance(default, bool) and isinstance(value, str):
            # A string of any letters would be true.
            value = fitted[name] = {"true": True, "false": False}.get(value.lower(), value)
        # A scheduler takes a list of numbers, too: one for each parameter group.
        expected = _expected(value, default) or (
            "a number" if name in numbers and value is not None and not _is_number(value) else ""
        )
        if expected and not (key == "scheduler" and _is_numbers(value)):
            wrong.append(f"{key}.params.{name}: got {value_text(value)}; expected {expected}")
    if wrong:
        raise ConfigError(wrong)
    return fitted


def _expected(value: object, default: object) -> str:
    """The kind of value that an argument takes, by its default; empty where `value` is one, or where nothing tells."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) or value in (0, 1) else f"true or false (default {value_text(default)})"
    if isinstance(default, int | float):
        return "" if _is_number(value) else f"a number (default {default})"
    if isinstance(default, tuple) and not (_is_numbers(value) and len(value) == len(default)):
        return f"a list of {len(default)} numbers (default {value_text(default)})"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numbers(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(map(_is_number, value))
