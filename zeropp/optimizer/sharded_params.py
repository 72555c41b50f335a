"""Slices: this rank's parts of the parameters, which replace the model's parameters in the wrapped optimizer.

[Note: edits of slices] Users edit weights between steps in the tensors of ``optimizer.param_groups``, as SAM, weight
noise and shrink-and-perturb do. These tensors are the main weights. Cached weights must be renewed before the next
forward, and a renewal is collective. But a rank sees only edits of its own slices, and may have no slice of an edited
parameter. Therefore, on every rank, each group ends with two markers: tensors of two zeros that belong to no weight and
are never stepped. A loop over all tensors of a group also edits the markers. So every rank sees the edit, and all renew
their cached weights. Markers also detect edits by ``.data``, which do not raise a slice's version. An edit of only some
tensors does not reach the markers. If a forward then computes with cached weights, the next step is refused on every
rank. An edit of some tensors by ``p.data = values`` is refused, too, but an in-place edit through ``p.data`` is not
noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp._compat import storage_uses, unguarded
from zeropp.config.base import warn_user
from zeropp.engine.accumulation import PendingGradients
from zeropp.optimizer.checks import trial_states
from zeropp.optimizer.partial_gradient import MARKER_GRADIENT, NOTHING, as_partial
from zeropp.optimizer.slice_states import OwnStates, SliceStates
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient
from zeropp.params.unit import Unit
from zeropp.partition.levels import Fragment

__all__ = ["ShardedParams", "Slice", "show_gradients"]

_MARKERS = 2  # markers per group: two, so that an edit of one entry by its index does not look like an edit of all
_MARKER_NUMEL = 2  # elements of a marker: two, so that loops that skip tensors of one element edit markers, too


# eq=False: slices are compared by identity, because == on tensors compares elements.
@dataclass(eq=False)
class Slice:
    """The part of one parameter that lies in this rank's shard of a flat buffer.

    Attributes:
        name: name of the parameter in the model.
        unit: index of the parameter's unit; -1 for a stand-in.
        position: index of the parameter among the unit's trainable parameters.
        buffer: flat buffer of the parameter; None for a stand-in.
        offset: first element of the slice in the buffer's shard.
        start: first element of the slice in the parameter, in storage order.
        strides: strides of the parameter.
        parameter: [numel] leaf in the main dtype, a view of the main shard.
        gradient: [numel] view of the gradient shard.
        seen: the gradient as the groups show it. If ranks hold parts of gradients, it refuses norms.
        source: gradient of the buffer; None for a stand-in.
        shown: True if the optimizer was given the gradient. If the gradient is missing later, the user removed it.
    """

    name: str
    unit: int
    position: int
    buffer: FlatBuffer | None
    offset: int
    start: int
    strides: tuple[int, ...]
    parameter: nn.Parameter
    gradient: Tensor
    seen: Tensor
    source: Gradient | None
    shown: bool = False

    @property
    def own(self) -> Tensor:
        """The slice as a view of the main shard."""
        assert self.buffer is not None
        return self.buffer.shard[self.offset : self.offset + self.gradient.numel()]

    @property
    def on_host(self) -> bool:
        """True if the host's cores step this slice, provided that the optimizer has a fused CPU kernel."""
        return self.buffer is not None and self.offset >= self.buffer.tiers.device_numel

    def cut_gradient(self) -> None:
        """Make the slice's views of the gradient shard."""
        assert self.buffer is not None and self.source is not None  # no marker and no stand-in
        self.source.alloc_shard()  # torch makes no views of a storage without memory
        self.gradient = self.source.shard[self.offset : self.offset + self.parameter.numel()]
        # If every rank has whole gradients, a norm is equal on all ranks, so it is not refused.
        divided = self.buffer.placement.mode.states > 1
        self.seen = as_partial(self.gradient) if divided else self.gradient.detach()

    def clear_gradient(self) -> None:
        """Set the slice's part of the gradient shard to zero, although no gradient has arrived."""
        if self.source is not None:
            self.source.alloc_shard()
        self.gradient.zero_()

    def take_edit(self) -> None:
        """Copy a gradient that the user has set into the gradient shard, or zero the shard if the user removed it."""
        found = self.parameter.grad
        if found is None:
            # Norms are computed over the gradient shard, so a removed gradient must be zero there.
            self.gradient.zero_()
            self.shown = False
            return
        if self.source is not None:
            self.source.begin_sum()  # without a gradient in this step, the rest of the shard must become zero
        self.gradient.copy_(found)
        self.seen.data = self.gradient
        # Show the shard's view again, because clipping writes to the shard and must take effect.
        self.parameter.grad = self.seen
        self.shown = True


