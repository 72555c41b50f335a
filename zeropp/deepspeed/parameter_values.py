"""DeepSpeed's ``safe_get_*`` and ``safe_set_*`` functions: read or replace the values of one parameter, in all stages.

The values are main weights, gradients and optimizer states. A gradient is the mean over ranks and micro-batches, not
clipped and without loss scale. Gradients exist from the last backward of an accumulation window until ``zero_grad()``.

All functions are collective and are called between passes: every rank calls the same functions for the same parameters
in the same order. "Full" values have the parameter's shape. "Local" values are the elements that this rank's optimizer
steps: 1-D, [n], in memory order; n may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp.access.state import gather_main, gather_row
from zeropp.engine.engine import Engine
from zeropp.engine.preconditions import NOTHING, WEIGHTS
from zeropp.optimizer.sharded_params import Slice
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.dtypes import digest_of, fingerprint
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.guard import handler_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


@dataclass(frozen=True)
class _ParameterPlace:
    """The objects that store one parameter's values.

    Attributes:
        engine: engine that manages the parameter.
        buffer: flat buffer of the parameter.
        index: index of the parameter in ``buffer``.
        optimizer: optimizer that steps the parameter; None for inference.
    """

    engine: Engine
    buffer: FlatBuffer
    index: int
    optimizer: ZeroOptimizer | None

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.buffer.names[self.index]

    @property
    def slices(self) -> list[Slice]:
        """The parameter's slices on this rank, in memory order.

        There are two slices if the device steps one part of the parameter and the host the other part.
        """
        if self.optimizer is None:
            return []
        parts = [part for part in self.optimizer.slices.all if part.buffer is self.buffer and part.name == self.name]
        return sorted(parts, key=lambda part: part.start)


# Full values.


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return a copy of a parameter's full main weights.

    Args:
        param: parameter of a wrapped model.

    Returns:
        Tensor of the parameter's shape in the dtype of the main weights: usually float32, or a 16-bit dtype if the
        configuration keeps main weights in 16 bits. None if zeropp does not manage the parameter or it is frozen.
    """
    place = _find_place(param, "safe_get_full_fp32_param")
    # None for a frozen parameter, as in DeepSpeed: its weights for computing are the only copy.
    if place is None or not place.buffer.trainable:
        return None
    # A view would keep the whole gathered buffer in memory, so return a copy.
    return gather_main(place.engine, place.buffer)[place.index].clone()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of a parameter's full gradient.

    Args:
        param: parameter of a wrapped model.

    Returns:
        Tensor of the parameter's shape; None if no rank has a gradient of the parameter.

    Raises:
        RuntimeError: the accumulation window is not finished, so the gradient is not complete.
    """
    place = _find_place(param, "safe_get_full_grad")
    if place is None or not _has_gradient(place):
        return None
    assert place.buffer.gradient is not None  # it has a gradient
    return gather_row(place.engine, place.buffer, place.buffer.gradient.shard)[place.index].clone()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of one full optimizer state of a parameter.

    Args:
        param: parameter of a wrapped model.
        optim_state_key: name of the state in the optimizer's ``state_dict()``, such as "exp_avg".

    Returns:
        Tensor of the parameter's shape; None if the optimizer has no such state, as before the first step.
    """
    place = _find_place(param, f"safe_get_full_optimizer_state of {optim_state_key!r}")
    if place is None or (dtype := _dtype_of_state(place, optim_state_key)) is None:
        return None
    # Put this rank's part of the state at the parameter's place in an otherwise empty shard. Then the state is gathered
    # like main weights.
    row = torch.zeros(place.buffer.shard.numel(), dtype=dtype, device=place.engine.device)
    for part, state in _states(place, optim_state_key):
        row[part.offset : part.offset + state.numel()] = state
    return gather_row(place.engine, place.buffer, row)[place.index].clone()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's main weights. The weights that the model computes with are renewed from them.

    Args:
        param: parameter of a wrapped model.
        value: new weights of the parameter's shape, equal on all ranks.

    Raises:
        ValueError: zeropp does not manage the parameter, ``value`` has another shape, or ranks give different values.
    """
    place = _begin_to_set(param, value, "safe_set_full_fp32_param")
    engine, buffer = place.engine, place.buffer
    # A refresh in flight may still read the main weights that are overwritten here.
    engine.wait_for_refresh()
    buffer.load(param, value.detach().to(engine.device))
    engine.weights_changed([buffer])


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's gradient for the next optimizer step.

    Ranks may give different values, for example noise that each rank draws itself: each element is taken from the rank
    that steps it. Where several ranks step the same elements (stage 0, MiCS), all ranks must give equal values.

    Args:
        param: parameter of a wrapped model.
        value: new gradient of the parameter's shape.

    Raises:
        RuntimeError: no rank has a gradient of the parameter, or the accumulation window is not finished.
        ValueError: zeropp does not manage the parameter, ``value`` has another shape, or values differ between ranks
            that step the same elements.
    """
    place = _begin_to_set(param, value, "safe_set_full_grad", alike=False)
    _require_gradient(place)
    # Write in place: the optimizer's parameter groups refer to these tensors.
    for part in place.slices:
        part.gradient.copy_(_part_of(value, part))
    _invalidate_step_stats(place)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace one optimizer state of a parameter.

    Args:
        param: parameter of a wrapped model.
        value: new state of the parameter's shape, equal on all ranks.
        optim_state_key: name of the state in the optimizer's ``state_dict()``, such as "exp_avg".

    Raises:
        RuntimeError: the optimizer has no such state.
        ValueError: zeropp does not manage the parameter, ``value`` has another shape, or ranks give different values.
    """
    place = _begin_to_set(param, value, f"safe_set_full_optimizer_state of {optim_state_key!r}")
    _require_state(place, optim_state_key)
    for part, state in _states(place, optim_state_key):
        state.copy_(_part_of(value, part))


# Local values.


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's part of a parameter's main weights, [n].

    None if zeropp does not manage the parameter or the parameter is frozen.
    """
    place = _find_place(param, "safe_get_local_fp32_param")
    if place is None or not place.buffer.trainable:
        return None
    return _joined([part.parameter.detach() for part in place.slices], place)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's part of a parameter's gradient, [n]; None if no rank has a gradient of it.

    Raises:
        RuntimeError: the accumulation window is not finished, so the gradient is not complete.
    """
    place = _find_place(param, "safe_get_local_grad")
    if place is None or not _has_gradient(place):
        return None
    return _joined([part.gradient for part in place.slices], place)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of this rank's part of one optimizer state, [n]; None if the optimizer has no such state.

    Args:
        param: parameter of a wrapped model.
        optim_state_key: name of the state in the optimizer's ``state_dict()``, such as "exp_avg".
    """
    place = _find_place(param, f"safe_get_local_optimizer_state of {optim_state_key!r}")
    if place is None or _dtype_of_state(place, optim_state_key) is None:
        return None
    return _joined([state for _, state in _states(place, optim_state_key)], place)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of a parameter's main weights. The weights for computing are renewed from them.

    Args:
        param: parameter of a wrapped model.
        value: new values with as many elements as :func:`safe_get_local_fp32_param` returns on this rank.

    Raises:
        ValueError: zeropp does not manage the parameter, or ``value`` has another number of elements on some rank.
    """
    place = _require(param, "safe_set_local_fp32_param")
    place.engine.wait_for_refresh()
    _set_parts([part.parameter.detach() for part in place.slices], value, place)
    place.engine.weights_changed([place.buffer])


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of a parameter's gradient for the next optimizer step.

    Args:
        param: parameter of a wrapped model.
        value: new values with as many elements as :func:`safe_get_local_grad` returns on this rank.

    Raises:
        RuntimeError: no rank has a gradient of the parameter, or the accumulation window is not finished.
        ValueError: zeropp does not manage the parameter, or ``value`` has another number of elements on some rank.
    """
    place = _require(param, "safe_set_local_grad")
    _require_gradient(place)
    _set_parts([part.gradient for part in place.slices], value, place)
    _invalidate_step_stats(place)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of one optimizer state of a parameter.

    Args:
        param: parameter of a wrapped model.
        value: new values with as many elements as :func:`safe_get_local_optimizer_state` returns on this rank.
        optim_state_key: name of the state in the optimizer's ``state_dict()``, such as "exp_avg".

    Raises:
        RuntimeError: the optimizer has no such state.
        ValueError: zeropp does not manage the parameter, or ``value`` has another number of elements on some rank.
    """
    place = _require(param, f"safe_set_local_optimizer_state of {optim_state_key!r}")
    _require_state(place, optim_state_key)
    _set_parts([state for _, state in _states(place, optim_state_key)], value, place)


# Helpers of all functions above.


def _find_place(param: nn.Parameter, what: str) -> _ParameterPlace | None:
    """Return the place of a parameter's values, after checking that all ranks make the same call. Collective.

    Args:
        param: any parameter.
        what: name of the calling function, for errors; a name with "set" requires that weights are on the device.

    Returns:
        The place; None, without communication, if no engine manages the parameter.

    Raises:
        RuntimeError: a pass is running, or another rank makes another call.
    """
    engine = handler_of(param)
    if not isinstance(engine, Engine) or id(param) not in engine.unit_of:
        return None
    engine.require_idle(what, inside_gather=True, needs=WEIGHTS if "set" in what else NOTHING)
    buffer, index = engine.unit_of[id(param)].place_of(param)
    listener = engine.listener
    place = _ParameterPlace(engine, buffer, index, listener if isinstance(listener, ZeroOptimizer) else None)
    # The parameter's name is compared as well: ranks with different parameters would mix their values.
    engine.agreement.require_same_call(f"{what} of {place.name!r}")
    return place


def _require(param: nn.Parameter, what: str) -> _ParameterPlace:
    """Call :func:`_find_place`, and raise ValueError if no engine manages the parameter."""
    place = _find_place(param, what)
    if place is None:
        raise ValueError(f"{what} got a parameter that zeropp does not manage; give one of a model that is wrapped")
    return place


def _begin_to_set(param: nn.Parameter, value: Tensor, what: str, *, alike: bool = True) -> _ParameterPlace:
    """Return the place of a parameter's values, after checking the new value on all ranks. Collective.

    Args:
        param: any parameter.
        value: new full value.
        what: name of the calling function, for errors.
        alike: True if all ranks must give equal values. If False, values may differ unless several ranks step the same
            elements, whose copies would then differ.

    Raises:
        ValueError: zeropp does not manage the parameter, or ``value`` is refused on some rank.
    """
    place = _require(param, what)
    shape = place.buffer.layout.slots[place.index].shape
    fits = isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
    own = digest_of([fingerprint(value)]) if fits else 0
    # Ranks exchange a digest of their values, 0 for a wrong shape, so that all ranks raise if one of them must.
    told = place.engine.agreement.exchange_objects(own, f"comparing what {what} was given")
    if not fits:
        raise ValueError(f"{what} got {getattr(value, 'shape', value)!r} for {place.name!r}, of shape {tuple(shape)}")
    single = place.buffer.placement.mode.states == place.engine.comm.world
    # A digest of 0 raises here on the ranks whose own value has the right shape.
    if 0 in told or ((alike or not single) and any(each != own for each in told)):
        raise ValueError(f"{what} got other values for {place.name!r} on other ranks; give the same ones on all")
    return place


def _has_gradient(place: _ParameterPlace) -> bool:
    """Return True if any rank has a gradient of the parameter. Collective.

    Gradients that were kept back for the step, as in ``no_sync()``, are reduced by this call.
    """
    if place.optimizer is None or not place.buffer.trainable:
        return False
    if place.engine.accumulation.unfinished:
        raise RuntimeError(
            f"the gradient of {place.name!r} was asked for inside a window of micro-batches, where its sum is not "
            "complete; ask after the last one, before step()"
        )
    # grad_norms() reduces the gradients that are still waiting for the step, and lists the parameters that have one.
    return place.name in place.optimizer.grad_norms()


def _require_gradient(place: _ParameterPlace) -> None:
    """Raise RuntimeError if no rank has a gradient of the parameter. Collective."""
    if not _has_gradient(place):
        raise RuntimeError(f"no rank has a gradient of {place.name!r}; set it between backward and step()")


def _invalidate_step_stats(place: _ParameterPlace) -> None:
    """Make the next step compute gradient norms and the non-finite flag again, because gradients were edited."""
    assert place.optimizer is not None  # a gradient exists
    # invalidate() also clears the mark that mark_stale() sets, so mark_stale() comes second.
    place.optimizer.step_sync.invalidate()
    place.optimizer.step_sync.mark_stale()


def _states(place: _ParameterPlace, key: str) -> list[tuple[Slice, Tensor]]:
    """Return (slice, state) for this rank's slices whose state ``key`` has one value per element."""
    if place.optimizer is None:
        return []
    found = [(part, place.optimizer.state.get(part.parameter, {}).get(key)) for part in place.slices]
    return [(p, s) for p, s in found if isinstance(s, Tensor) and s.shape == p.parameter.shape]


