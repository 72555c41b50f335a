"""A parameter before its model is wrapped: built whole, then kept in equal pieces by the ranks of a group."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from zeropp._extensions import extensions
from zeropp.params.guard import GuardHandler, guard, nothing, register, unguard, unregister
from zeropp.partition.layout import dense_strides

__all__ = ["Fetcher", "Piece", "dense_row", "piece_of"]


class Fetcher(Protocol):
    """Who brings the pieces of a parameter together: `zeropp.params.spread`, seen from here."""

    rank: int
    world: int

    def touch(self, parameter: nn.Parameter, piece: Piece) -> None:
        """Make the values present, on every rank; refused where ranks need not be at the same place."""
        ...

    def let_go(self) -> None:
        """A use of touched values is over."""
        ...


class Piece(GuardHandler):
    """This rank's piece of one parameter, and the object that gathers it.

    See :class:`zeropp.params.guard.GuardHandler`.

    Attributes:
        fetcher: of the group.
        name: class of the module and name in it, since the model's names are not known yet.
        row: [ceil(numel / world)] of the values in the order of memory, the end padded with zeros, where they are
            partitioned; None while they are whole.
        awaited: there are no values, they are to be loaded once the model is wrapped.
        lent: somebody has the whole values, to read or to edit.
    """

    def __init__(self, fetcher: Fetcher, name: str, *, awaited: bool = False) -> None:
        self.fetcher = fetcher
        self.name = name
        self.row: Tensor | None = None
        self.awaited = awaited
        self.lent = False
        self.strides: tuple[int, ...] = ()

    def tie(self, parameter: nn.Parameter) -> None:
        """Let a parameter own this; nothing else does, so it goes with the parameter."""
        parameter._zeropp_piece = self  # type: ignore[attr-defined]
        # Without values there is no part of them; and a weak reference would keep it from being given memory.
        if not self.awaited:
            self._tell_extensions(parameter)

    def untie(self, parameter: nn.Parameter) -> None:
        """Its values are somebody else's from now on."""
        del parameter._zeropp_piece  # type: ignore[attr-defined]
        for extension in extensions():
            extension.parameter_freed(parameter)

    def _tell_extensions(self, parameter: nn.Parameter) -> None:
        for extension in extensions():
            extension.piece_changed(parameter, self)

    def count(self, numel: int) -> int:
        """Elements of a rank's piece, padding included."""
        return -(-numel // self.fetcher.world)

    def hide(self, parameter: nn.Parameter, row: Tensor) -> None:
        """Let go of whole values; ``row`` is this rank's piece of them."""
        self.row = row
        self.strides = dense_strides(tuple(parameter.shape), parameter.stride())
        # On the device it was built on, where random numbers are drawn if it is initialised once more.
        # It may have got another shape since it was begun.
        self._tell_extensions(parameter)
        stand_in = nothing(parameter.dtype, parameter.device).expand(parameter.shape)
        register(parameter, self.name, self, self.strides, parameter.dtype)
        parameter.data = stand_in
        guard([parameter])

    def show(self, parameter: nn.Parameter, values: Tensor, *, lent: bool = False) -> None:
        """Let a parameter have whole values; ``lent`` for a while, after which the piece serves again."""
        unguard([parameter])
        parameter.data = values
        if not lent:
            self.row = None
            unregister(parameter)

    def lend(self, parameter: nn.Parameter) -> None:
        """Somebody has the whole values, which the parameter shows already."""
        self.lent = True
        self._tell_extensions(parameter)

    def take_back(self, parameter: nn.Parameter) -> None:
        """End of a loan; where there is a row, let go of the values, of which it still has its part."""
        self.lent = False
        self._tell_extensions(parameter)
        if self.row is None:
            return
        parameter.data = nothing(parameter.dtype, parameter.device).expand(parameter.shape)
        guard([parameter])

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"parameter {self.name!r} was built to be partitioned over ranks, and cannot be pickled; wrap its model by "
            "a ZeroOptimizer, and save with zeropp.checkpoint or zeropp.full_state(model)"
        )

    # What the guard asks.

    def fetch_touched(self, parameter: nn.Parameter) -> bool:
        self.fetcher.touch(parameter, self)
        return True

    def use_ended(self) -> None:
        self.fetcher.let_go()

    def has_pending_gradients(self) -> bool:
        return False

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        pass

    def note_requires_grad(self, parameter: nn.Parameter, trained: bool) -> None:
        pass

    def take_loaded(self, parameter: nn.Parameter, values: Tensor) -> bool:
        return False

    def local_values(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the values, without padding."""
        count, numel = self.count(parameter.numel()), parameter.numel()
        start = min(self.fetcher.rank * count, numel)
        own = min(count, numel - start)
        # Lent values are somebody's to edit, and the row is what there is until they are given back.
        if self.row is not None:
            return self.row[:own]
        return dense_row(parameter.data)[0][start : start + own]


def piece_of(parameter: Tensor) -> Piece | None:
    """The piece of a parameter that was built to be partitioned and that no engine manages yet."""
    return parameter.__dict__.get("_zeropp_piece")


def dense_row(values: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The values in the order of memory, [numel], and the strides they have there; a view where they are dense."""
    strides = dense_strides(tuple(values.shape), values.stride())
    if strides == values.stride() and values.numel():
        return values.as_strided((values.numel(),), (1,)), strides
    dense = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)
    return dense.as_strided((dense.numel(),), (1,)), strides
