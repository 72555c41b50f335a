"""Slice parameters: what the wrapped optimizer sees of the model on this rank.

[Note: edits of slices] Users edit weights between steps in the tensors of ``optimizer.param_groups``, as SAM, weight
noise and shrink-and-perturb do. These are the main weights. What is cached of them must be renewed before the next
forward, and a renewal is collective; but a rank sees edits of its own slices only, and may have no slice of what was
edited. Therefore each group ends with two markers on every rank: tensors of two zeros, which are part of no weight and
are never stepped. A loop over all tensors of a group edits the markers, too, so every rank knows of it, and all of them
renew what they cache. Markers also notice edits by ``.data``, of which the version of a slice says nothing. An edit of
some tensors leaves the markers alone. If a forward then computes with what is cached, the next step is refused on every
rank; by ``.data`` it goes unnoticed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp._compat import unguarded
from zeropp.config.base import warn_user
from zeropp.engine.accumulation import PendingGradients
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import trial_states
from zeropp.optimizer.partial_gradient import MARKER_GRADIENT, NOTHING, as_partial
from zeropp.params.gradient import Gradient
from zeropp.params.guard import handler_of, is_managed
from zeropp.params.unit import FlatBuffer, Unit
from zeropp.partition.levels import Fragment

__all__ = ["ShardedParams", "Slice", "SliceStates"]

_MARKERS = 2  # in each group: an edit of a single entry, by its index, is not to pass for one of all
_MARKER_NUMEL = 2  # a loop that leaves out tensors of one element edits markers, too


# Compared by identity, since == on tensors compares elements.
@dataclass(eq=False)
class Slice:
    """One parameter's part in this rank's piece of a flat buffer.

    Attributes:
        name: of the model's parameter.
        unit: index of its unit; -1 for a stand-in.
        position: of the parameter among the unit's trainable ones.
        buffer: that it is a part of; None for a stand-in.
        offset: in the buffer's shard.
        start: first element of the parameter, in storage order.
        strides: of the parameter.
        parameter: 1-D leaf in the main dtype, a view of the main shard.
        gradient: view of the gradient shard.
        seen: the same as the groups show it; where ranks have parts of it, one that refuses norms.
        source: the gradient that it is a view of; None for a stand-in.
        shown: whether the optimizer was given the gradient, so that its absence is the user's doing.
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
        """The slice's place in the main shard."""
        assert self.buffer is not None
        return self.buffer.shard[self.offset : self.offset + self.gradient.numel()]

    @property
    def on_host(self) -> bool:
        """True if the host's cores step this slice, provided that they have a step of its optimizer."""
        return self.buffer is not None and self.offset >= self.buffer.tiers.device_numel

    @property
    def arrived(self) -> bool:
        """True if the view holds a gradient of this step."""
        return self.source is not None and self.source.arrived

    @property
    def is_replaced(self) -> bool:
        """True if the user has put a gradient in place of ours."""
        found = self.parameter.grad
        return found is not None and (found is not self.seen or found.data_ptr() != self.gradient.data_ptr())

    def take_edit(self) -> None:
        """Take over a gradient that the user has put in place of ours, or taken away."""
        found = self.parameter.grad
        if found is None:
            # Norms are computed over the gradient shard, where a removed gradient must count as nothing.
            self.gradient.zero_()
            self.shown = False
            return
        # Edits in place need no copy: the gradient that is shown is a view of the shard, unless ``.data`` was set.
        if found is self.seen and found.data_ptr() == self.gradient.data_ptr():
            return
        if self.source is not None:
            self.source.begin_sum()  # nothing may have come to the shard in this step
        self.gradient.copy_(found)
        self.seen.data = self.gradient
        # Ours again: clipping writes to it, and is not to be undone by the user's tensor later.
        self.parameter.grad = self.seen
        self.shown = True

    def show_gradient(self, present: bool) -> None:
        """Give the optimizer the gradient, or none, as torch has it for unused parameters."""
        self.parameter.grad = self.seen if present else None
        self.shown = present