def _dtype_of_state(place: _ParameterPlace, key: str) -> torch.dtype | None:
    """Return the dtype of an optimizer state, or None if no rank has the state. Collective.

    Ranks exchange the dtype, because a rank without elements of the parameter has no state of its own.
    """
    # The first slice is enough: the states of all slices of a parameter have the same dtype.
    own = next((state.dtype for _, state in _states(place, key)), None)
    told = place.engine.agreement.exchange_objects(own, f"looking for states {key!r}")
    return next((dtype for dtype in told if dtype is not None), None)


def _require_state(place: _ParameterPlace, key: str) -> None:
    """Raise RuntimeError if no rank has a state ``key`` of the parameter. Collective."""
    if _dtype_of_state(place, key) is None:
        raise RuntimeError(
            f"the optimizer has no state {key!r} of {place.name!r}; states are made in the first step, and are named "
            "as in its state_dict()"
        )


def _part_of(value: Tensor, part: Slice) -> Tensor:
    """Return the elements of a full value that belong to a slice, 1-D in memory order."""
    # Copy the value to the parameter's strides first: slices count elements in memory order, and the memory of a
    # transposed or channels_last parameter is not in row-major order.
    dense = torch.empty_strided(value.shape, part.strides, dtype=value.dtype, device=value.device)
    row = dense.copy_(value.detach()).as_strided((dense.numel(),), (1,))
    return row[part.start : part.start + part.parameter.numel()]


