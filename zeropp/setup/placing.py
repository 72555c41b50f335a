"""The move of a model's values to the device when it is wrapped.

Ranks beside the first need no values of their own: their parameters and buffers may be on the meta device, if the
device they are to train on is named. The first rank's may be on the CPU; a unit comes to the device when it is cut.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zeropp.engine.hooks import tensors_in
from zeropp.params.guard import is_managed, set_class
from zeropp.params.sharded_build import is_whole

__all__ = ["find_device", "give_memory", "place", "require_values", "without_weak_weights"]


def find_device(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device | str | int | None
) -> torch.device:
    """The device to train on: the one that is given, or else the one that all parameters are on. Local.

    Args:
        model: to be wrapped.
        parameters: all of its, by name.
        device: as given.

    Raises:
        ValueError: there is no such device, or none is given and parameters are on several, or on none.
    """
    chosen = None if device is None else _existing(device)
    found: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        found.setdefault(parameter.device, name)
    if not found:
        raise ValueError("the model has no parameters; there is nothing to partition")
    if chosen is not None:
        _check_replaceable(model)
        return chosen
    for kind, name in _on_meta(model, parameters):
        raise ValueError(
            f"{kind} {name!r} is on the meta device and has no values. Say where the model trains, "
            "ZeroOptimizer(..., device=...): rank 0's values then become everyone's, and the other ranks need none. Or "
            "call zeropp.zero.materialize(model), and load it after wrapping"
        )
    if len(found) > 1:
        raise ValueError(
            f"parameters lie on several devices {found}; move the model to one device before wrapping, or say which "
            "one it trains on: ZeroOptimizer(..., device=...)"
        )
    return next(iter(found))


def require_values(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """On the rank whose values become everyone's.

    Args:
        model: to be wrapped.
        parameters: all of its, by name.

    Raises:
        ValueError: it has none.
    """
    awaited = {name for name, parameter in parameters.items() if not is_whole(parameter)}
    for kind, name in _on_meta(model, parameters):
        if kind == "parameter" and name in awaited:
            continue
        raise ValueError(
            f"{kind} {name!r} of the first rank is on the meta device; its values become everyone's, so it needs them: "
            "build the model on the CPU there, and on the meta device on the other ranks alone; or call "
            "zeropp.zero.materialize(model) on every rank, and load it after wrapping"
        )


def place(model: nn.Module, device: torch.device) -> None:
    """Bring what is not cut into shards to the device, and what is cut there as far as it has no values.

    Parameters and buffers stay the objects they are. Those without values get memory that holds anything; parameters
    that are cut, and get their values then, get none.

    Args:
        model: checked by :func:`find_device`.
        device: to train on.
    """
    with torch.no_grad(), without_weak_weights(model):
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                _move(parameter, device)
            elif parameter.is_meta:
                # The strides are looked at before it is cut, and empty_like has others where elements overlap.
                shape = parameter.shape
                strides = parameter.stride()
                _swap(parameter, torch.empty_strided(shape, strides, dtype=parameter.dtype, device=device))
                parameter.untyped_storage().resize_(0)
        for buffer in model.buffers():
            _move(buffer, device)


def _existing(device: torch.device | str | int) -> torch.device:
    try:
        # Of a tensor: "cuda" alone means the current one, which has a number.
        found = torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"device is {device!r}, which is no device here ({str(error).splitlines()[0]}); give one such as "
            'torch.device("cuda", local_rank), or "cpu"'
        ) from None
    if found.type == "meta":
        raise ValueError('device is "meta", where nothing can be trained; give the one that the model trains on')
    return found


def _on_meta(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Kind and name of each tensor without values."""
    for name, parameter in parameters.items():
        if parameter.is_meta:
            yield "parameter", name
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            yield "buffer", name


def _check_replaceable(model: nn.Module) -> None:
    """That what is on the meta device can be given values, and what is elsewhere can be moved."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for tensor in tensors_in(value):
                if tensor.is_meta and id(tensor) not in registered:
                    _refuse_lost(path, name, tensor)
    with without_weak_weights(model):
        for name, parameter in model.named_parameters():
            _check_parameter(name, parameter)


def _refuse_lost(path: str, name: str, tensor: Tensor) -> None:
    if tensor.grad_fn is not None:
        raise ValueError(
            f"module {path!r} keeps {name!r}, computed from parameters on the meta device, and it would never have "
            "values; compute it in forward, as torch.nn.utils.parametrizations does, or build this model on the CPU on "
            "every rank"
        )
    raise ValueError(
        f"module {path!r} keeps a tensor in {name!r} on the meta device that is no buffer, so no values reach it; "
        "register it: register_buffer(name, tensor, persistent=False)"
    )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_managed(parameter):
        return  # wrapped before: it is where it trains
    if parameter.grad is not None:
        raise ValueError(
            f"parameter {name!r} has a gradient, which would stay where the parameter was; call zero_grad() before "
            "wrapping with a device"
        )
    # torch gives a tensor another device by exchanging it, which weak references and hooks would not follow.
    if parameter.is_meta and weakref.getweakrefcount(parameter):
        raise ValueError(
            f"parameter {name!r} is on the meta device, and something refers to it weakly, such as an average or "
            "a cache keyed by tensors; make that after wrapping"
        )
    if parameter.is_meta and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        raise ValueError(
            f"parameter {name!r} is on the meta device and has hooks, which would be lost; register them after wrapping"
        )


@contextlib.contextmanager
def without_weak_weights(model: nn.Module) -> Iterator[None]:
    """While torch's recurrent layers do not refer to their weights weakly, which they do to notice new ones."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._flat_weight_refs = [None if w is None else weakref.ref(w) for w in layer._flat_weights]


def give_memory(tensor: Tensor, device: torch.device) -> None:
    """Let a tensor on the meta device be one of the same shape that holds anything."""
    _swap(tensor, torch.empty_like(tensor, device=device))


def _move(tensor: Tensor, device: torch.device) -> None:
    """To the device, in place; without values, if it has none yet."""
    if tensor.is_meta:
        give_memory(tensor, device)
    elif tensor.device != device and not is_managed(tensor):
        # Through .data the object stays: modules may share it.
        tensor.data = tensor.data.to(device)


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Let a tensor be another one, and stay the object it is: modules, ties and the optimizer know it."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    # torch exchanges class and attributes, too, and these are to stay.
    try:
        set_class(other, type(tensor))
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on the meta device cannot be given values ({error}). Nothing "
            "else may refer to it weakly or be a view of it; build this model on the CPU on every rank"
        ) from error
