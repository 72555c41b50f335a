"""``safe_get_full_grad`` and its kin: whole values of one parameter, by DeepSpeed's names, in every stage.

Weights are main weights, gradients the mean over ranks and micro-batches without a loss scale and before clipping, and
states the optimizer's. All calls are collective: every rank makes them, for one parameter after the other in one order,
between passes; gradients are there between the last backward of a window and ``zero_grad()``. "Local" means the
elements that this rank steps, [n] in the order of memory, and maybe none.
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
from zeropp.params.guard import handler_of
from zeropp.params.unit import FlatBuffer

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
    """The place of a parameter's values."""

    engine: Engine
    buffer: FlatBuffer
    index: int
    optimizer: ZeroOptimizer | None

    @property
    def name(self) -> str:
        return self.buffer.names[self.index]

    @property
    def slices(self) -> list[Slice]:
        """The parameter's slices on this rank; two where the device steps one and the host the other."""
        if self.optimizer is None:
            return []
        parts = [part for part in self.optimizer.slices.all if part.buffer is self.buffer and part.name == self.name]
        return sorted(parts, key=lambda part: part.start)


# Whole values.


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A parameter's whole main weights, in float32; None if zeropp does not manage it, or it is not trained.

    In 16 bits where they are kept so.
    """
    place = _find_place(param, "safe_get_full_fp32_param")
    # As the other calls, and DeepSpeed's: a frozen parameter has no main weights beside the ones it computes with.
    if place is None or not place.buffer.trainable:
        return None
    # A view would keep all of the buffer that has been gathered.
    return gather_main(place.engine, place.buffer)[place.index].clone()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A parameter's whole gradient; None if no rank has one.

    Raises:
        RuntimeError: inside a window, where sums of gradients are not complete.
    """
    place = _find_place(param, "safe_get_full_grad")
    if place is None or not _has_gradient(place):
        return None
    assert place.buffer.gradient is not None  # it has a gradient
    return gather_row(place.engine, place.buffer, place.buffer.gradient.shard)[place.index].clone()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One of the optimizer's states of a parameter, whole; None if it has none of this name, as before a first step."""
    place = _find_place(param, f"safe_get_full_optimizer_state of {optim_state_key!r}")
    if place is None or (dtype := _dtype_of_state(place, optim_state_key)) is None:
        return None
    # A row like that of main weights, with this parameter's elements alone: the way to whole values is the same.
    row = torch.zeros(place.buffer.shard.numel(), dtype=dtype, device=place.engine.device)
    for part, state in _states(place, optim_state_key):
        row[part.offset : part.offset + state.numel()] = state
    return gather_row(place.engine, place.buffer, row)[place.index].clone()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter new main weights, the same on every rank; weights to compute with follow.

    Raises:
        ValueError: it is none that zeropp manages, or of another shape; or ranks give other values.
    """
    place = _begin_to_set(param, value, "safe_set_full_fp32_param")
    engine, buffer = place.engine, place.buffer
    # A refresh under way reads what is about to be written.
    engine.wait_for_refresh()
    buffer.load(param, value.detach().to(engine.device))
    engine.weights_changed([buffer])


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter another gradient for the step that follows.

    Where ranks give other values, as with noise that each has drawn, an element gets that of the rank which steps it.

    Raises:
        RuntimeError: no rank has a gradient of it.
        ValueError: as of :func:`safe_set_full_fp32_param`; of other values only where several ranks step the same
            elements, as in stage 0 and MiCS.
    """
    place = _begin_to_set(param, value, "safe_set_full_grad", alike=False)
    _require_gradient(place)
    # In place, as of a user who edits the slices of a group: the step sees what is there.
    for part in place.slices:
        part.gradient.copy_(_part_of(value, part))
    _note_edit(place)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Give a parameter another state, the same on every rank.

    Raises:
        RuntimeError: it has no such state.
        ValueError: as of :func:`safe_set_full_fp32_param`.
    """
    place = _begin_to_set(param, value, f"safe_set_full_optimizer_state of {optim_state_key!r}")
    _require_state(place, optim_state_key)
    for part, state in _states(place, optim_state_key):
        state.copy_(_part_of(value, part))


# This rank's part.


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of what this rank steps of a parameter's main weights; None if the optimizer does not step it."""
    place = _find_place(param, "safe_get_local_fp32_param")
    if place is None or not place.buffer.trainable:
        return None
    return _joined([part.parameter.detach() for part in place.slices], place)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's part of the gradient; None if no rank has one."""
    place = _find_place(param, "safe_get_local_grad")
    if place is None or not _has_gradient(place):
        return None
    return _joined([part.gradient for part in place.slices], place)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of this rank's part of a state; None if it has none of this name."""
    place = _find_place(param, f"safe_get_local_optimizer_state of {optim_state_key!r}")
    if place is None or _dtype_of_state(place, optim_state_key) is None:
        return None
    return _joined([state for _, state in _states(place, optim_state_key)], place)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Give this rank's part of the main weights new values; weights to compute with follow."""
    place = _require(param, "safe_set_local_fp32_param")
    place.engine.wait_for_refresh()
    _set_parts([part.parameter.detach() for part in place.slices], value, place)
    place.engine.weights_changed([place.buffer])


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Give this rank's part of the gradient other values, for the step that follows."""
    place = _require(param, "safe_set_local_grad")
    _require_gradient(place)
    _set_parts([part.gradient for part in place.slices], value, place)
    _note_edit(place)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Give this rank's part of a state other values."""
    place = _require(param, f"safe_set_local_optimizer_state of {optim_state_key!r}")
    _require_state(place, optim_state_key)
    _set_parts([state for _, state in _states(place, optim_state_key)], value, place)


