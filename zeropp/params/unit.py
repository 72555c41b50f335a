"""One unit's life: sharded, hidden, exposed. The transitions are methods; `zeropp.order` calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from torch import nn

from zeropp.comm.streams import Event, Lanes, Work
from zeropp.offload.home import Place, Row
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient

__all__ = ["TERMS", "Unit", "UnitState"]

TERMS = (
    "main_weights", "gradients", "gradient_norms", "frozen_weights", "wire_weights", "secondary_weights",
    "persistent_weights", "feedback",
)  # fmt: skip
"""The kinds of memory that a unit owns at all times."""


class UnitState(Enum):
    """The state of a unit's values."""

    SHARDED = "sharded"  # only pieces; parameters guarded, storage empty
    HIDDEN = "hidden"  # memory allocated, values there or on their way; parameters guarded
    EXPOSED = "exposed"  # values readable by the model


class Unit:
    """Parameters that are gathered, released and reduced together.

    Attributes:
        index: position in the model; the same on every rank.
        persistent: whether whole weights are cached between uses.
        has_frozen: whether some of its parameters are not trained.
        announced: whether hooks of modules tell of its uses; small persistent parameters are used anywhere.
        users: on this rank, that want it gathered: modules on the call stack, a backward, a touched parameter.
        entered: of these, modules on the call stack.
    """

    def __init__(self, index: int, name: str, buffers: Sequence[FlatBuffer], *, announced: bool = True) -> None:
        self.index = index
        self.name = name
        self.buffers = tuple(buffers)
        # With nothing to fetch, whole values are there at all times, whatever the mode is called.
        self.persistent = all(buffer.paths.fetch is None for buffer in buffers)
        self.announced = announced
        self.state = self._resting
        self.users = self.entered = 0
        self.update_trained()
        # Events of what is queued and has not been waited for.
        self._stepped: Event | None = None
        self._gathered: Event | None = None
        self._refreshed: Event | None = None

    def update_trained(self) -> None:
        """Look again which parameters are trained."""
        self.has_frozen = any(buffer.gradient is None or not all(buffer.gradient.trained) for buffer in self.buffers)

    @property
    def trained(self) -> tuple[bool, ...]:
        """For each parameter of a trainable buffer, true if it is trained."""
        return tuple(trained for gradient in self.gradients for trained in gradient.trained)

    def replace(self, buffer: FlatBuffer, parts: Sequence[FlatBuffer]) -> None:
        """Put parts of a buffer without a gradient in its place, between passes; trainable ones are the last."""
        rest = [other for other in self.buffers if other is not buffer]
        # Behind the rest, since hooks name a parameter by its position among the trainable ones.
        self.buffers = (*rest, *parts)
        # Nothing of the new buffers is gathered, even if the unit was planned to stay.
        self.state = self._resting

    @property
    def _resting(self) -> UnitState:
        """The state of values between passes; whole ones that are cached are only guarded."""
        return UnitState.HIDDEN if self.persistent else UnitState.SHARDED

    @property
    def numel(self) -> int:
        """Elements gathered together, padding included."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters in this unit."""
        return [parameter for buffer in self.buffers for parameter in buffer.parameters]

    @property
    def trainable_buffers(self) -> list[FlatBuffer]:
        """Buffers with a gradient and optimizer states."""
        return [buffer for buffer in self.buffers if buffer.trainable]

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of the trainable buffers."""
        return [buffer.gradient for buffer in self.buffers if buffer.gradient is not None]

    @property
    def version(self) -> int:
        """Newest version of any buffer: steps change trainable weights, loads and edits frozen ones, too."""
        # Frozen buffers stay behind, since an optimizer step gives versions to the trainable ones only.
        return max(buffer.version for buffer in self.buffers)

    def owned_bytes(self, place: Place = "device") -> Iterator[tuple[str, int]]:
        """(term, bytes) of each storage in one place, as it is right now.

        Terms are those in ``TERMS``, "gathered", "held_gradients", and "new_weights" that wait to be sent on.
        """
        rows = [(term, row) for buffer in self.buffers for term, row in _rows(buffer)]
        yield from ((term, row.nbytes) for term, row in rows if row.place == place)
        if place != "device":
            return
        for buffer in self.buffers:
            if buffer.gradient is not None:
                yield "gradient_norms", buffer.gradient.report.nbytes
                for feedback in buffer.gradient.feedbacks:
                    yield "feedback", feedback.state.untyped_storage().nbytes()
                if buffer.gradient.held is not None:
                    yield "held_gradients", buffer.gradient.held.untyped_storage().nbytes()
            if buffer.source is not None and buffer.source.new_nbytes:
                yield "new_weights", buffer.source.new_nbytes
            if buffer.secondary is not None:
                yield "secondary_weights", buffer.secondary.untyped_storage().nbytes()
            if not buffer.paths.shared:
                # Where paths lead nowhere ``flat`` is the shard, which has been counted.
                yield "persistent_weights" if self.persistent else "gathered", buffer.flat.untyped_storage().nbytes()

    def place_of(self, parameter: nn.Parameter) -> tuple[FlatBuffer, int]:
        """The buffer that one of the unit's parameters is in by now, and its index there."""
        for buffer in self.buffers:
            for index, each in enumerate(buffer.parameters):
                if each is parameter:
                    return buffer, index
        raise KeyError(f"unit {self.name!r} has no such parameter")

    def drop_gradient(self, parameter: nn.Parameter) -> int | None:
        """Forget the gradient of one parameter; returns its position among the trainable ones, None if it is frozen."""
        position = 0
        for gradient in self.gradients:
            for other in gradient.parameters:
                if other is parameter:
                    gradient.forget_one(parameter)
                    return position
                position += 1
        return None

    def prepare_gather(self, lanes: Lanes) -> Work:
        """Allocate memory and return the work to queue. A gathered unit takes part again, with the same values.

        Raises:
            RuntimeError: what is cached is of an older version.
        """
        self._check_cached()
        # All buffers of a unit have one mode, so they go over the same links, and share a lane at each step.
        path = self.buffers[0].paths.fetch
        assert path is not None
        # ``release`` frees on the same lane. See [Note: memory on several streams].
        home = lanes.stream(path.links[0])
        for buffer in self.buffers:
            home.allocate(buffer.grow)
        # Gathers read what refreshes write, on other lanes; or where nothing is cached, what is being stepped.
        after = self._stepped if self._refreshed is None else self._refreshed
        return Work(path.links, [buffer.gather(after) for buffer in self.buffers], after=after)

    def note_gather(self, event: Event) -> None:
        """The gather is queued, and done with ``event``."""
        self._gathered = event
        if self.state is UnitState.SHARDED:
            self.state = UnitState.HIDDEN

    @property
    def stale(self) -> bool:
        """True if weights that are cached between uses are of an older version."""
        return any(buffer.stale for buffer in self.buffers)

    def _check_cached(self) -> None:
        # See [Note: cached weights].
        if self.stale:
            versions = [(buffer.cached_version, buffer.version) for buffer in self.buffers]
            raise RuntimeError(
                f"unit {self.name!r} caches weights of old versions, (cached, current) {versions}: no refresh was "
                "issued"
            )

    def refresh(self, lanes: Lanes, differs: Callable[[FlatBuffer], bool]) -> Event:
        """Queue the renewal of what is cached, where weights have changed.

        Args:
            lanes: to queue it on.
            differs: asked there, whether a buffer is renewed by differences.

        Returns:
            Its end.
        """
        # What follows writes where the model would read.
        if self.state is UnitState.EXPOSED:
            self.hide()
        stale = [buffer for buffer in self.buffers if buffer.stale]
        path = stale[0].paths.refresh
        assert path is not None
        for buffer in stale:
            if self.persistent:
                # Memory for the first refresh; from then on it stays.
                lanes.stream(path.links[0]).allocate(buffer.grow)
            # Already, though it is only queued: whoever uses the unit waits for the event first.
            buffer.cached_version = buffer.version
        work = Work(path.links, [buffer.refresh(differs) for buffer in stale], after=self._stepped)
        self._refreshed = lanes.run(work)[-1]
        return self._refreshed

    def note_step(self, event: Event) -> None:
        """Main weights and states are being stepped until ``event``; see [Note: steps on the host]."""
        self._stepped = event

    def under_way(self) -> Iterator[tuple[str, Callable[[float], bool]]]:
        """(what, to wait for it) of what the model's next look at the values has to wait for."""
        # Behind a step comes one of the others, unless the model computes with the main weights themselves.
        if self._stepped is not None and self._refreshed is None and self._gathered is None:
            yield "step", self.wait_stepped
        # Told apart from the gather behind it: it takes other links.
        if self._refreshed is not None:
            yield "refresh", self.wait_refreshed
        if self._gathered is not None:
            yield "gather", self.wait_gathered

    @property
    def stepping(self) -> Event | None:
        """The end of a step that was queued and has not been waited for."""
        return self._stepped

    @property
    def refreshing(self) -> bool:
        """True if a refresh was queued and not waited for."""
        return self._refreshed is not None

    def wait_stepped(self, timeout: float) -> bool:
        """Wait for a step; False after ``timeout`` seconds in vain."""
        if self._stepped is not None:
            if not self._stepped.wait(timeout):
                return False
            self._stepped = None
        return True

    def wait_gathered(self, timeout: float) -> bool:
        """Wait for a gather; False if it did not end in ``timeout`` seconds."""
        if self._gathered is not None:
            if not self._gathered.wait(timeout):
                return False
            # Not after a wait in vain, so that the work is waited for again.
            self._gathered = None
        return True

    def wait_refreshed(self, timeout: float) -> bool:
        """Wait until no refresh reads the main weights any more; False after ``timeout`` seconds in vain."""
        if self._refreshed is not None:
            if not self._refreshed.wait(timeout):
                return False
            self._refreshed = None
        return True

    def expose(self) -> None:
        """Let the model see values that have arrived.

        Raises:
            RuntimeError: they are of an older version.
        """
        if self.state is UnitState.HIDDEN:
            self._check_cached()
            self.state = UnitState.EXPOSED
            with contextlib.ExitStack() as stack:
                for buffer in self.buffers:
                    # Every one, also after one that complains of an edit: the stack runs all, then raises.
                    stack.callback(buffer.expose)

    def hide(self) -> None:
        """Guard the parameters; the values stay where they are."""
        self.state = UnitState.HIDDEN
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                # Every one, as in ``expose``.
                stack.callback(buffer.hide)

    def release(self, lanes: Lanes) -> None:
        """Free the gathered values; they have arrived."""
        if self.state is UnitState.EXPOSED:
            self.hide()
        self.state = UnitState.SHARDED
        for buffer in self.buffers:
            assert buffer.paths.fetch is not None
            # Behind what the model has been given so far, which may still read them on a GPU.
            lanes.stream(buffer.paths.fetch.links[0]).free(buffer.shrink)


def _rows(buffer: FlatBuffer) -> Iterator[tuple[str, Row]]:
    """(term, row) of what need not be on the device."""
    yield "main_weights" if buffer.trainable else "frozen_weights", buffer.main
    if buffer.gradient is not None:
        yield "gradients", buffer.gradient.row
    source = buffer.source
    if source is not None and source.row is not None and source.follows:
        yield "wire_weights", source.row