class ShardedParams:
    """This rank's slices, in the place of the optimizer's parameters, state included.

    Attributes:
        given: the model's parameters in each group, whose place slices have taken.
        stepped: slices that the optimizer steps; the model may have trainable parameters besides. Never empty.
        buffers: that slices are parts of.
        divided: whether ranks have different slices.
        markers: the last two entries of each group: see [Note: edits of slices].
        accumulated: names of slices to which autograd has brought gradients, as of a penalty that was computed with the
            tensors of the groups.
    """

    def __init__(
        self, optimizer: Optimizer, units: tuple[Unit, ...], device: torch.device, wait: Callable[[], None] | None
    ) -> None:
        """Put slices into the groups; ``wait``, where it is given, before they are taken out by the user."""
        self._optimizer = optimizer
        self._wait = wait
        self._units = units
        self._device = device
        self.given: list[list[nn.Parameter]] = []
        # By the ids of trainable parameters: == on tensors compares elements.
        self._cut: dict[int, list[Slice]] = {}
        self._stand_in: Slice | None = None
        # States that the optimizer had for parameters which are frozen.
        self._states: dict[int, dict[str, Any]] = {}
        self.stepped: list[Slice] = []
        self.buffers: list[FlatBuffer] = []
        # Else every rank has all slices, and sees every edit by itself.
        self.divided = any(b.placement.mode.states > 1 for unit in units for b in unit.buffers)
        self._marks: list[list[Slice]] = []  # of each group
        self.accumulated: list[str] = []
        self._hidden = self._kept_away = False
        self.assign()
        self._hook_state_dicts()

    # Parameters made in inference mode could not be stepped outside of it.
    @torch.inference_mode(False)
    def assign(self) -> None:
        """Cut what has not been cut yet, and put the slices into the groups; also into groups added since.

        Raises:
            RuntimeError: a group was taken away.
        """
        groups = self._optimizer.param_groups
        if len(groups) < len(self.given):
            raise RuntimeError(
                f"the optimizer had {len(self.given)} parameter groups and has {len(groups)} now; groups cannot be "
                "taken away, set their lr to 0 or freeze their parameters with requires_grad_(False)"
            )
        # Groups added since still hold the model's parameters.
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
            # In place: schedulers and the user hold the groups.
            group["params"] = _Listed([part.parameter for part in parts], self._wait)
            # torch keeps names beside the parameters if the optimizer was made from named_parameters().
            if "param_names" in group:
                group["param_names"] = [part.name for part in parts]
            stepped += parts
        if self._stand_in is not None:
            # It left the groups above, and its state would be saved without a parameter.
            self._optimizer.state.pop(self._stand_in.parameter, None)
        if not stepped:
            # This rank owns no part of the model, and GradScaler raises where it finds no gradient at all.
            stepped.append(self._add_stand_in())
        self.stepped = stepped
        self.buffers = [buffer for unit in self._units for buffer in unit.trainable_buffers]
        self._add_markers()
        # By the exact type: after a later group this is a SliceStates already, which derives from it.
        if type(self._optimizer.state) is defaultdict:
            self._optimizer.state = SliceStates(self._optimizer.state.default_factory, self._optimizer.state)
            self._optimizer.state.slices = weakref.ref(self)

    def show_trained(self) -> None:
        """Give slices the ``requires_grad`` of their parameters, as loops over the groups ask for it."""
        for part in self.stepped:
            part.parameter.requires_grad_(part.unit < 0 or self._units[part.unit].trained[part.position])

    @property
    def markers(self) -> list[Slice]:
        """See the class."""
        return [marker for group in self._marks for marker in group]

    def _add_markers(self) -> None:
        groups = self._optimizer.param_groups
        while len(self._marks) < len(groups):
            # As the slices are, or sums over all tensors of a group would be of two dtypes.
            buffers = [buffer for unit in self._units for buffer in unit.trainable_buffers]
            dtype = buffers[0].main_dtype if buffers else torch.float32
            kind = _Marker if self._wait is None else _AwaitedMarker
            marks = [_stand_in(self._device, dtype, kind, _MARKER_NUMEL) for _ in range(_MARKERS)]
            for marker in marks:
                marker.parameter.state = {}  # type: ignore[attr-defined]
                if self._wait is not None:
                    marker.parameter.wait = self._wait  # type: ignore[attr-defined]
            if self.divided:
                # Norms are refused by them, too: a rank may have no slice in a group.
                marks = [replace(marker, seen=as_partial(marker.gradient)) for marker in marks]
            for marker in marks:  # a rank may have no slice in a group
                self._watch(marker)
            self._marks.append(marks)
        for group, marks in zip(groups if not self._hidden else [], self._marks, strict=False):
            group["params"] += [marker.parameter for marker in marks]
            if "param_names" in group:
                group["param_names"] += [marker.name for marker in marks]

    def marker_state(self, marker: nn.Parameter) -> dict[str, Tensor]:
        """A state for loops over all tensors of a group: zeros, under the keys that slices have after a step."""
        for group, marks in zip(self._optimizer.param_groups, self._marks, strict=False):
            if any(marker is each.parameter for each in marks):
                made = trial_states(self._optimizer, group, marker.dtype)
                return {key: torch.zeros_like(marker if value.ndim else value) for key, value in made.items()}
        return {}

    @contextlib.contextmanager
    def without_markers(self) -> Iterator[None]:
        """Take markers out of the groups, and what the user keeps for them out of the state: neither is to be saved."""
        self._remove_markers()
        self._kept_away = True
        try:
            yield
        finally:
            self._kept_away = False
            self._return_markers()

    def _remove_markers(self) -> None:
        for group, marks in zip(self._optimizer.param_groups, self._marks if not self._hidden else (), strict=False):
            # Markers come last in a group, behind all slices.
            del group["params"][-len(marks) :]
            if "param_names" in group:
                del group["param_names"][-len(marks) :]
            for marker in marks:
                marker.parameter.state.update(self._optimizer.state.pop(marker.parameter, {}))  # type: ignore[attr-defined]
        self._hidden = True

    def _return_markers(self) -> None:
        # torch's hooks call this inside without_markers() as well, where markers have to stay away.
        if self._hidden and not self._kept_away:
            self._hidden = False
            self._add_markers()

    def _hook_state_dicts(self) -> None:
        """Do without markers in state dicts of the wrapped optimizer itself, too."""
        # Weakly: the optimizer is part of this object.
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
        """Tell whether the user has edited all of some group since :meth:`accept_edits`; alike on every rank."""
        return any(all(marker.parameter.edited for marker in marks) for marks in self._marks)  # type: ignore[attr-defined]

    def accept_edits(self) -> None:
        """Weights are new, and all edits made so far are in them."""
        for marker in self.markers:
            marker.parameter.accept_edits()  # type: ignore[attr-defined]

    def take_replaced(self) -> bool:
        """Take over values that the user has put in place of slices, by ``parameter.data = values``.

        As in plain torch, tensors that the user took from ``parameter.data`` before keep their values: main weights
        move to other memory, unless they are in a file.

        Returns:
            Whether some have moved.
        """
        # Asked of markers, since looking at the address of every slice would cost host time at each forward.
        return self.is_edited() and self._take(self._replaced())

    def take_rest(self) -> list[str]:
        """Take over what :meth:`take_replaced` has not seen, of some tensors of a group; their names."""
        replaced = self._replaced()
        self._take(replaced)
        return [part.name for part in replaced]

    def take_assigned(self) -> None:
        """Take over values that the optimizer's step has put in place of slices."""
        self._put_back(self._replaced())

    def _replaced(self) -> list[Slice]:
        """Slices that are not in their places."""
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
        """Tell whether the user has edited something of all tensors in some group since :meth:`accept_edits`."""
        return any(marker.parameter.edited for marker in self.markers)  # type: ignore[attr-defined]

    @property
    def all(self) -> list[Slice]:
        """This rank's slices of all trainable parameters."""
        return [part for parts in self._cut.values() for part in parts]

    def frozen_states(self) -> dict[str, dict[str, Any]]:
        """States that wait until frozen parameters are trained, by the parameters' names."""
        return {name: self._states[id(p)] for name, p in self._frozen() if id(p) in self._states}

    def keep_frozen_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Take saved states of frozen parameters."""
        self._states = {id(p): states[name] for name, p in self._frozen() if name in states}

    def forget_state(self, parameter: nn.Parameter) -> None:
        """Drop this rank's part of a parameter's optimizer states, as if none had been made.

        Raises:
            KeyError: the parameter is in no group.
        """
        if not self.in_groups(parameter):
            raise KeyError("the parameter is in none of the optimizer's groups")
        # States of a frozen parameter wait here, those of a trained one are in the optimizer.
        self._states.pop(id(parameter), None)
        for part in self._cut.get(id(parameter), []):
            self._optimizer.state.pop(part.parameter, None)

    def _frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        for unit in self._units:
            for buffer in unit.buffers:
                if not buffer.trainable:
                    yield from zip(buffer.names, buffer.parameters, strict=True)

    def take_edits(self, pending: PendingGradients) -> bool:
        """Take over gradients that the user has replaced or removed since they were shown.

        Args:
            pending: is told of them.

        Returns:
            Whether the gradients of all groups were removed, by their markers: the same on every rank.
        """
        pending.looks += 1
        shown = [part for part in self.stepped if part.shown]
        made = [part for part in self.stepped if not part.shown and part.parameter.grad is not None]
        made = [part for part in made if part.source is not None]
        with unguarded():  # it looks at addresses, which a gradient that refuses norms would look up in Python
            # Of a parameter that nothing used, zeros may be shown; what the user puts in their place is a gradient. If
            # there is more than zeros, another rank has used the parameter, or carried errors have come to it.
            unused = [part for part in shown if part.source is not None and not pending.used[part.unit][part.position]]
            zeros = [part for part in unused if part.is_replaced and not part.gradient.any()]
            for part in (*made, *shown):
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
            pending.learn_removed(())  # every rank has found the same
        return all(mark.shown and mark.parameter.grad is None for mark in self.markers)

    def show_arrived(self, pending: PendingGradients) -> Slice:
        """Show what has arrived; returns a slice that is shown, if need be one of zeros."""
        self._return_markers()  # a state that could not be loaded has left them away
        for part in self.stepped:
            part.show_gradient(part.arrived and not (pending.removed and self._is_gone(part, pending)))
        shown = next((part for part in self.stepped if part.shown), None)
        if shown is None:
            shown = self.stepped[0]
            shown.gradient.zero_()  # nothing here: what it holds is of another step
            shown.show_gradient(True)
        self.show_markers(True)
        return shown

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """Show none of a parameter, whose gradient was set to None by way of the model."""
        for part in self._cut.get(id(parameter), []):
            part.show_gradient(False)

    def _is_gone(self, part: Slice, pending: PendingGradients) -> bool:
        """Tell whether the user has taken a gradient away that no rank has brought since, as far as can be seen."""
        return pending.is_gone(part.unit, part.position) and not bool(part.gradient.any())

    def show_zeros(self, pending: PendingGradients) -> None:
        """Show gradients that were set to zero, and no others; all were set to zero or forgotten."""
        self.accumulated.clear()
        zeros = False
        for part in self.stepped:
            if part.shown:  # some rank has brought one since the user took it away, which zeros could not tell
                pending.removed.pop((part.unit, part.position), None)
            kept = part.arrived and not (pending.removed and self._is_gone(part, pending))
            part.show_gradient(kept)
            zeros |= kept
        self.show_markers(zeros)

    def show_markers(self, present: bool) -> None:
        """Give markers tiny gradients, or none: where slices have theirs, but for the step itself."""
        for marker in self.markers:
            if present:
                # The user may have written to it. It is not zero, since some loops set gradients of zero to None.
                marker.gradient.fill_(MARKER_GRADIENT)
            marker.show_gradient(present)

    def show_used(self, used: Sequence[Sequence[bool]]) -> None:
        """Show gradients of the parameters that are to be stepped.

        Args:
            used: for each unit, whether any rank has a gradient of each trainable parameter: slices of one parameter
                lie on several ranks, and are stepped on all or on none.
        """
        for part in self.stepped:
            present = part.unit < 0 or used[part.unit][part.position]
            # Another rank keeps a gradient that was set to zero, and this one has forgotten its part.
            if present and part.source is not None and not part.source.arrived:
                part.gradient.zero_()
            part.show_gradient(present)
        # A step passes over what has no gradient; it would edit markers and make states for them.
        self.show_markers(False)

    def in_groups(self, parameter: Tensor) -> bool:
        """Tell whether a parameter of the model is in one of the groups."""
        return any(parameter is other for given in self.given for other in given)

    def _cut_unit(self, unit: Unit) -> None:
        position = 0
        for buffer in unit.trainable_buffers:
            # Cut before: the optimizer's state hangs on these very slices. A buffer is cut whole.
            if id(buffer.parameters[0]) not in self._cut:
                for parameter in buffer.parameters:
                    self._cut[id(parameter)] = []
                for fragment in _divided(buffer):
                    part = _cut(buffer, fragment, unit.index, position + fragment.slot)
                    self._watch(part)
                    self._cut[id(buffer.parameters[fragment.slot])].append(part)
            position += len(buffer.parameters)

    def _watch(self, part: Slice) -> None:
        """Notice gradients that autograd brings to a slice, or to a marker."""
        # Without a circle: the parameter holds the hook, and the part the parameter.
        accumulated, name = self.accumulated, part.name
        part.parameter.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(name))

    def refuse_accumulated(self) -> None:
        """Refuse gradients of a loss that was computed with tensors of the groups.

        Raises:
            RuntimeError: there are such gradients. They are no part of what ranks sum, and may be lost.
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
        """Cut the state the optimizer has for a parameter the way the parameter was cut; keep it until there is one.

        Tensors of the parameter's shape are cut, everything else is copied to each slice; right for elementwise
        optimizers. All get the dtypes that the optimizer gives them beside main weights: states of a model in 16 bits
        are in 16 bits themselves, and fused steps refuse them there.

        Args:
            parameter: of the model.
            group: that it is in.
            made: the states that the optimizer makes by the group's settings, for each dtype of main weights; filled.
        """
        # By dict's own method: SliceStates refuses the model's parameters.
        state = dict.pop(self._optimizer.state, parameter, None) or self._states.pop(id(parameter), None)
        if not state:
            return
        # Frozen: its state waits for requires_grad_.
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
                # The model may have been elsewhere. Counts of steps stay on the host, unless the step reads them there.
                if isinstance(value, Tensor) and (key != "step" or on_device):
                    value = value.to(part.parameter.device)
                # The count of steps of a scalar parameter has its shape, too, and is no state of elements.
                if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
                    # Pieces are cut in storage order, which for a transposed weight is not the order of its elements.
                    dense = torch.empty_strided(value.shape, part.strides, dtype=value.dtype, device=value.device)
                    row = dense.copy_(value).as_strided((dense.numel(),), (1,))
                    # Cloned, or the state of the whole parameter would stay.
                    own[key] = row[part.start : part.start + part.parameter.numel()].clone()
                else:
                    own[key] = value.clone() if isinstance(value, Tensor) else value

    def _converted(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A state in another dtype; the sum that Adagrad begins with, which it rounds to the parameter's, exactly."""
        initial = self._optimizer.defaults.get("initial_accumulator_value")
        if initial and value.dtype != dtype and bool((value == torch.full_like(value, initial)).all()):
            return torch.full_like(value, initial, dtype=dtype)
        return value.to(dtype)


class _Listed(list[Any]):
    """The ``params`` of a group; whoever takes tensors out of it waits, where a step or a refresh may need them as is.

    Learning rates, which schedulers set right after a step, are elsewhere in the group and wait for nothing.
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
        # A plain list is saved: ``_wait`` leads to the engine, which cannot be pickled.
        return list, (list(self),)


class SliceStates(defaultdict[Any, Any]):
    """The wrapped optimizer's ``state``, whose keys are slices. It takes no parameter of the model for a key.

    ``del state[parameter]`` drops what this rank has of the parameter's states; everything else raises, since nobody
    but the owner of a slice has its state. A step looks slices up by ``state[slice]``, in which no line here takes
    part unless the slice has no state yet.

    Attributes:
        slices: that have the states; set by them.
    """

    slices: weakref.ref[ShardedParams] | None = None

    def __missing__(self, key: Any) -> Any:
        _refuse_of_model(key)
        if isinstance(key, _Marker):  # not in here: it is no state, and is not saved
            owner = None if self.slices is None else self.slices()
            made = {} if owner is None else owner.marker_state(key)
            # Before the first step slices have none, either.
            for name in made.keys() & {name for state in self.values() for name in state}:
                key.state.setdefault(name, made[name])
            return key.state
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_of_model(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        owner = None if self.slices is None else self.slices()
        if isinstance(key, _Marker):
            super().pop(key, None)
            return
        if owner is None or not _is_of_model(key):
            super().__delitem__(key)
            return
        engine = handler_of(key)
        if isinstance(engine, Engine):
            # The host may be stepping with the states; and what is away could not be told from what is forgotten.
            engine.require_idle("del optimizer.state[parameter]", inside_gather=True, needs=["optim_states"])
        owner.forget_state(key)

    def __contains__(self, key: object) -> bool:
        _refuse_of_model(key)
        return super().__contains__(key) or (isinstance(key, _Marker) and bool(self[key]))

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        _refuse_of_model(key)
        return (self[key] or default) if isinstance(key, _Marker) else super().get(key, default)

    def clear(self) -> None:
        """As of a dict."""
        super().clear()
        owner = None if self.slices is None else self.slices()
        for marker in owner.markers if owner is not None else ():
            marker.parameter.state.clear()  # type: ignore[attr-defined]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        _refuse_of_model(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dict."""
        _refuse_of_model(key)
        return super().pop(key, *default)


def _is_of_model(key: object) -> bool:
    return isinstance(key, Tensor) and is_managed(key)


def _refuse_of_model(key: object) -> None:
    if _is_of_model(key):
        _refuse_state_of(key)


def _refuse_state_of(parameter: Any) -> NoReturn:
    engine = handler_of(parameter)
    name = ""
    if isinstance(engine, Engine):
        buffer, index = engine.unit_of[id(parameter)].place_of(parameter)
        name = f" {buffer.names[index]!r}"
    raise RuntimeError(
        f"optimizer.state was asked for the model's parameter{name}, and its keys are slices: this rank's parts of "
        "parameters, the tensors in optimizer.param_groups. For whole states there are, on every rank, "
        "zeropp.training.safe_get_full_optimizer_state(parameter, key) and safe_set_full_optimizer_state(parameter, "
        "value, key), with a key such as 'exp_avg'; del optimizer.state[parameter], on every rank, forgets its states"
    )


def _divided(buffer: FlatBuffer) -> Iterator[Fragment]:
    """Parts of parameters in the shard; what the device steps and what the host does are slices of their own."""
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
    stop = fragment.offset + fragment.stop - fragment.start
    # A view: what the optimizer writes is the main weight itself.
    parameter = nn.Parameter(buffer.shard[fragment.offset : stop])
    slot = buffer.layout.slots[fragment.slot]
    values = gradient.shard[fragment.offset : stop]
    # Where every rank has the whole gradient its norm is the same everywhere, and is not refused.
    seen = as_partial(values) if buffer.placement.mode.states > 1 else values.detach()
    place = (unit, position, buffer, fragment.offset, fragment.start, slot.strides)
    return Slice(slot.name, *place, parameter, values, seen, gradient)


def _stand_in(device: torch.device, dtype: torch.dtype, kind: type[nn.Parameter], numel: int = 1) -> Slice:
    """A slice of nothing, for a rank that owns no part of a tiny model: GradScaler insists on a gradient to look at."""
    parameter, gradient = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    return Slice(NOTHING, -1, 0, None, 0, 0, (), kind(parameter), gradient, gradient, None)


class _Marker(nn.Parameter):
    """A tensor in a group that knows whether it has been edited; see [Note: edits of slices].

    Attributes:
        replaced: whether ``.data`` was set.
        state: that the user keeps for it in ``optimizer.state``, as for all tensors of its group.
    """

    replaced = False
    state: dict[str, Any]
    _reached: Tensor | None = None  # what ``.data`` has given
    _versions = (0, 0)

    @property
    def data(self) -> Tensor:
        """A plain tensor, as of any parameter; its version tells whether it is written to or only read."""
        # A tensor that stays: torch's own ``.data`` has a new version counter at each access, which shows no writes.
        if self._reached is None:
            # A tensor made in inference mode has no version.
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
        """All edits made so far are known."""
        self.replaced = False
        self._versions = self._now()

    # A copy or a file has no part in training.

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach()).__reduce_ex__(protocol)

    def _now(self) -> tuple[int, int]:
        return self._version, 0 if self._reached is None else self._reached._version


class _AwaitedMarker(_Marker):
    """One that waits as its list does, where torch's code takes a group's tensors without asking that."""

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