# What they have in common.


def _find_place(param: nn.Parameter, what: str) -> _ParameterPlace | None:
    """A parameter's place, once every rank asks for it; None if nobody manages it."""
    engine = handler_of(param)
    if not isinstance(engine, Engine) or id(param) not in engine.unit_of:
        return None
    engine.require_idle(what, inside_gather=True, needs=WEIGHTS if "set" in what else NOTHING)
    buffer, index = engine.unit_of[id(param)].place_of(param)
    listener = engine.listener
    place = _ParameterPlace(engine, buffer, index, listener if isinstance(listener, ZeroOptimizer) else None)
    # By name: ranks that ask for others would mix their values.
    engine.agreement.require_same_call(f"{what} of {place.name!r}")
    return place


def _require(param: nn.Parameter, what: str) -> _ParameterPlace:
    place = _find_place(param, what)
    if place is None:
        raise ValueError(f"{what} got a parameter that zeropp does not manage; give one of a model that is wrapped")
    return place


def _begin_to_set(param: nn.Parameter, value: Tensor, what: str, *, alike: bool = True) -> _ParameterPlace:
    """As :func:`_require`; refuses values of another shape, or other ones than other ranks give.

    Where they need not be ``alike``, only if copies of one element would part.
    """
    place = _require(param, what)
    shape = place.buffer.layout.slots[place.index].shape
    fits = isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
    own = digest_of([fingerprint(value)]) if fits else 0
    # Replicas would part, and every rank must learn of what one of them cannot use.
    told = place.engine.agreement.exchange_objects(own, f"comparing what {what} was given")
    if not fits:
        raise ValueError(f"{what} got {getattr(value, 'shape', value)!r} for {place.name!r}, of shape {tuple(shape)}")
    single = place.buffer.placement.mode.states == place.engine.comm.world
    # On all ranks: one whose values fit must not go on where another was given another shape.
    if 0 in told or ((alike or not single) and any(each != own for each in told)):
        raise ValueError(f"{what} got other values for {place.name!r} on other ranks; give the same ones on all")
    return place


def _has_gradient(place: _ParameterPlace) -> bool:
    """Tell whether any rank has a gradient of the parameter; complete afterwards."""
    if place.optimizer is None or not place.buffer.trainable:
        return False
    if place.engine.accumulation.unfinished:
        raise RuntimeError(
            f"the gradient of {place.name!r} was asked for inside a window of micro-batches, where its sum is not "
            "complete; ask after the last one, before step()"
        )
    # Sends what waits for the step, and says which parameters have a gradient.
    return place.name in place.optimizer.grad_norms()


def _require_gradient(place: _ParameterPlace) -> None:
    if not _has_gradient(place):
        raise RuntimeError(f"no rank has a gradient of {place.name!r}; set it between backward and step()")


def _note_edit(place: _ParameterPlace) -> None:
    """Norms and flags are of other values."""
    assert place.optimizer is not None  # it has the gradient
    # In this order: to forget the sum is to forget doubts, too.
    place.optimizer.step_sync.invalidate()
    place.optimizer.step_sync.doubt()


def _states(place: _ParameterPlace, key: str) -> list[tuple[Slice, Tensor]]:
    """This rank's states of a name that have a value an element."""
    if place.optimizer is None:
        return []
    found = [(part, place.optimizer.state.get(part.parameter, {}).get(key)) for part in place.slices]
    return [(p, s) for p, s in found if isinstance(s, Tensor) and s.shape == p.parameter.shape]


def _dtype_of_state(place: _ParameterPlace, key: str) -> torch.dtype | None:
    """The dtype of a state, where any rank has it: one may have no element of the parameter."""
    # Of any of its states: those of two slices of one parameter are alike.
    own = next((state.dtype for _, state in _states(place, key)), None)
    told = place.engine.agreement.exchange_objects(own, f"looking for states {key!r}")
    return next((dtype for dtype in told if dtype is not None), None)


def _require_state(place: _ParameterPlace, key: str) -> None:
    if _dtype_of_state(place, key) is None:
        raise RuntimeError(
            f"the optimizer has no state {key!r} of {place.name!r}; states are made in the first step, and are named "
            "as in its state_dict()"
        )


def _part_of(value: Tensor, part: Slice) -> Tensor:
    """A slice's elements of a whole value, in the order of memory."""
    # A transposed parameter's memory is not in the order of its elements.
    dense = torch.empty_strided(value.shape, part.strides, dtype=value.dtype, device=value.device)
    row = dense.copy_(value.detach()).as_strided((dense.numel(),), (1,))
    return row[part.start : part.start + part.parameter.numel()]


def _joined(parts: list[Tensor], place: _ParameterPlace) -> Tensor:
    empty = torch.empty(0, dtype=place.buffer.main_dtype, device=place.engine.device)
    return torch.cat([part.to(place.engine.device) for part in parts]) if parts else empty


def _set_parts(parts: list[Tensor], value: Tensor, place: _ParameterPlace) -> None:
    numel = sum(part.numel() for part in parts)
    fits = isinstance(value, Tensor) and value.numel() == numel
    # All of them raise, or none does: others would go on to what this one does not come to.
    told = place.engine.agreement.exchange_objects(fits, "comparing sizes of local values")
    if not all(told):
        rank = place.engine.comm.ranks[told.index(False)]
        raise ValueError(
            f"rank {rank} gave local values of another size than it has of {place.name!r}; here it has {numel}, and "
            f"was given {getattr(value, 'shape', value)!r}"
        )
    # With gradients, which are views, as with main weights.
    for part, given in zip(parts, value.detach().reshape(-1).split([part.numel() for part in parts]), strict=True):
        part.copy_(given)