def _joined(parts: list[Tensor], place: _ParameterPlace) -> Tensor:
    """Return a parameter's slices as one new tensor on the model's device, [n]."""
    empty = torch.empty(0, dtype=place.buffer.main_dtype, device=place.engine.device)
    return torch.cat([part.to(place.engine.device) for part in parts]) if parts else empty


def _set_parts(parts: list[Tensor], value: Tensor, place: _ParameterPlace) -> None:
    """Copy local values into this rank's slices, in place. Collective.

    Args:
        parts: 1-D tensors to write to, in memory order.
        value: as many elements as ``parts`` have together.
        place: place of the parameter's values.

    Raises:
        ValueError: ``value`` has another number of elements, on this rank or on another rank.
    """
    numel = sum(part.numel() for part in parts)
    fits = isinstance(value, Tensor) and value.numel() == numel
    # Either all ranks raise or none does. Otherwise the other ranks would wait in a collective that this rank never
    # issues.
    told = place.engine.agreement.exchange_objects(fits, "comparing sizes of local values")
    if not all(told):
        rank = place.engine.comm.ranks[told.index(False)]
        raise ValueError(
            f"rank {rank} gave local values of another size than its part of {place.name!r}. This rank's part has "
            f"{numel} elements, and it was given {getattr(value, 'shape', value)!r}"
        )
    # Slices are views of main weights, gradients or states, so a copy in place is enough.
    for part, given in zip(parts, value.detach().reshape(-1).split([part.numel() for part in parts]), strict=True):
        part.copy_(given)