def show_gradients(parts: Iterable[Slice], present: Iterable[bool]) -> None:
    """Set the optimizer's gradient of each slice; set it to None, as of unused parameters, where ``present`` is False.

    One loop handles many slices, because each slice is set several times per step.
    """
    for part, shown in zip(parts, present, strict=True):
        part.parameter.grad = part.seen if shown else None
        part.shown = shown


def edited_slices(parts: Iterable[Slice]) -> list[Slice]:
    """Return the slices whose gradient was set, or set to None, by the user; call it inside ``unguarded()``."""
    edited = []
    for part in parts:
        found = part.parameter.grad
        if not part.shown:
            if found is not None:
                edited.append(part)
        # The shown gradient is a view of the shard, so edits in place are there, unless its ``.data`` was set.
        elif found is not part.seen or found.data_ptr() != part.gradient.data_ptr():
            edited.append(part)
    return edited


_position, _shown = attrgetter("position"), attrgetter("shown")


class ShardedParams:
    """This rank's slices and their states, which replace the parameters in the wrapped optimizer.

    Attributes:
        given: the model's parameters in each group, which slices have replaced.
        stepped: slices in the groups. Never empty. The model may have other trainable parameters.
        buffers: flat buffers of the slices.
        divided: True if ranks have different slices.
        markers: the last two entries of each group; see [Note: edits of slices].
        accumulated: names of slices to which autograd has added gradients. This happens if a loss is computed with the
            tensors of the groups.
    """

    def __init__(
        self, optimizer: Optimizer, units: tuple[Unit, ...], device: torch.device, wait: Callable[[], None] | None
    ) -> None:
        """Put slices into the groups. ``wait``, if given, is called before a user takes tensors out of a group."""
        self._optimizer = optimizer
        self._wait = wait
        self._units = units
        self._device = device
        self.given: list[list[nn.Parameter]] = []
        # Keys are ids of trainable parameters, because == on tensors compares elements.
        self._cut: dict[int, list[Slice]] = {}
        self._stand_in: Slice | None = None
        # Each gradient with its slices, and the number of references to its storage when the user had none.
        self._shards: list[tuple[Gradient, list[Slice], int]] = []
        self._references = 0  # Python's references to a shown gradient when the user has none
        # Optimizer states of frozen parameters.
        self._states: dict[int, dict[str, Any]] = {}
        self.stepped: list[Slice] = []
        # The same slices, grouped by the gradient of their buffer. The stand-in has none.
        self._by_source: list[tuple[Gradient | None, list[Slice]]] = []
        self.buffers: list[FlatBuffer] = []
        # If slices are not divided, every rank has all slices and sees every edit by itself.
        self.divided = any(b.placement.mode.states > 1 for unit in units for b in unit.buffers)
        self._marks: list[list[Slice]] = []  # markers of each group
        self.accumulated: list[str] = []
        self._hidden = self._kept_away = False
        self.assign()
        self._hook_state_dicts()

    # Leave inference mode, because parameters created in it could not be stepped outside of it.
    @torch.inference_mode(False)
    def assign(self) -> None:
        """Create slices for new trainable parameters, and put all slices into the groups, including new groups.

        Raises:
            RuntimeError: a group was removed.
        """
        groups = self._optimizer.param_groups
        if len(groups) < len(self.given):
            raise RuntimeError(
                f"the optimizer had {len(self.given)} parameter groups and has {len(groups)} now; groups cannot be "
                "taken away, set their lr to 0 or freeze their parameters with requires_grad_(False)"
            )
        # New groups still hold the model's parameters.
        self.given += [list(group["params"]) for group in groups[len(self.given) :]]
        for unit in self._units:
            self._cut_unit(unit)
        for group, given in zip(groups, self.given, strict=True):
            made: dict[torch.dtype, dict[str, Tensor]] = {}
            for parameter in given:
                self._move_state(parameter, group, made)
        stepped: list[Slice] = []
        for group, given in zip(groups, self.given, strict=True):
            parts = [part for parameter in given for part in self._cut.get(id(parameter), [])]
            # Change the group in place, because schedulers and users hold the group objects.
            group["params"] = _WaitingParams([part.parameter for part in parts], self._wait)
            # torch stores names in the group if the optimizer was made from named_parameters().
            if "param_names" in group:
                group["param_names"] = [part.name for part in parts]
            stepped += parts
        if self._stand_in is not None:
            # The stand-in is no longer in a group, so its state would be saved without a parameter.
            self._optimizer.state.pop(self._stand_in.parameter, None)
        if not stepped:
            # This rank has no slice. Add a stand-in, because GradScaler raises if it finds no gradient.
            stepped.append(self._add_stand_in())
        self.stepped = stepped
        by_source = dict[Gradient | None, list[Slice]]()
        for part in stepped:
            by_source.setdefault(part.source, []).append(part)
        self._by_source = list(by_source.items())
        self.buffers = [buffer for unit in self._units for buffer in unit.trainable_buffers]
        self._add_markers()
        # Compare the exact type: SliceStates derives from defaultdict, and must not be wrapped again.
        if type(self._optimizer.state) is defaultdict:
            self._optimizer.state = SliceStates(self._optimizer.state.default_factory, self._optimizer.state)
            self._optimizer.state.slices = weakref.ref(self)

    def show_trained(self) -> None:
        """Give slices the ``requires_grad`` of their parameters, which loops over the groups check."""
        for part in self.stepped:
            part.parameter.requires_grad_(part.unit < 0 or self._units[part.unit].trained[part.position])

    @property
    def markers(self) -> list[Slice]:
        """The markers of all groups: see [Note: edits of slices]."""
        return [marker for group in self._marks for marker in group]

    def _add_markers(self) -> None:
        """Add two small tensors to each parameter group, by whose edits ranks notice edits of the whole group."""
        groups = self._optimizer.param_groups
        while len(self._marks) < len(groups):
            # Use the slices' dtype, because sums over all tensors of a group should not mix dtypes.
            buffers = [buffer for unit in self._units for buffer in unit.trainable_buffers]
            dtype = buffers[0].main_dtype if buffers else torch.float32
            kind = _Marker if self._wait is None else _AwaitedMarker
            marks = [_stand_in(self._device, dtype, kind, _MARKER_NUMEL) for _ in range(_MARKERS)]
            for marker in marks:
                marker.parameter.state = {}  # type: ignore[attr-defined]
                if self._wait is not None:
                    marker.parameter.wait = self._wait  # type: ignore[attr-defined]
            if self.divided:
                # Markers refuse norms, too, because a rank may have no slice in a group.
                marks = [replace(marker, seen=as_partial(marker.gradient)) for marker in marks]
            for marker in marks:  # watch markers, because a rank may have no slice in a group
                self._watch(marker)
            self._marks.append(marks)
        for group, marks in zip(groups if not self._hidden else [], self._marks, strict=False):
            group["params"] += [marker.parameter for marker in marks]
            if "param_names" in group:
                group["param_names"] += [marker.name for marker in marks]

    def marker_state(self, marker: nn.Parameter) -> dict[str, Tensor]:
        """Return a marker's states, for loops over all tensors of a group: zeros, under the keys of slices' states."""
        for group, marks in zip(self._optimizer.param_groups, self._marks, strict=False):
            if any(marker is each.parameter for each in marks):
                made = trial_states(self._optimizer, group, marker.dtype)
                return {key: torch.zeros_like(marker if value.ndim else value) for key, value in made.items()}
        return {}

    @contextlib.contextmanager
    def without_markers(self) -> Iterator[None]:
        """Remove markers and their states from the optimizer inside this context, so that they are not saved."""
        self._remove_markers()
        self._kept_away = True
        try:
            yield
        finally:
            self._kept_away = False
            self._return_markers()

    def _remove_markers(self) -> None:
        for group, marks in zip(self._optimizer.param_groups, self._marks if not self._hidden else (), strict=False):
            # Markers are the last entries of a group.
            del group["params"][-len(marks) :]
            if "param_names" in group:
                del group["param_names"][-len(marks) :]
            for marker in marks:
                marker.parameter.state.update(self._optimizer.state.pop(marker.parameter, {}))  # type: ignore[attr-defined]
        self._hidden = True

    def _return_markers(self) -> None:
        # torch's hooks also call this method inside without_markers(), where markers must stay removed.
        if self._hidden and not self._kept_away:
            self._hidden = False
            self._add_markers()

    def _hook_state_dicts(self) -> None:
        """Remove markers during state_dict() and load_state_dict() of the wrapped optimizer itself."""
        # Refer to this object weakly, because it holds the optimizer, which holds the hooks.
        ref = weakref.ref(self)

        def before(*_: object) -> None:
            if (slices := ref()) is not None:
                slices._remove_markers()

        def after(*_: object) -> None:
            if (slices := ref()) is not None:
                slices._return_markers()

        self._optimizer.register_state_dict_pre_hook(before)
        self._optimizer.register_state_dict_post_hook(after)
        self._optimizer.register_load_state_dict_pre_hook(before)
        self._optimizer.register_load_state_dict_post_hook(after)

    def edited_by_groups(self) -> bool:
        """Return True if the user has edited all tensors of a group since :meth:`accept_edits`; equal on every rank."""
        return any(all(marker.parameter.edited for marker in marks) for marks in self._marks)  # type: ignore[attr-defined]

    def accept_edits(self) -> None:
        """Record that the current weights contain all edits made so far."""
        for marker in self.markers:
            marker.parameter.accept_edits()  # type: ignore[attr-defined]

    def take_replaced(self) -> bool:
        """Take values that the user has set by ``parameter.data = values``, if a marker shows an edit.

        As in plain torch, tensors that the user took from ``parameter.data`` before keep their values. So the main
        weights move to other memory, unless they are in a file. Returns True if main weights have moved.
        """
        # Check markers first, because comparing the address of every slice at each forward would cost host time.
        return self.is_edited() and self._take(self._replaced())

    def take_rest(self) -> list[str]:
        """Copy values that the user assigned to ``p.data`` of some tensors of a group into the main weights.

        Returns:
            The names of these slices.
        """
        replaced = self._replaced()
        self._take(replaced)
        return [part.name for part in replaced]

    def take_assigned(self) -> None:
        """Copy values that the optimizer's step has assigned to ``.data`` back into the main shards."""
        self._put_back(self._replaced())

    def _replaced(self) -> list[Slice]:
        """Return the slices whose parameter is no longer a view of the main shard."""
        begins = {buffer: buffer.shard.data_ptr() for buffer in self.buffers}
        width = {buffer: buffer.shard.element_size() for buffer in self.buffers}
        return [
            part
            for part in self.stepped
            if part.buffer is not None
            and part.parameter.data_ptr() != begins[part.buffer] + part.offset * width[part.buffer]
        ]

    def _take(self, replaced: list[Slice]) -> bool:
        moved = {part.buffer for part in replaced if part.buffer is not None and part.buffer.move_main()}
        self._put_back(replaced)
        for part in self.all if moved else ():
            if part.buffer in moved:
                part.parameter.data = part.own
        stayed = [part.name for part in replaced if part.buffer not in moved]
        if stayed:
            warn_user(
                f".data of {stayed[:4]} was set in optimizer.param_groups, and these main weights are in files: "
                "tensors taken from p.data before have the new values now, too. Keep copies of old values instead: "
                "p.detach().clone()"
            )
        return bool(moved)

    def _put_back(self, replaced: list[Slice]) -> None:
        for part in replaced:
            own = part.own
            if part.parameter.shape != own.shape:
                raise RuntimeError(
                    f".data of a tensor in optimizer.param_groups, of {part.name!r}, was set to values of shape "
                    f"{tuple(part.parameter.shape)}; expected {tuple(own.shape)}, as it had"
                )
            own.copy_(part.parameter.detach())
            part.parameter.data = own

    def is_edited(self) -> bool:
        """Return True if the user has edited a marker of some group since :meth:`accept_edits`."""
        return any(marker.parameter.edited for marker in self.markers)  # type: ignore[attr-defined]

    @property
    def all(self) -> list[Slice]:
        """All slices of this rank, also those of parameters in no group."""
        return [part for parts in self._cut.values() for part in parts]

    def frozen_states(self) -> dict[str, dict[str, Any]]:
        """Return the stored states of frozen parameters, by parameter name."""
        return {name: self._states[id(p)] for name, p in self._frozen() if id(p) in self._states}

    def keep_frozen_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Store saved states of frozen parameters, for the time when the parameters are unfrozen."""
        self._states = {id(p): states[name] for name, p in self._frozen() if name in states}

    def forget_state(self, parameter: nn.Parameter) -> None:
        """Drop this rank's part of a parameter's optimizer states, so that the next step starts without states.

        Raises:
            KeyError: the parameter is in no group.
        """
        if not self.in_groups(parameter):
            raise KeyError("the parameter is in none of the optimizer's groups")
        # States of frozen parameters are stored here; states of trained parameters are in the optimizer.
        self._states.pop(id(parameter), None)
        for part in self._cut.get(id(parameter), []):
            self._optimizer.state.pop(part.parameter, None)

    def _frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        for unit in self._units:
            for buffer in unit.buffers:
                if not buffer.trainable:
                    yield from zip(buffer.names, buffer.parameters, strict=True)

    def take_edits(self, pending: PendingGradients) -> bool:
        """Take gradients that the user has replaced or removed since they were shown.

        Args:
            pending: record of the parameters that have gradients, which is updated.

        Returns:
            True if the user has removed the gradients of all groups, as the markers show; equal on every rank.
        """
        pending.looks += 1
        with unguarded():  # comparing addresses of gradients that refuse norms would call __torch_function__
            edited = edited_slices(self.stepped)
            made = [part for part in edited if not part.shown and part.source is not None]
            shown = [part for part in edited if part.shown]
            # A parameter without a gradient may show zeros. If the user replaces them, the result is a gradient. If the
            # shown values are not zero, another rank has used the parameter, or error feedback has reached it.
            replaced = [part for part in shown if part.source is not None and part.parameter.grad is not None]
            unused = [part for part in replaced if not pending.used[part.unit][part.position]]
            zeros = [part for part in unused if not part.gradient.any()]
            for part in made + shown:
                part.take_edit()
            made += [part for part in zeros if part.gradient.any()]
        for part in made:
            pending.used[part.unit][part.position] = pending.looks
        for mark in self.markers if made else ():
            mark.shown |= mark.parameter.grad is not None
        for part in shown:
            if not part.shown and part.source is not None:
                pending.note_removed(part.unit, part.position)
        if not self.divided:
            pending.learn_removed(())  # every rank has all slices and found the same changes
        return all(mark.shown and mark.parameter.grad is None for mark in self.markers)

    def show_arrived(self, pending: PendingGradients) -> Slice:
        """Show the gradients that have arrived, and return a shown slice; without any gradient, show one of zeros."""
        self._return_markers()  # a failed load_state_dict() leaves them removed
        shown = self._show_present(pending)
        if shown is None:
            shown = self.stepped[0]
            shown.clear_gradient()  # nothing has arrived
            show_gradients([shown], [True])
        self.show_markers(True)
        return shown

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """Hide a parameter's gradient, which was set to None through the model."""
        parts = self._cut.get(id(parameter), [])
        show_gradients(parts, [False] * len(parts))

    def _show_present(self, pending: PendingGradients) -> Slice | None:
        """Show the gradients that have arrived and that the user has not removed since, and hide all others.

        Returns:
            The first slice whose gradient is shown, or None.
        """
        found = None
        for source, parts in self._by_source:
            arrived = source is not None and source.arrived
            if arrived and pending.removed:
                show_gradients(parts, [not self._is_gone(part, pending) for part in parts])
            else:
                show_gradients(parts, [arrived] * len(parts))
            if arrived and found is None:
                found = next((part for part in parts if part.shown), None)
        return found

    def _is_gone(self, part: Slice, pending: PendingGradients) -> bool:
        """Return True if the user removed a gradient and, as far as this rank sees, no rank has added one since."""
        return pending.is_gone(part.unit, part.position) and not bool(part.gradient.any())

    def show_zeros(self, pending: PendingGradients) -> None:
        """Show gradients that were set to zero, and hide all others. Called after all were zeroed or discarded."""
        self.accumulated.clear()
        for part in self.stepped if pending.removed else ():
            if part.shown:  # a rank has added a gradient since the removal, which zeros could not show
                pending.removed.pop((part.unit, part.position), None)
        self.show_markers(self._show_present(pending) is not None)

    def free_gradients(self) -> None:
        """Free the memory of gradients that have not arrived; see [Note: memory of gradients]."""
        for gradient, parts, uses in self._shards:
            if gradient.arrived or not gradient.transient:
                continue
            # The user may have kept a gradient that the groups showed, or a view of one.
            kept = any([sys.getrefcount(part.seen) > self._references for part in parts])
            if kept or storage_uses(gradient.shard) != uses:
                gradient.renew_shard()
                for part in parts:
                    part.cut_gradient()
            gradient.free_shard()

    def show_markers(self, present: bool) -> None:
        """Give markers tiny gradients, or none. They show gradients when slices do, except during the step itself."""
        for marker in self.markers:
            if present:
                # The user may have changed the value. It is nonzero, because some loops set zero gradients to None.
                marker.gradient.fill_(MARKER_GRADIENT)
        show_gradients(self.markers, [present] * len(self.markers))

    def show_used(self, used: Sequence[Sequence[bool]]) -> None:
        """Show the gradients of the parameters that are to be stepped.

        Args:
            used: for each unit, a mask of the trainable parameters that have a gradient on any rank. All ranks with a
                slice of such a parameter must step it.
        """
        for source, parts in self._by_source:
            # All slices of a buffer are of one unit. The stand-in has no unit, and is always shown.
            flags = used[parts[0].unit] if source is not None else [True]
            present = list(map(flags.__getitem__, map(_position, parts)))
            # This rank discarded its part of a gradient that another rank set to zero, so show zeros.
            if source is not None and not source.arrived:
                for part in itertools.compress(parts, present):
                    part.clear_gradient()
            if present != list(map(_shown, parts)):
                show_gradients(parts, present)
        # Hide the markers' gradients: the step would edit markers with a gradient, and create states for them.
        self.show_markers(False)

    def in_groups(self, parameter: Tensor) -> bool:
        """Return True if a parameter of the model is in a group."""
        return any(parameter is other for given in self.given for other in given)

    def _cut_unit(self, unit: Unit) -> None:
        position = 0
        for buffer in unit.trainable_buffers:
            # Keep existing slices, because the optimizer's states belong to these objects. A buffer is always cut as a
            # whole.
            if id(buffer.parameters[0]) not in self._cut:
                for parameter in buffer.parameters:
                    self._cut[id(parameter)] = []
                for fragment in _divided(buffer):
                    part = _cut(buffer, fragment, unit.index, position + fragment.slot)
                    self._watch(part)
                    self._cut[id(buffer.parameters[fragment.slot])].append(part)
                gradient = buffer.gradient
                assert gradient is not None  # the buffer is trainable
                parts = [part for parameter in buffer.parameters for part in self._cut[id(parameter)]]
                self._shards.append((gradient, parts, storage_uses(gradient.shard)))
                self._references = max([self._references, *[sys.getrefcount(part.seen) for part in parts]])
                if gradient.transient and not gradient.arrived:
                    gradient.free_shard()
            position += len(buffer.parameters)

    def _watch(self, part: Slice) -> None:
        """Record when autograd adds a gradient to a slice or marker."""
        # Capture only the list and the name: a reference to the slice would create a cycle through the hook.
        accumulated, name = self.accumulated, part.name
        part.parameter.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(name))

    def refuse_accumulated(self) -> None:
        """Raise if a loss was computed with tensors of the groups, so that autograd added gradients to them.

        Raises:
            RuntimeError: there are such gradients, which no reduction sums, and which may be lost.
        """
        if self.accumulated:
            of = next((f", as of {name!r}" for name in self.accumulated if name != NOTHING), "")
            self.accumulated.clear()
            raise RuntimeError(
                f"backward came to tensors of optimizer.param_groups{of}: a loss has a term that was computed with "
                "them, as a penalty on weights. They are this rank's parts of the weights, and their gradients are no "
                "part of what ranks sum. Compute the term in the model's forward, from its own parameters; set "
                "weight_decay; or add the term's gradient to the .grad of these tensors between backward() and step()"
            )

    def _add_stand_in(self) -> Slice:
        group = self._optimizer.param_groups[0]
        self._stand_in = self._stand_in or _stand_in(self._device, torch.float32, nn.Parameter)
        group["params"].append(self._stand_in.parameter)
        if "param_names" in group:
            group["param_names"].append(self._stand_in.name)
        return self._stand_in

    def _move_state(
        self, parameter: nn.Parameter, group: dict[str, Any], made: dict[torch.dtype, dict[str, Tensor]]
    ) -> None:
        """Cut a parameter's optimizer state like the parameter, or store it until the parameter is trained.

        Tensors of the parameter's shape are cut, and all other values are copied to each slice, which is right for
        elementwise optimizers. States are converted to the dtypes that the optimizer uses for main weights. Otherwise
        states of a 16-bit model would stay in 16 bits, which fused steps refuse beside float32 weights.

        Args:
            parameter: parameter of the model.
            group: parameter group of the parameter.
            made: states that the optimizer creates with the group's settings, by main dtype; filled here.
        """
        # Use dict's own pop, because SliceStates refuses parameters of the model as keys.
        state = dict.pop(self._optimizer.state, parameter, None) or self._states.pop(id(parameter), None)
        if not state:
            return
        # A frozen parameter has no slices: store its state until requires_grad_() is called.
        if id(parameter) not in self._cut:
            self._states[id(parameter)] = state
        on_device = any(self._optimizer.defaults.get(key) for key in ("fused", "capturable"))
        for part in self._cut.get(id(parameter), []):
            own, dtype = self._optimizer.state[part.parameter], part.parameter.dtype
            if dtype not in made:
                made[dtype] = trial_states(self._optimizer, group, dtype)
            for key, value in state.items():
                if key in made[dtype] and isinstance(value, Tensor) and value.is_floating_point():
                    value = self._converted(value, made[dtype][key].dtype)
                # Move states to the slice's device. Step counts stay on the host, unless a fused or capturable step
                # reads them.
                if isinstance(value, Tensor) and (key != "step" or on_device):
                    value = value.to(part.parameter.device)
                # A step count may have the shape of a scalar parameter, too, and must not be cut.
                if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
                    # Slices are cut in storage order, which differs from element order for a transposed weight.
                    dense = torch.empty_strided(value.shape, part.strides, dtype=value.dtype, device=value.device)
                    row = dense.copy_(value).as_strided((dense.numel(),), (1,))
                    # Clone the part, because a view would keep the whole state in memory.
                    own[key] = row[part.start : part.start + part.parameter.numel()].clone()
                else:
                    own[key] = value.clone() if isinstance(value, Tensor) else value

    def _converted(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert a state to a dtype. A state of only Adagrad's rounded initial value gets the exact value instead."""
        initial = self._optimizer.defaults.get("initial_accumulator_value")
        if initial and value.dtype != dtype and bool((value == torch.full_like(value, initial)).all()):
            return torch.full_like(value, initial, dtype=dtype)
        return value.to(dtype)


class _WaitingParams(list[Any]):
    """The ``params`` list of a group, which waits before it hands out tensors that a step or refresh may still use.

    Reading other entries of the group, such as the learning rate that a scheduler sets after a step, does not wait.
    """

    def __init__(self, parameters: list[nn.Parameter], wait: Callable[[], None] | None) -> None:
        super().__init__(parameters)
        self._wait = wait

    def __iter__(self) -> Iterator[Any]:
        if self._wait is not None:
            self._wait()
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        if self._wait is not None:
            self._wait()
        return super().__getitem__(key)

    def __reduce__(self) -> Any:
        # Pickle a plain list, because ``_wait`` refers to the engine, which cannot be pickled.
        return list, (list(self),)


def _divided(buffer: FlatBuffer) -> Iterator[Fragment]:
    """Yield the parts of parameters in a shard, split where the device's part ends and the host's part begins."""
    for fragment in buffer.fragments():
        numel = fragment.stop - fragment.start
        here = min(max(buffer.tiers.device_numel - fragment.offset, 0), numel)
        if here:
            yield replace(fragment, stop=fragment.start + here)
        if here < numel:
            yield replace(fragment, start=fragment.start + here, offset=fragment.offset + here)


def _cut(buffer: FlatBuffer, fragment: Fragment, unit: int, position: int) -> Slice:
    gradient = buffer.gradient
    assert gradient is not None
    # The parameter is a view, so a step writes the main weights directly.
    parameter = nn.Parameter(buffer.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start])
    slot = buffer.layout.slots[fragment.slot]
    place = (unit, position, buffer, fragment.offset, fragment.start, slot.strides)
    part = Slice(slot.name, *place, parameter, parameter, parameter, gradient)
    part.cut_gradient()
    return part


