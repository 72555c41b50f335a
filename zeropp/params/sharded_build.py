"""Parameters of a model that is being built: sharded over the ranks before there is a layout, and gathered on use.

A :class:`Piece` is this rank's equal part of one parameter. A :class:`ShardedBuild` builds, cuts and gathers the
parameters of one process group.

[Note: building in pieces] Every rank runs the code that builds the model, so every rank comes to the same parameters,
and rank 0's values become everyone's. What is built waits, whole, until there is more of it than a limit; then each
rank keeps its piece. Code that touches a parameter in pieces, on all ranks alike, gets it whole, and the edit is kept:
it waits again. A parameter whose memory something else refers to is not cut, or an edit by that way would be lost.
Small parameters stay whole and are shared at the end. Every collective is preceded by an exchange of what each rank is
about to do, so that ranks which build other models, or fail, are told of by name.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from zeropp._compat import is_aliased
from zeropp._extensions import extensions
from zeropp.comm.collective import BuildComm, Failure
from zeropp.params.guard import GuardHandler, guard, is_managed, nothing, register, unguard, unregister
from zeropp.partition.levels import dense_strides

__all__ = ["Fetcher", "Piece", "ShardedBuild", "dense_row", "is_whole", "piece_of", "take_over"]


class Fetcher(Protocol):
    """Who brings the pieces of a parameter together: `zeropp.params.sharded_build`, seen from here."""

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
        is_gathered: somebody has the whole values, to read or to edit.
    """

    def __init__(self, fetcher: Fetcher, name: str, *, awaited: bool = False) -> None:
        self.fetcher = fetcher
        self.name = name
        self.row: Tensor | None = None
        self.awaited = awaited
        self.is_gathered = False
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

    def piece_numel(self, numel: int) -> int:
        """Elements of a rank's piece, padding included."""
        return -(-numel // self.fetcher.world)

    def reshard(self, parameter: nn.Parameter, row: Tensor) -> None:
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

    def unshard(self, parameter: nn.Parameter, values: Tensor, *, inside_gather: bool = False) -> None:
        """Let a parameter have whole values; ``is_gathered`` for a while, after which the piece serves again."""
        unguard([parameter])
        parameter.data = values
        if not inside_gather:
            self.row = None
            unregister(parameter)

    def begin_gathered(self, parameter: nn.Parameter) -> None:
        """Somebody has the whole values, which the parameter shows already."""
        self.is_gathered = True
        self._tell_extensions(parameter)

    def end_gathered(self, parameter: nn.Parameter) -> None:
        """End of GatheredParameters; where there is a row, let go of the values, of which it still has its part."""
        self.is_gathered = False
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
        count = self.piece_numel(parameter.numel())
        numel = parameter.numel()
        start = min(self.fetcher.rank * count, numel)
        own = min(count, numel - start)
        # Gathered values are somebody's to edit, and the row is what there is until they are given back.
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


LIMIT_NBYTES = 1 << 26
"""Of built parameters that wait to be partitioned, and of small ones that stay whole."""
_MESSAGE_NBYTES = 1 << 25  # of several parameters that are sent together
SMALL = 1 << 16
"""Elements up to which a parameter stays whole."""
_ALONE_NBYTES = 1 << 24  # of a parameter that is sent by itself, from where it lies
_CUTTING = "partitioning what was built"
_ALIGNED = 16  # bytes, where a row of any dtype may begin in a message

_T = TypeVar("_T")


def _can_be_cut(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter has values that can be cut, and is nobody's yet."""
    return (
        # First: a model that was wrapped in the block may be made a part of another, and must not be read.
        not is_managed(parameter)
        and not nn.parameter.is_lazy(parameter)
        and type(parameter.data) is Tensor
        and parameter.is_floating_point()
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and not parameter.is_inference()
    )


class ShardedBuild:
    """The parameters that are built for one group of ranks. See [Note: building in pieces].

    Attributes:
        carrier: between the ranks.
        trains_on: the device that the model will train on, unless it is wrapped with another.
        asked: settings that the configuration must have, too, when the model is wrapped.
        building: while all ranks run the same code.
    """

    def __init__(
        self,
        carrier: BuildComm,
        trains_on: torch.device,
        asked: dict[str, object],
        keep: Callable[[Tensor], Tensor],
    ) -> None:
        """Begin with nothing; ``keep`` brings a row to where pieces lie, and may return it as it is."""
        self.carrier = carrier
        self.rank = carrier.rank
        self.world = carrier.world
        self._keep = keep
        self.trains_on = trains_on
        self.asked = asked
        self.building = False
        self._limit = self._bound = LIMIT_NBYTES
        # By identity, each held until it is cut: which ones there are must not depend on garbage collection.
        self._begun: dict[int, tuple[nn.Parameter, int]] = {}  # with bytes, which a cast may change
        self._waiting: dict[int, nn.Parameter] = {}
        self._small: dict[int, nn.Parameter] = {}
        self._begun_nbytes = self._waiting_nbytes = self._small_nbytes = 0
        self._begins: nn.Module | None = None  # it was given a parameter last
        self._lost = False

    # While the model is built.

    def note_parameter(self, name: str, parameter: nn.Parameter, module: nn.Module) -> None:
        """Take note of a parameter that a module has been given, which it may not have initialised yet."""
        if piece_of(parameter) is not None or not _can_be_cut(parameter):
            return
        # Modules that nothing has yet, such as those of a list that is being made: most of them are built. Of one with
        # many parameters of its own some may not be, and are fetched then.
        if self._begun_nbytes > (2 * self._limit if module is self._begins else self._limit):
            self._end_begun()
            self.let_go()
        self._begins = module
        Piece(self, name).tie(parameter)
        self._begun[id(parameter)] = parameter, parameter.nbytes
        self._begun_nbytes += parameter.nbytes

    def _end_begun(self) -> None:
        for parameter, _ in self._begun.values():
            self._wait(parameter)
        self._begun = {}
        self._begun_nbytes = 0
        self._begins = None

    def ready(self, parameters: Iterable[tuple[str, nn.Parameter, nn.Module]]) -> None:
        """Modules are built, with these parameters: they may be cut, now or later.

        Args:
            parameters: with what they are called in their modules, and these.
        """
        for name, parameter, module in parameters:
            self.note_parameter(name, parameter, module)
            if (begun := self._begun.pop(id(parameter), None)) is not None:
                self._begun_nbytes -= begun[1]
                self._wait(parameter)
        self.let_go()

    def _wait(self, parameter: nn.Parameter) -> None:
        if parameter.numel() <= SMALL and self._small_nbytes + parameter.nbytes <= self._limit:
            self._small[id(parameter)] = parameter
            self._small_nbytes += parameter.nbytes
        else:
            self._waiting[id(parameter)] = parameter
            self._waiting_nbytes += parameter.nbytes

    def let_go(self) -> None:
        """Cut what waits, if it is more than the limit."""
        if self.building and self._waiting_nbytes > self._bound:
            self._cut_waiting(aliased=True)

    def _cut_waiting(self, *, aliased: bool) -> None:
        """Cut what waits; what something else refers to waits on, if ``aliased``."""
        parameters = list(self._waiting.values())
        held = [i for i, p in enumerate(parameters) if _piece(p).is_gathered or (aliased and is_aliased(p))]
        accounts = self.agree(_CUTTING, parameters, held)
        # Whatever any rank holds: when an alias goes may depend on garbage collection.
        kept = {index for account in accounts for index in account}
        self.scatter([p for i, p in enumerate(parameters) if i not in kept])
        self._waiting = {}
        self._waiting_nbytes = 0
        for index in sorted(kept):
            self._wait(parameters[index])
        # Not asked for again at every turn, if they stay.
        self._bound = self._waiting_nbytes + self._limit

    def touch(self, parameter: nn.Parameter, piece: Piece) -> None:
        """A use of a parameter in pieces; see :class:`zeropp.params.sharded_build.Fetcher`.

        Raises:
            RuntimeError: the model is built, so that ranks need not be at the same place.
        """
        if not self.building:
            raise RuntimeError(
                f"parameter {piece.name!r} of shape {tuple(parameter.shape)} was built to be partitioned, and its "
                "values are with all ranks. To train, wrap the model: zeropp.ZeroOptimizer(optimizer, model, config). "
                "To read or edit values use, on every rank, zeropp.zero.GatheredParameters(params, modifier_rank=...). "
                "Wrapping brings it to its device, so leave out model.to(...)"
            )
        self.fetch([parameter])

    def fetch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring together what is in pieces of some parameters, while the model is built."""
        # Who has gathered values reads and edits those.
        wanted = [p for p in parameters if self._has(p) and _piece(p).row is not None and not _piece(p).is_gathered]
        if wanted:
            self.gather(wanted)
            for parameter in wanted:
                self._wait(parameter)

    def _has(self, parameter: nn.Parameter) -> bool:
        piece = piece_of(parameter)
        return piece is not None and piece.fetcher is self

    def finish_build(self) -> None:
        """Nothing is built any more; as :meth:`complete`."""
        try:
            self.complete()
        finally:
            self.end_build()

    def complete(self) -> None:
        """End the building of what is there: whole parameters are cut, small ones made equal on every rank."""
        try:
            self._end_begun()
            self.broadcast(list(self._small.values()))
            self._cut_waiting(aliased=False)
        except BaseException as error:
            self.report_failure(error)
            raise
        self._small = {}
        self._small_nbytes = 0

    def end_build(self) -> None:
        """Nothing is built any more, well or not."""
        self.building = False
        self._begun = {}
        self._waiting = {}
        self._small = {}
        self._begins = None
        self._begun_nbytes = self._waiting_nbytes = self._small_nbytes = 0

    def report_failure(self, error: BaseException) -> None:
        """This rank has failed where others wait for it, or will; tell them."""
        # Who is interrupted does not wait for others; and who has lost them has nobody to tell.
        if not self._lost and isinstance(error, Exception):
            self._lost = True
            # This rank's own error says more than that others have gone.
            with contextlib.suppress(RuntimeError):
                self.carrier.exchange(Failure(f"{type(error).__name__}: {error}"), "building the model")

    def agree(self, doing: str, parameters: Sequence[nn.Parameter], account: _T) -> list[_T]:
        """Every rank's account, before all do something with the same parameters.

        Raises:
            RuntimeError: another rank failed, or is not there.
            ValueError: ranks are at different places.
        """
        try:
            rows = self.carrier.exchange((_describe(parameters), account), doing)
        except RuntimeError:
            self._lost = True
            raise
        for rank, (text, _) in enumerate(rows):
            if text != rows[0][0]:
                self._lost = True
                raise ValueError(
                    f"ranks {self.carrier.ranks[0]} and {self.carrier.ranks[rank]} build different models: at {doing} "
                    f"they have {rows[0][0]}, and {text}. All ranks must build the same model by the same steps"
                )
        return [row[1] for row in rows]

    # Values: scattered, shared, gathered. What may fail comes before ranks agree that they are here.

    def scatter(self, parameters: Sequence[nn.Parameter], source: int = 0) -> None:
        """Cut whole parameters; each rank keeps its piece of the values that the source, a rank of the group, has."""
        for parameter in parameters:
            if parameter.nbytes > _ALONE_NBYTES:
                self._scatter_alone(parameter, source)
        for batch in _batches(p for p in parameters if p.nbytes <= _ALONE_NBYTES):
            self._scatter_jointly(batch, source)

    def _scatter_alone(self, parameter: nn.Parameter, source: int) -> None:
        piece = _piece(parameter)
        carrier = self.carrier
        row, _ = dense_row(parameter.data)
        count = piece.piece_numel(row.numel())
        own = torch.empty(count, dtype=row.dtype, device=carrier.device)
        rows = None
        if carrier.rank == source:
            row = row.to(carrier.device)
            rows = [row[rank * count : (rank + 1) * count] for rank in range(self.world)]
            # The last ones may be short, or empty.
            rows = [
                _bytes(part if part.numel() == count else torch.cat([part, part.new_zeros(count - part.numel())]))
                for part in rows
            ]
        self.agree(_CUTTING, [parameter], None)
        carrier.scatter(_bytes(own), rows, source, _CUTTING)
        piece.reshard(parameter, self._keep(own))

    def _scatter_jointly(self, parameters: Sequence[nn.Parameter], source: int) -> None:
        """Several parameters in one message for each rank."""
        carrier = self.carrier
        places = []
        end = 0
        for parameter in parameters:
            nbytes = _piece(parameter).piece_numel(parameter.numel()) * parameter.element_size()
            places.append((end, nbytes))
            end += -(-nbytes // _ALIGNED) * _ALIGNED
        rows = None
        if carrier.rank == source:
            messages = torch.zeros(self.world, end, dtype=torch.uint8, device="cpu")
            for parameter, (begin, nbytes) in zip(parameters, places, strict=True):
                row, _ = dense_row(parameter.data)
                own = _bytes(row).cpu()
                # Whole rows, and what there is of the next.
                whole = own.numel() // nbytes if nbytes else 0
                there = messages[:, begin : begin + nbytes]
                there[:whole] = own[: whole * nbytes].view(whole, nbytes)
                if own.numel() > whole * nbytes:
                    there[whole, : own.numel() - whole * nbytes] = own[whole * nbytes :]
            rows = list(messages.to(carrier.device).unbind())
        message = torch.empty(end, dtype=torch.uint8, device=carrier.device)
        self.agree(_CUTTING, parameters, None)
        carrier.scatter(message, rows, source, _CUTTING)
        message = self._keep(message)
        for parameter, (begin, nbytes) in zip(parameters, places, strict=True):
            _piece(parameter).reshard(parameter, message[begin : begin + nbytes].view(parameter.dtype))

    def broadcast(self, parameters: Sequence[nn.Parameter], source: int = 0) -> None:
        """Let whole parameters have the values of the source everywhere, several in one message."""
        if self.world == 1:
            return
        for batch in _batches(parameters):
            self._broadcast(batch, source)

    def _broadcast(self, parameters: Sequence[nn.Parameter], source: int) -> None:
        rows = [_bytes(dense_row(parameter.data)[0]).to(self.carrier.device) for parameter in parameters]
        message = torch.cat(rows)
        doing = "sharing small parameters"
        self.agree(doing, parameters, None)
        self.carrier.broadcast(message, source, doing)
        if self.carrier.rank == source:
            return
        for parameter, part in zip(parameters, message.split([row.numel() for row in rows]), strict=True):
            row, strides = dense_row(parameter.data)
            # Not copied to where they lie: elements of an expanded parameter overlap.
            parameter.data = part.clone().to(parameter.device).view(row.dtype).as_strided(parameter.shape, strides)

    def gather(self, parameters: Sequence[nn.Parameter], *, inside_gather: bool = False) -> None:
        """Bring whole values together, for the parameters to have; ``inside_gather`` as in :meth:`Piece.unshard`."""
        for parameter, values in self.wholes([p for p in parameters if _piece(p).row is not None]):
            _piece(parameter).unshard(parameter, values.to(parameter.device), inside_gather=inside_gather)

    def wholes(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Whole values of parameters in pieces, on the carrier's device, with their strides; several in one message."""
        for batch in _batches(parameters):
            yield from self._wholes(batch)

    def _wholes(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        rows = [_bytes(row).to(self.carrier.device) for p in parameters if (row := _piece(p).row) is not None]
        own = rows[0] if len(rows) == 1 else torch.cat(rows)
        message = torch.empty(self.world * own.numel(), dtype=torch.uint8, device=own.device)
        doing = "fetching parameters that are in pieces"
        self.agree(doing, parameters, None)
        self.carrier.all_gather(message, own, doing)
        begin = 0
        for parameter, row in zip(parameters, rows, strict=True):
            # One piece after the other is the whole in the order of memory; a view, where there is one parameter.
            found = message.view(self.world, -1)[:, begin : begin + row.numel()].reshape(-1)
            begin += row.numel()
            yield parameter, found.view(parameter.dtype).as_strided(parameter.shape, _piece(parameter).strides)


def is_whole(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter has its values, and not a piece of them, or none until they are loaded."""
    piece = piece_of(parameter)
    return piece is None or (piece.row is None and not piece.awaited)


def take_over(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Bring the pieces of parameters together in places of an engine's, and forget them. Collective if there are any.

    Args:
        parameters: built whole, in pieces, or without values.
        views: of their shapes; left as they are where parameters are whole, NaN where they have no values yet.
    """
    places = {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}
    built = [parameter for parameter in parameters if piece_of(parameter) is not None]
    cut = [parameter for parameter in built if _piece(parameter).row is not None]
    if cut:
        spread = _piece(cut[0]).fetcher
        # Of several blocks, too: all were built for the ranks that the model is wrapped for, so any of them will do.
        assert isinstance(spread, ShardedBuild)
        for parameter, values in spread.wholes(cut):
            places[id(parameter)].copy_(values)
    for parameter in built:
        if _piece(parameter).awaited:
            places[id(parameter)].fill_(float("nan"))
        _piece(parameter).untie(parameter)


def _piece(parameter: nn.Parameter) -> Piece:
    piece = piece_of(parameter)
    assert piece is not None  # it was begun
    return piece


def _describe(parameters: Sequence[nn.Parameter]) -> str:
    """A short name of the parameters, and another text where they are others."""
    rows = [f"{_piece(p).name} {tuple(p.shape)} {p.dtype}" for p in parameters]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:8]
    return f"{len(rows)} parameters from {rows[0]} on ({digest})" if rows else "no parameters"


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters that go into one message each, in their order."""
    batch: list[nn.Parameter] = []
    nbytes = 0
    for parameter in parameters:
        batch.append(parameter)
        nbytes += parameter.nbytes
        if nbytes > _MESSAGE_NBYTES:
            yield batch
            batch = []
            nbytes = 0
    if batch:
        yield batch


def _bytes(row: Tensor) -> Tensor:
    return row.detach().view(torch.uint8)
