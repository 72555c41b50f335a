"""The check that an optimizer treats every element alike, so that it may step slices of parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

__all__ = ["Twin", "check_elementwise", "count_states", "reason_for_whole", "treats_each_alone", "trial_states"]

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


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
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


def reason_for_whole(kind: type[torch.optim.Optimizer]) -> str:
    """A clause that says why a known class cannot step slices of parameters; empty for every other class."""
    # Classes that are derived from one of these work on whole matrices as well.
    return next((_WHOLE_MATRIX[cls.__name__] for cls in kind.__mro__ if cls.__name__ in _WHOLE_MATRIX), "")


def treats_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether this is one of torch's own whose step on some parameters does not depend on the others."""
    return type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")


def _steps_alike(optimizer: torch.optim.Optimizer) -> bool:
    # The same numbers on every rank: all accept the optimizer, or none.
    generator = torch.Generator().manual_seed(20)
    values, gradient = torch.randn(2, 64, generator=generator, device="cpu").unbind()
    # So that anything scaled by a norm shows.
    gradient[32:] *= 100
    # As a matrix: some optimizers treat vectors alike and matrices in their own way.
    whole = _trial(optimizer, [values.view(8, 8)], [gradient.view(8, 8)])
    halves = _trial(optimizer, list(values.chunk(2)), list(gradient.chunk(2)))
    return torch.equal(whole, halves)


def _trial(optimizer: torch.optim.Optimizer, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
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


def count_states(optimizer: torch.optim.Optimizer) -> int:
    """States of one value an element that an optimizer keeps, in the dtype of what it steps: those after a trial step.

    0 where it cannot step a small vector on the CPU: what is counted by it then is too low, and never too high.
    """
    states = trial_states(optimizer, optimizer.param_groups[0], torch.float32).values()
    return sum(value.numel() == _TRIED and value.dtype == torch.float32 for value in states)


def trial_states(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
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

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], parameters: list[nn.Parameter]
    ) -> None:
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