def _stand_in(device: torch.device, dtype: torch.dtype, kind: type[nn.Parameter], numel: int = 1) -> Slice:
    """Return a slice that belongs to no weight: a marker, or a stand-in on a rank without slices."""
    parameter, gradient = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    return Slice(NOTHING, -1, 0, None, 0, 0, (), kind(parameter), gradient, gradient, None)


class _Marker(OwnStates):
    """A parameter at the end of a group that detects edits; see [Note: edits of slices].

    Attributes:
        replaced: True if ``.data`` was set.
    """

    replaced = False
    _reached: Tensor | None = None  # the tensor that ``.data`` returns
    _versions = (0, 0)

    @property
    def data(self) -> Tensor:
        """A plain tensor, as for any parameter. Its version shows if the tensor was written."""
        # Return the same tensor each time: torch's own ``.data`` has a new version counter at each access.
        if self._reached is None:
            # Leave inference mode, because a tensor created in it has no version.
            with torch.inference_mode(False):
                self._reached = self.detach().clone()
        return self._reached

    @data.setter
    def data(self, value: Tensor) -> None:
        self.replaced = True

    @property
    def edited(self) -> bool:
        """True if the user has written to the marker since :meth:`accept_edits`."""
        return self.replaced or self._versions != self._now()

    def accept_edits(self) -> None:
        """Record that all edits made so far have been handled."""
        self.replaced = False
        self._versions = self._now()

    # Copies and pickled markers become plain parameters, because they take no part in training.

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach()).__reduce_ex__(protocol)

    def _now(self) -> tuple[int, int]:
        return self._version, 0 if self._reached is None else self._reached._version


class _AwaitedMarker(_Marker):
    """A marker that waits like its group's list. torch's C++ code reads a group's list without calling its methods."""

    wait: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait before an operation on a list of tensors."""
        with unguarded():
            if func.__name__.startswith("_foreach_") and args:
                for each in args[0]:
                    if isinstance(each, _AwaitedMarker):
                        each.wait()
            return func(*args, **(kwargs or {}))
