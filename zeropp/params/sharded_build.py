"""Parameters of a model under construction: partitioned over the ranks before any layout exists, and gathered on use.

A :class:`Piece` is this rank's equal part of one parameter. A :class:`ShardedBuild` partitions and gathers the
parameters of one process group.

[Note: building in pieces] Every rank runs the code that builds the model and so makes the same parameters. Rank 0's
values become the values on all ranks. New parameters wait, whole, until their bytes exceed a limit; then each rank
keeps only its piece. If code uses a parameter that is in pieces, all ranks gather it. Edits are kept, and the parameter
waits whole again. A parameter whose memory has other references stays whole until the end of the build, because edits
through these references would be lost. Small parameters stay whole and are broadcast at the end. Before each
collective, the ranks exchange descriptions of the operation, so that ranks that build different models or fail are
named in an error.
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
    """The interface of :class:`ShardedBuild` that a :class:`Piece` uses."""

    rank: int
    world: int

    def touch(self, parameter: nn.Parameter, piece: Piece) -> None:
        """Gather a parameter on every rank; refused after the model is built, when ranks may be at different code."""
        ...

    def let_go(self) -> None:
        """End a use of gathered values."""
        ...


class Piece(GuardHandler):
    """This rank's piece of one parameter, and the guard's handler for the parameter until an engine takes over.

    See :class:`zeropp.params.guard.GuardHandler`.

    Attributes:
        fetcher: build that gathers the parameters of the group.
        name: class name of the module and the parameter's name in it; qualified names are unknown during the build.
        row: [ceil(numel / world)] this rank's part of the values in memory order, padded with zeros at the end; None
            while the parameter is whole. Inside GatheredParameters a row is kept.
        awaited: True if the parameter has no values yet, because they are loaded after the model is wrapped.
        is_gathered: True inside GatheredParameters, while the user has the whole values.
    """

    def __init__(self, fetcher: Fetcher, name: str, *, awaited: bool = False) -> None:
        self.fetcher = fetcher
        self.name = name
        self.row: Tensor | None = None
        self.awaited = awaited
        self.is_gathered = False
        self.strides: tuple[int, ...] = ()

    def tie(self, parameter: nn.Parameter) -> None:
        """Attach this piece to a parameter. Only the parameter refers to the piece, so both are freed together."""
        parameter._zeropp_piece = self  # type: ignore[attr-defined]
        # Do not notify extensions of a parameter without values. They keep a weak reference, and torch cannot swap in a
        # tensor with memory while there is one.
        if not self.awaited:
            self._tell_extensions(parameter)

    def untie(self, parameter: nn.Parameter) -> None:
        """Detach this piece from a parameter whose values something else keeps from now on."""
        del parameter._zeropp_piece  # type: ignore[attr-defined]
        for extension in extensions():
            extension.parameter_freed(parameter)

    def _tell_extensions(self, parameter: nn.Parameter) -> None:
        """Tell the extensions (zeropp.deepspeed, for ``ds_status``) that full values were gathered or freed."""
        for extension in extensions():
            extension.piece_changed(parameter, self)

    def piece_numel(self, numel: int) -> int:
        """Return the number of elements of one rank's piece, padding included: ceil(numel / world)."""
        return -(-numel // self.fetcher.world)

    def reshard(self, parameter: nn.Parameter, row: Tensor) -> None:
        """Release the whole values of a parameter and keep ``row``, this rank's piece of them."""
        self.row = row
        self.strides = dense_strides(tuple(parameter.shape), parameter.stride())
        # Notify extensions: the parameter's shape may have changed since the piece was attached.
        self._tell_extensions(parameter)
        # Keep the device that the parameter was built on. If it is initialised again, random numbers are drawn there.
        stand_in = nothing(parameter.dtype, parameter.device).expand(parameter.shape)
        register(parameter, self.name, self, self.strides, parameter.dtype)
        parameter.data = stand_in
        guard([parameter])

    def unshard(self, parameter: nn.Parameter, values: Tensor, *, inside_gather: bool = False) -> None:
        """Give a parameter its whole values.

        Args:
            parameter: parameter of this piece.
            values: whole values, in the parameter's shape.
            inside_gather: True inside GatheredParameters; the row is kept, because the parameter is released again at
                the end.
        """
        unguard([parameter])
        parameter.data = values
        if not inside_gather:
            self.row = None
            unregister(parameter)

    def begin_gathered(self, parameter: nn.Parameter) -> None:
        """Record that the user has the whole values, which the parameter has already."""
        self.is_gathered = True
        self._tell_extensions(parameter)

    def end_gathered(self, parameter: nn.Parameter) -> None:
        """Record the end of GatheredParameters. If the parameter has a stored shard (``row``), free its full values."""
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

    # Methods of GuardHandler.

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
        """Return this rank's part of the values, without padding."""
        count = self.piece_numel(parameter.numel())
        numel = parameter.numel()
        start = min(self.fetcher.rank * count, numel)
        own = min(count, numel - start)
        # The user may be editing the gathered values. The row stays valid until these are taken back.
        if self.row is not None:
            return self.row[:own]
        return dense_row(parameter.data)[0][start : start + own]


def piece_of(parameter: Tensor) -> Piece | None:
    """Return a parameter's piece; None if the parameter was not built to be partitioned or an engine manages it."""
    return parameter.__dict__.get("_zeropp_piece")


def dense_row(values: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the values in memory order, [numel], and their dense strides; a view if the tensor is dense."""
    strides = dense_strides(tuple(values.shape), values.stride())
    if strides == values.stride() and values.numel():
        return values.as_strided((values.numel(),), (1,)), strides
    dense = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)
    return dense.as_strided((dense.numel(),), (1,)), strides


LIMIT_NBYTES = 1 << 26
"""Limit on the bytes of built parameters that wait to be partitioned, and on the bytes of small parameters."""
_MESSAGE_NBYTES = 1 << 25  # bytes of parameters above which a message is sent
SMALL = 1 << 16
"""Largest number of elements of a small parameter, which stays whole during the build."""
_ALONE_NBYTES = 1 << 24  # bytes of a parameter above which it has a message of its own
_CUTTING = "partitioning what was built"
_ALIGNED = 16  # bytes; alignment of each row in a message, valid for any dtype

_T = TypeVar("_T")


def _can_be_cut(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has values that can be partitioned and if no engine manages it."""
    return (
        # Check this first: a model wrapped inside the block may become part of another, and its values must not be
        # read.
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
        carrier: collectives between the ranks.
        trains_on: device that the model will train on, unless it is wrapped with another one.
        asked: keys and values that the configuration must have when the model is wrapped.
        building: True while all ranks run the code that builds the model.
    """

    def __init__(
        self,
        carrier: BuildComm,
        trains_on: torch.device,
        asked: dict[str, object],
        keep: Callable[[Tensor], Tensor],
    ) -> None:
        """Start without parameters.

        Args:
            carrier: collectives between the ranks.
            trains_on: device that the model will train on.
            asked: keys and values that the configuration must have when the model is wrapped.
            keep: function that moves a row to the memory where pieces are kept, and may return the row itself.
        """
        self.carrier = carrier
        self.rank = carrier.rank
        self.world = carrier.world
        self._keep = keep
        self.trains_on = trains_on
        self.asked = asked
        self.building = False
        self._limit = self._bound = LIMIT_NBYTES
        # Tables by id with strong references. Their contents must be equal on all ranks, so they must not depend on
        # garbage collection. ``_begun``: parameters that may not be initialised yet.
        self._begun: dict[int, tuple[nn.Parameter, int]] = {}  # with the bytes counted, since a cast may change them
        self._waiting: dict[int, nn.Parameter] = {}
        self._small: dict[int, nn.Parameter] = {}
        self._begun_nbytes = self._waiting_nbytes = self._small_nbytes = 0
        self._begins: nn.Module | None = None  # the module that received the last parameter
        self._lost = False

    # Methods for the time while the model is built.

    def note_parameter(self, name: str, parameter: nn.Parameter, module: nn.Module) -> None:
        """Record a parameter that a module has received and may not have initialised yet."""
        if piece_of(parameter) is not None or not _can_be_cut(parameter):
            return
        # Parameters of modules without a parent, such as items of a list under construction, would accumulate. Above
        # the limit they count as built. A module that is still receiving parameters has twice the limit. If a parameter
        # is initialised later, it is gathered for that.
        if self._begun_nbytes > (2 * self._limit if module is self._begins else self._limit):
            self._end_begun()
            self.let_go()
        self._begins = module
        Piece(self, name).tie(parameter)
        self._begun[id(parameter)] = parameter, parameter.nbytes
        self._begun_nbytes += parameter.nbytes

    def _end_begun(self) -> None:
        """Treat all recorded parameters as built."""
        for parameter, _ in self._begun.values():
            self._wait(parameter)
        self._begun = {}
        self._begun_nbytes = 0
        self._begins = None

    def ready(self, parameters: Iterable[tuple[str, nn.Parameter, nn.Module]]) -> None:
        """Record that modules are built, so that their parameters may be partitioned now or later.

        Args:
            parameters: name, parameter and module, for each parameter of these modules.
        """
        for name, parameter, module in parameters:
            self.note_parameter(name, parameter, module)
            if (begun := self._begun.pop(id(parameter), None)) is not None:
                self._begun_nbytes -= begun[1]
                self._wait(parameter)
        self.let_go()

    def _wait(self, parameter: nn.Parameter) -> None:
        """Put a built parameter among the small ones or among those that wait to be partitioned."""
        if parameter.numel() <= SMALL and self._small_nbytes + parameter.nbytes <= self._limit:
            self._small[id(parameter)] = parameter
            self._small_nbytes += parameter.nbytes
        else:
            self._waiting[id(parameter)] = parameter
            self._waiting_nbytes += parameter.nbytes

    def let_go(self) -> None:
        """Partition the waiting parameters if their bytes exceed the limit."""
        if self.building and self._waiting_nbytes > self._bound:
            self._cut_waiting(aliased=True)

    def _cut_waiting(self, *, aliased: bool) -> None:
        """Partition the waiting parameters.

        Parameters inside GatheredParameters stay whole. With ``aliased``, parameters with other references to their
        memory stay whole, too.
        """
        parameters = list(self._waiting.values())
        held = [i for i, p in enumerate(parameters) if _piece(p).is_gathered or (aliased and is_aliased(p))]
        accounts = self.agree(_CUTTING, parameters, held)
        # Keep a parameter whole if any rank must: the time at which a reference disappears may depend on garbage
        # collection.
        kept = {index for account in accounts for index in account}
        self.scatter([p for i, p in enumerate(parameters) if i not in kept])
        self._waiting = {}
        self._waiting_nbytes = 0
        for index in sorted(kept):
            self._wait(parameters[index])
        # Raise the bound by the bytes that stay whole, or every later call would try these parameters again.
        self._bound = self._waiting_nbytes + self._limit

    def touch(self, parameter: nn.Parameter, piece: Piece) -> None:
        """Gather a parameter in pieces for a use; see :class:`zeropp.params.sharded_build.Fetcher`.

        Raises:
            RuntimeError: The model is built, so other ranks may not join the gather.
        """
        if not self.building:
            raise RuntimeError(
                f"parameter {piece.name!r} of shape {tuple(parameter.shape)} was built to be partitioned, and each "
                "rank has a piece of it. To train, wrap the model: zeropp.ZeroOptimizer(optimizer, model, config). "
                "To read or edit values use, on every rank, zeropp.zero.GatheredParameters(params, modifier_rank=...). "
                "Wrapping brings it to its device, so leave out model.to(...)"
            )
        self.fetch([parameter])

    def fetch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather those of the parameters that are in pieces, while the model is built."""
        # Inside GatheredParameters the parameter has its whole values already.
        wanted = [p for p in parameters if self._has(p) and _piece(p).row is not None and not _piece(p).is_gathered]
        if wanted:
            self.gather(wanted)
            for parameter in wanted:
                self._wait(parameter)

    def _has(self, parameter: nn.Parameter) -> bool:
        """Return True if a parameter belongs to this build."""
        piece = piece_of(parameter)
        return piece is not None and piece.fetcher is self

    def finish_build(self) -> None:
        """End the build after it has succeeded: run :meth:`complete`, then :meth:`end_build`."""
        try:
            self.complete()
        finally:
            self.end_build()

    def complete(self) -> None:
        """Partition all parameters that wait, and broadcast rank 0's values of small ones."""
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
        """End the build, whether it has succeeded or not, and drop the tables."""
        self.building = False
        self._begun = {}
        self._waiting = {}
        self._small = {}
        self._begins = None
        self._begun_nbytes = self._waiting_nbytes = self._small_nbytes = 0

    def report_failure(self, error: BaseException) -> None:
        """Send this rank's error to the other ranks, which wait for this rank or will do so."""
        # Send nothing for an interrupt, because the exchange waits for other ranks, and nothing after the ranks are out
        # of step.
        if not self._lost and isinstance(error, Exception):
            self._lost = True
            # Suppress errors of the exchange: this rank's own error explains more.
            with contextlib.suppress(RuntimeError):
                self.carrier.exchange(Failure(f"{type(error).__name__}: {error}"), "building the model")

    def agree(self, doing: str, parameters: Sequence[nn.Parameter], account: _T) -> list[_T]:
        """Exchange accounts before all ranks perform one operation on the same parameters.

        Args:
            doing: name of the operation, for errors.
            parameters: parameters of the operation.
            account: this rank's picklable message to all ranks.

        Returns:
            The accounts of all ranks, in the order of the group.

        Raises:
            RuntimeError: Another rank failed or did not come.
            ValueError: Ranks have different parameters.
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

    # Collectives on values. Steps that may fail come before agree(), so that a failing rank leaves no other rank in the
    # collective.

    def scatter(self, parameters: Sequence[nn.Parameter], source: int = 0) -> None:
        """Partition whole parameters: each rank keeps its piece of the values of ``source``, a rank of the group."""
        for parameter in parameters:
            if parameter.nbytes > _ALONE_NBYTES:
                self._scatter_alone(parameter, source)
        for batch in _batches(p for p in parameters if p.nbytes <= _ALONE_NBYTES):
            self._scatter_jointly(batch, source)

    def _scatter_alone(self, parameter: nn.Parameter, source: int) -> None:
        """Partition one large parameter, with one message for each rank."""
        piece = _piece(parameter)
        carrier = self.carrier
        row, _ = dense_row(parameter.data)
        count = piece.piece_numel(row.numel())
        own = torch.empty(count, dtype=row.dtype, device=carrier.device)
        rows = None
        if carrier.rank == source:
            row = row.to(carrier.device)
            rows = [row[rank * count : (rank + 1) * count] for rank in range(self.world)]
            # The last pieces may be short or empty and are padded.
            rows = [
                _bytes(part if part.numel() == count else torch.cat([part, part.new_zeros(count - part.numel())]))
                for part in rows
            ]
        self.agree(_CUTTING, [parameter], None)
        carrier.scatter(_bytes(own), rows, source, _CUTTING)
        piece.reshard(parameter, self._keep(own))

    def _scatter_jointly(self, parameters: Sequence[nn.Parameter], source: int) -> None:
        """Partition several parameters with one message for each rank."""
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
                # Copy the full rows, then the elements of the last row, which may be short.
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
        """Give whole parameters the values of ``source`` on every rank, with several parameters in one message."""
        if self.world == 1:
            return
        for batch in _batches(parameters):
            self._broadcast(batch, source)

    def _broadcast(self, parameters: Sequence[nn.Parameter], source: int) -> None:
        """Broadcast one batch of parameters."""
        rows = [_bytes(dense_row(parameter.data)[0]).to(self.carrier.device) for parameter in parameters]
        message = torch.cat(rows)
        doing = "sharing small parameters"
        self.agree(doing, parameters, None)
        self.carrier.broadcast(message, source, doing)
        if self.carrier.rank == source:
            return
        for parameter, part in zip(parameters, message.split([row.numel() for row in rows]), strict=True):
            row, strides = dense_row(parameter.data)
            # Replace the data instead of copying into it: elements of an expanded parameter overlap.
            parameter.data = part.clone().to(parameter.device).view(row.dtype).as_strided(parameter.shape, strides)

    def gather(self, parameters: Sequence[nn.Parameter], *, inside_gather: bool = False) -> None:
        """Gather whole values and give them to the parameters; ``inside_gather`` as in :meth:`Piece.unshard`."""
        for parameter, values in self.wholes([p for p in parameters if _piece(p).row is not None]):
            _piece(parameter).unshard(parameter, values.to(parameter.device), inside_gather=inside_gather)

    def wholes(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its whole values on the carrier's device; several parameters share a message."""
        for batch in _batches(parameters):
            yield from self._wholes(batch)

    def _wholes(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Gather one batch of parameters."""
        rows = [_bytes(row).to(self.carrier.device) for p in parameters if (row := _piece(p).row) is not None]
        own = rows[0] if len(rows) == 1 else torch.cat(rows)
        message = torch.empty(self.world * own.numel(), dtype=torch.uint8, device=own.device)
        doing = "fetching parameters that are in pieces"
        self.agree(doing, parameters, None)
        self.carrier.all_gather(message, own, doing)
        begin = 0
        for parameter, row in zip(parameters, rows, strict=True):
            # The pieces in rank order are the whole parameter in memory order. For a single parameter this is a view.
            found = message.view(self.world, -1)[:, begin : begin + row.numel()].reshape(-1)
            begin += row.numel()
            yield parameter, found.view(parameter.dtype).as_strided(parameter.shape, _piece(parameter).strides)


def is_whole(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has its values; False if it has a piece of them, or none until they are loaded."""
    piece = piece_of(parameter)
    return piece is None or (piece.row is None and not piece.awaited)


def take_over(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Copy the whole values of built parameters to an engine's tensors and detach their pieces.

    Collective if any parameter is in pieces.

    Args:
        parameters: parameters that are whole, in pieces or without values.
        views: one tensor of the same shape per parameter; receives the values of a parameter in pieces, and NaN for a
            parameter without values. Tensors for whole parameters are left unchanged.
    """
    places = {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}
    built = [parameter for parameter in parameters if piece_of(parameter) is not None]
    cut = [parameter for parameter in built if _piece(parameter).row is not None]
    if cut:
        spread = _piece(cut[0]).fetcher
        # Any build can gather all of them, even if several made them: all used the ranks that the model is wrapped for.
        assert isinstance(spread, ShardedBuild)
        for parameter, values in spread.wholes(cut):
            places[id(parameter)].copy_(values)
    for parameter in built:
        if _piece(parameter).awaited:
            places[id(parameter)].fill_(float("nan"))
        _piece(parameter).untie(parameter)


def _piece(parameter: nn.Parameter) -> Piece:
    piece = piece_of(parameter)
    assert piece is not None  # attached in note_parameter()
    return piece


def _describe(parameters: Sequence[nn.Parameter]) -> str:
    """Return a short text for parameters, with a digest of all their names, shapes and dtypes."""
    rows = [f"{_piece(p).name} {tuple(p.shape)} {p.dtype}" for p in parameters]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:8]
    return f"{len(rows)} parameters from {rows[0]} on ({digest})" if rows else "no parameters"


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, in lists that are sent as one message each."""
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
