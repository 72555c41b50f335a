"""Moving a model's tensors to the device when the model is wrapped.

If the caller names the device, only rank 0 needs values: other ranks may have parameters and buffers on the meta
device. Rank 0's values may be on the CPU; each unit is copied to the device when it is sharded.
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
    """Return the device to train on: the given one, else the device of all parameters. Local.

    Args:
        model: model that is about to be wrapped.
        parameters: all parameters of the model, by name.
        device: device that the caller gave, or None.

    Raises:
        ValueError: the model has no parameters, or the device does not exist. Without a device: parameters are on
            several devices, or a parameter or buffer is on meta. With a device: a meta tensor cannot be replaced, or a
            parameter has a gradient.
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
            f"{kind} {name!r} is on the meta device and has no values. Give the device to train "
            "on, ZeroOptimizer(..., device=...): then all ranks get rank 0's values, so only rank 0 needs values. Or "
            "call zeropp.zero.materialize(model), and load it after wrapping"
        )
    if len(found) > 1:
        raise ValueError(
            f"parameters lie on several devices {found}; move the model to one device before wrapping, or say which "
            "one it trains on: ZeroOptimizer(..., device=...)"
        )
    return next(iter(found))


def require_values(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise an error if a parameter or buffer has no values. Called on the rank that sends its values to all ranks.

    Args:
        model: model that is about to be wrapped.
        parameters: all parameters of the model, by name. Parameters that ``zero.Init`` has sharded, or that are loaded
            after wrapping, are not checked.

    Raises:
        ValueError: a tensor is on the meta device.
    """
    awaited = {name for name, parameter in parameters.items() if not is_whole(parameter)}
    for kind, name in _on_meta(model, parameters):
        if kind == "parameter" and name in awaited:
            continue
        raise ValueError(
            f"{kind} {name!r} of the first rank is on the meta device; all ranks get its values, so it needs them: "
            "build the model on the CPU on the first rank, and on the meta device on other ranks only; or call "
            "zeropp.zero.materialize(model) on every rank, and load it after wrapping"
        )


def place(model: nn.Module, device: torch.device) -> None:
    """Move buffers and non-floating parameters to the device, and meta parameters to empty tensors on the device.

    All tensors stay the same Python objects. Buffers and non-floating parameters on the meta device get uninitialized
    memory. Floating parameters on the meta device get a storage of zero bytes, because sharding gives them values.

    Args:
        model: model that :func:`find_device` has checked.
        device: device to train on.
    """
    with torch.no_grad(), without_weak_weights(model):
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                _move(parameter, device)
            elif parameter.is_meta:
                # empty_like would change overlapping strides, but the unit's layout is computed from the strides.
                shape = parameter.shape
                strides = parameter.stride()
                _swap(parameter, torch.empty_strided(shape, strides, dtype=parameter.dtype, device=device))
                parameter.untyped_storage().resize_(0)
        for buffer in model.buffers():
            _move(buffer, device)


def _existing(device: torch.device | str | int) -> torch.device:
    try:
        # Ask a tensor for its device: "cuda" alone means the current GPU, and the tensor's device has its index.
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
    """Yield ("parameter" or "buffer", name) of each tensor on the meta device."""
    for name, parameter in parameters.items():
        if parameter.is_meta:
            yield "parameter", name
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            yield "buffer", name


def _check_replaceable(model: nn.Module) -> None:
    """Raise an error if a meta tensor cannot be replaced, or a parameter cannot be moved to another device."""
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
        return  # wrapped before, or sharded by zero.Init: wrapping brings its values to the device
    if parameter.grad is not None:
        raise ValueError(
            f"parameter {name!r} has a gradient, which would stay where the parameter was; call zero_grad() before "
            "wrapping with a device"
        )
    # torch moves a meta tensor by swapping the tensor's contents, and refuses if a weak reference exists. Hooks would
    # be lost.
    if parameter.is_meta and weakref.getweakrefcount(parameter):
        raise ValueError(
            f"parameter {name!r} is on the meta device, and something refers to it weakly, such as an average "
            "or a cache keyed by tensors; create those objects after wrapping"
        )
    if parameter.is_meta and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        raise ValueError(
            f"parameter {name!r} is on the meta device and has hooks, which would be lost; register them after wrapping"
        )


@contextlib.contextmanager
def without_weak_weights(model: nn.Module) -> Iterator[None]:
    """Remove the weak references of nn.RNNBase layers to their weights inside the ``with`` block.

    torch.utils.swap_tensors refuses tensors with weak references. The layers use these to notice replaced weights.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._flat_weight_refs = [None if w is None else weakref.ref(w) for w in layer._flat_weights]


def give_memory(tensor: Tensor, device: torch.device) -> None:
    """Replace a meta tensor by uninitialized memory of the same shape on ``device``; the Python object stays."""
    _swap(tensor, torch.empty_like(tensor, device=device))


def _move(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor to ``device`` in place; a meta tensor gets uninitialized memory."""
    if tensor.is_meta:
        give_memory(tensor, device)
    elif tensor.device != device and not is_managed(tensor):
        # Assign to .data to keep the tensor object, because several modules may share it.
        tensor.data = tensor.data.to(device)


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Swap the contents of ``tensor`` with ``other``, and keep the object.

    Modules, tied parameters and optimizers refer to the object, so it must stay the same.
    """
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    # swap_tensors also swaps the class and the attributes, so copy them to ``other`` first.
    try:
        set_class(other, type(tensor))
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on the meta device cannot be given values ({error}). It may "
            "have no weak references and no views; build this model on the CPU on every rank"
        ) from error
