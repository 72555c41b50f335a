"""One flat buffer's gradient: where autograd leaves it, held back, on its way, and summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zeropp.comm.streams import Stage, used_here
from zeropp.partition.layout import BufferLayout, Fragment
from zeropp.wire.codecs import BlockCodec, Feedback
from zeropp.wire.paths import GatherPath, ReducePath
from zeropp_kernels import block_table
from zeropp_kernels.reference import sum_messages_

__all__ = ["Gradient", "GradientPaths"]


@dataclass(frozen=True)
class GradientPaths:
    """How a gradient travels.

    Attributes:
        hold: from whole gradients to the level at which those of several backwards are summed before they go on.
        rest: from there to a piece for every rank.
        straight: both, for gradients that are not held.
        replicas: from pieces back to slices at the level of the states, where that is not the last; else None.
    """

    hold: ReducePath
    rest: ReducePath
    straight: ReducePath
    replicas: GatherPath | None

    @property
    def held(self) -> int:
        """Level at which gradients are held."""
        return self.hold.outer

    @property
    def links(self) -> list[str]:
        """Of the stages of a reduction."""
        return [*self.straight.links, *(self.replicas.links if self.replicas is not None else ())]


class Gradient:
    """Sums of one flat buffer's gradients.

    Attributes:
        shard: [numel / states] accumulated gradient in the main dtype, what the optimizer reads.
        arrived: whether ``shard`` holds anything yet.
        trained: whether each parameter is to have one; those with ``requires_grad`` taken away after wrapping are not.
        held: [numel / held level] sum of backwards that are to be sent on later, main dtype, or None.
    """

    def __init__(
        self,
        unit: str,
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        main_dtype: torch.dtype,
        paths: GradientPaths,
    ) -> None:
        self.unit = unit
        self.parameters = tuple(parameters)
        self.layout = layout
        self.dtype = main_dtype
        self.device = parameters[0].device
        self.paths = paths
        self.placement = paths.straight.placement
        self.shard = torch.zeros(layout.numel // self.placement.mode.states, dtype=main_dtype, device=self.device)
        self.arrived = False
        self.trained = (True,) * len(self.parameters)
        self.held: Tensor | None = None
        self._holds = 0  # backwards in ``held``
        self._scaled = 1.0  # by which the last message is smaller than what it carries
        self._table = None
        if isinstance(paths.straight.codec, BlockCodec):
            numels, offsets = [slot.numel for slot in layout.slots], [slot.offset for slot in layout.slots]
            self._table = block_table(numels, offsets, layout.numel, device=self.device)
        # Rotated codes spread their error over whole blocks, padding included, which norms must not see.
        rotates = any(isinstance(leg.codec, BlockCodec) and leg.codec.rotate for leg in paths.straight.legs)
        self._padding = self._find_padding() if rotates else []

    @property
    def feedbacks(self) -> list[Feedback]:
        """Errors that are fed back, of each hop that has some."""
        return [leg.feedback for leg in self.paths.straight.legs if leg.feedback is not None]

    # From autograd to a message.

    def pack(self, *, hold: bool) -> Tensor | None:
        """This rank's whole gradient as one message in the wire dtype; takes ``.grad``.

        Args:
            hold: for a backward after which others follow before anything goes on. Where nothing is sent then, the
                gradient is added to what is held, and there is no message.
        """
        gradients = self._take()
        path = self.paths.straight
        if self.paths.held == 1 and (hold or self.held is not None):
            whole = self._hold_whole(gradients)
            if hold:
                return None
            self._scaled = path.codec.headroom(self._holds)
            message = path.empty(self.layout.numel, self.device)
            path.encode_(message, whole if self._scaled == 1.0 else whole * self._scaled)
            self.held, self._holds = None, 0
            return message
        self._scaled = 1.0
        message = path.empty(self.layout.numel, self.device)
        path.pack_(message, gradients, self.layout, self._table)
        return message

    def _take(self) -> list[Tensor | None]:
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return gradients

    def _hold_whole(self, gradients: list[Tensor | None]) -> Tensor:
        """Add to the held sum without rounding to the wire dtype."""
        if self.held is None:
            self.held = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self._holds += 1
        views = self.layout.views(self.held)
        present = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if present:
            torch._foreach_add_([view for view, _ in present], [g.to(self.dtype) for _, g in present])
        return self.held

    # From messages to a sum; on the lanes of reductions.

    def stages(self, message: Tensor, scale: float, *, hold: bool) -> list[Stage]:
        """What sums every rank's message, with what is held, into the shard; or into what is held.

        Which of it is to be done is known when it runs: a backward before may still be on its way.
        """
        links = self.paths.links
        left: list[Stage] = []
        scale /= self._scaled  # now: another message may be packed before this one's stages run

        def work(number: int) -> None:
            if number == 0:
                self._choose(left, message, scale, hold=hold)
            while left and left[0][0] == links[number]:
                left.pop(0)[1]()

        return [(link, partial(work, number)) for number, link in enumerate(links)]

    def reduce(self, message: Tensor, scale: float, *, hold: bool) -> None:
        """All stages, one after the other."""
        for _, work in self.stages(message, scale, hold=hold):
            work()

    def _choose(self, left: list[Stage], message: Tensor, scale: float, *, hold: bool) -> None:
        """Add to ``left`` what is to be done."""
        paths = self.paths
        if not hold and self.held is None:
            left.extend(self._finish(paths.straight, message, self.layout.numel, scale))
            return
        fresh = self.held is None
        if self.held is None:
            self.held = torch.empty(self.layout.numel // paths.held, dtype=self.dtype, device=self.device)
        held = self.held

        def go_on() -> None:
            used_here(held)
            self._holds += 1
            if not hold:
                left.extend(self._send_on(held, scale))

        left.extend(
            paths.hold.stages(
                message, self.layout.numel, held, scale=1.0, accumulate=lambda: not fresh, unit=self.unit
            )
        )  # fmt: skip
        left.append((paths.hold.links[-1], go_on))

    def _send_on(self, held: Tensor, scale: float) -> list[Stage]:
        """What is held goes the rest of the way."""
        paths = self.paths
        headroom = paths.straight.codec.headroom(self._holds * paths.held)
        message = paths.rest.empty(held.numel(), self.device)
        paths.rest.encode_(message, held if headroom == 1.0 else held * headroom)
        self.held, self._holds = None, 0
        (link, first), *others = self._finish(paths.rest, message, held.numel(), scale / headroom)
        return [(link, partial(_also, first, (message,))), *others]

    def _finish(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> list[Stage]:
        """The last hops, and back from pieces to the level of the states where there are replicas."""
        replicas, unit = self.paths.replicas, self.unit
        if replicas is None:
            stages = path.stages(
                message, numel, self.shard, scale=scale, accumulate=lambda: self.arrived, unit=unit
            )  # fmt: skip
            return [*stages, (stages[-1][0], self._arrive)]
        piece = torch.empty(self.layout.piece_numel, dtype=self.dtype, device=self.device)
        whole = replicas.empty(self.shard.numel(), self.device)
        headroom = path.codec.headroom(self.layout.world)

        def add() -> None:
            sum_messages_([whole], self.shard, scale=scale / headroom, accumulate=self.arrived)
            self._arrive()

        there = path.stages(message, numel, piece, scale=headroom, accumulate=lambda: False, unit=unit)
        back = replicas.stages(piece, replicas.places(whole), unit)
        kept = [(link, partial(_also, work, (piece, whole))) for link, work in [*there, *back]]
        return [*kept, (back[-1][0], add)]

    def _arrive(self) -> None:
        if self._padding:
            torch._foreach_zero_([self.shard[start:stop] for start, stop in self._padding])
        self.arrived = True
        if self.feedbacks and not all(self.trained):
            self.clear([not trained for trained in self.trained])

    def clear(self, unused: Sequence[bool]) -> None:
        """Zero the shard of some parameters: what earlier steps have carried arrives for those without gradient, too.

        Norms and clipping must not see it.
        """
        for fragment in self._fragments(self.placement.mode.states):
            if unused[fragment.slot]:
                self.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()

    # What is there, and forgetting it.

    def has_unsent(self) -> bool:
        """Whether this rank holds gradients that no reduction has brought to the shards."""
        return self.held is not None or self.has_stray()

    def has_stray(self) -> bool:
        """Whether gradients came that the known sequence did not expect."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(parameter.grad is not None for parameter in self.parameters)

    def forget(self) -> None:
        """Forget what was sent or held; gradients that autograd is just bringing stay."""
        self.arrived = False
        self.held, self._holds = None, 0

    def forget_unsent(self) -> None:
        """Forget what has not been sent."""
        self.held, self._holds = None, 0
        self.forget_stray()

    def forget_stray(self) -> None:
        """Forget what autograd has brought and nothing has taken."""
        self._take()

    def forget_one(self, parameter: nn.Parameter) -> None:
        """Forget one parameter's gradient, sent or not."""
        for values, level in ((self.shard, self.placement.mode.states), (self.held, self.paths.held)):
            if values is not None:
                for fragment in self._fragments(level):
                    if self.parameters[fragment.slot] is parameter:
                        values[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = None

    def _find_padding(self) -> list[tuple[int, int]]:
        """Where the shard holds no parameter."""
        ends = [0]
        starts = []
        for fragment in self._fragments(self.placement.mode.states):
            starts.append(fragment.offset)
            ends.append(fragment.offset + fragment.stop - fragment.start)
        starts.append(self.shard.numel())
        return [(start, stop) for start, stop in zip(ends, starts, strict=True) if start < stop]

    def _fragments(self, level: int) -> list[Fragment]:
        return self.layout.fragments(self.placement.chain.slice_index(self.placement.rank, level), level)


def _also(work: Callable[[], None], tensors: Sequence[Tensor]) -> None:
    """Work that uses memory which another stage has allocated."""
    for tensor in tensors:
        used_here(tensor)
    work()
