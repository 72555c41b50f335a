"""``GatheredParameters``: whole values of partitioned parameters, to read or to edit between passes.

It works before an engine manages the parameters, too: :class:`BuildGather` gathers those that ``zero.Init`` built.

Outside a pass, a graph through a whole value leads nowhere: the value is released, and no gradient is reduced.
Reading is allowed, also with grad mode on. So results carry a hook that raises in a backward, and :class:`GraphTracker`
can tell at the end of the ``with`` block which graphs outlive it. Without the hook, a backward after the block would
give the right gradient for some operations (a sum), and NaN for those that saved the weight (a square).

``register_external_parameter`` declares parameters that a module's forward uses although other modules own them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeropp.access.state import gather_computed, gather_main
from zeropp.comm.agreement import GATHERED
from zeropp.config.base import line_of_user, warn_user
from zeropp.engine.engine import Engine
from zeropp.engine.hooks import tensors_in
from zeropp.engine.preconditions import NOTHING, WEIGHTS
from zeropp.params.dtypes import digest_of, fingerprint
from zeropp.params.guard import handler_of, is_guarded
from zeropp.params.sharded_build import Piece, ShardedBuild, piece_of
from zeropp.params.unit import FlatBuffer

__all__ = [
    "BuildGather",
    "GatheredParameters",
    "GraphTracker",
    "builds_of",
    "external_parameters",
    "register_external_parameter",
]


def builds_of(parameters: Sequence[nn.Parameter]) -> list[tuple[ShardedBuild, list[nn.Parameter]]]:
    """Parameters that nobody manages yet, by who spreads them."""
    found: dict[int, tuple[ShardedBuild, list[nn.Parameter]]] = {}
    for parameter in parameters:
        piece = piece_of(parameter)
        if piece is not None and isinstance(piece.fetcher, ShardedBuild):
            found.setdefault(id(piece.fetcher), (piece.fetcher, []))[1].append(parameter)
    return list(found.values())


class BuildGather:
    """Whole values of one group's parameters inside GatheredParameters; made on entering, collective.

    Attributes:
        gathered: parameters, by identity, and what they are called.
    """

    def __init__(self, build: ShardedBuild, parameters: list[nn.Parameter], modifier_rank: int | None) -> None:
        if modifier_rank is not None and modifier_rank not in build.carrier.ranks:
            ranks = list(build.carrier.ranks)
            raise ValueError(f"modifier_rank is {modifier_rank}; expected one of the model's ranks {ranks}, or None")
        self._build = build
        self._modifier_rank = modifier_rank
        self._pieces = [(parameter, _piece(parameter)) for parameter in parameters]
        self.gathered = {parameter: piece.name for parameter, piece in self._pieces}
        inside_gather = [piece.name for _, piece in self._pieces if piece.is_gathered]
        if inside_gather:
            raise RuntimeError(f"{inside_gather} are gathered already, by a GatheredParameters that has not been left")
        awaited = [piece.name for _, piece in self._pieces if piece.awaited]
        if awaited:
            raise RuntimeError(f"{awaited[:10]} have no values before the model is wrapped and they are loaded")
        doing = "entering GatheredParameters"
        build.agree(f"{doing} with modifier_rank {modifier_rank}", parameters, None)
        if build.building:
            # Each rank has what it built, until rank 0's values are everyone's.
            build.broadcast([parameter for parameter, piece in self._pieces if piece.row is None])
        build.gather(parameters, inside_gather=True)
        for parameter, piece in self._pieces:
            piece.begin_gathered(parameter)
        self._before = [(tuple(p.shape), p.dtype) for p in parameters]
        # Without a modifier_rank edits would be lost, so they have to be found. With one they are kept anyway.
        self._prints = [fingerprint(p.data) for p in parameters] if modifier_rank is None else []
        # What is whole, and small, must be as it was if an edit is refused.
        whole = [(p, p.data.clone()) for p, piece in self._pieces if piece.row is None and modifier_rank is None]
        self._restored = dict(whole)
        self._values: list[Tensor] = []

    def take_back(self) -> None:
        """Take the parameters back; the user's values are kept until :meth:`scatter_edits`."""
        self._values = [parameter.data for parameter, _ in self._pieces]
        for parameter, piece in self._pieces:
            piece.end_gathered(parameter)

    def report_failure(self, error: BaseException) -> None:
        """The block has failed on this rank; the others may be about to leave it, and must not wait."""
        self._build.report_failure(error)

    def scatter_edits(self) -> None:
        """Every rank takes its part of the edits; or learns that some rank made one that cannot be kept."""
        build, keeps = self._build, self._modifier_rank
        edits = self._edits() if keeps is None else {}
        wrong = self._misshapen()
        parameters = [parameter for parameter, _ in self._pieces]
        own = bool(wrong), digest_of(edits.items()) if edits else 0
        accounts = build.agree("leaving GatheredParameters", parameters, own)
        if keeps is None and accounts[0][1] and all(each == accounts[0] for each in accounts):
            # All ranks have made the same edits, and any of them has what is meant.
            keeps = build.carrier.ranks[0]
        lost = [index for index, (bad, edited) in enumerate(accounts) if bad or (keeps is None and edited)]
        if lost:
            for parameter, value in self._restored.items():
                parameter.data = value
            ranks = [build.carrier.ranks[index] for index in lost]
            raise RuntimeError(
                f"edits made inside GatheredParameters on ranks {ranks} are lost: "
                f"{wrong or list(edits) or 'see the error there'}. Say whose edits are kept, "
                "GatheredParameters(params, modifier_rank=0), or make the same ones on every rank, and keep shapes as "
                "they are"
            )
        if keeps is None:
            return
        source = build.carrier.ranks.index(keeps)
        whole: list[nn.Parameter] = []
        cut: list[nn.Parameter] = []
        for (parameter, piece), (_, dtype), value in zip(self._pieces, self._before, self._values, strict=True):
            (whole if piece.row is None else cut).append(parameter)
            # The user may have given another dtype.
            piece.unshard(parameter, value.detach().to(dtype), inside_gather=True)
        build.broadcast(whole, source)
        build.scatter(cut, source)

    def _edits(self) -> dict[str, object]:
        """Parameters that were edited, by name, and what tells their values from others."""
        rows = zip(self._pieces, self._prints, map(fingerprint, self._values), strict=True)
        return {piece.name: new for (_, piece), old, new in rows if old != new}

    def _misshapen(self) -> list[str]:
        """Parameters that were given a tensor of another shape."""
        rows = zip(self.gathered.values(), self._before, self._values, strict=True)
        return [f"{name} of shape {old} got {tuple(new.shape)}" for name, (old, _), new in rows if new.shape != old]


def _piece(parameter: nn.Parameter) -> Piece:
    piece = piece_of(parameter)
    assert piece is not None  # the caller has looked
    return piece


class GraphTracker(TorchFunctionMode):
    """While this mode is on, notes the lines that begin graphs through gathered values.

    Args:
        names: of the gathered parameters.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._names = {id(parameter): name for parameter, name in names.items()}
        # Weakly: what is alive at the end is what the user still holds.
        self._hooks: list[weakref.ref[_Trip]] = []
        # Views of gathered values; what is computed from them counts as well. Held, so that no other tensor takes an
        # id.
        self._views: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Under no_grad there is no graph that could outlive the block.
        for name in self._named((*args, *kwargs.values())) if torch.is_grad_enabled() else ():
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    if tensor._is_view():
                        self._names[id(tensor)] = name
                        self._views.append(tensor)
                    # Not an error yet: to read a norm with grad mode on is fine, and its graph goes with the result.
                    trip = _Trip(name, line_of_user())
                    tensor.register_hook(trip)
                    self._hooks.append(weakref.ref(trip))
        return result

    def _named(self, args: Iterable[object]) -> Iterator[str]:
        """Gathered parameters among arguments, lists and dicts included."""
        for arg in args:
            if id(arg) in self._names:
                yield self._names[id(arg)]
            elif isinstance(arg, (list, tuple)):
                yield from self._named(arg)
            elif isinstance(arg, dict):
                yield from self._named(arg.values())

    def alive(self) -> list[str]:
        """Lines where graphs began that somebody still holds; at the end of the block."""
        # Ours must not count among those that hold a graph.
        self._views.clear()
        return list(dict.fromkeys(str(trip) for ref in self._hooks if (trip := ref()) is not None))


class _Trip:
    """A hook; it lives as long as the graph that it is in."""

    def __init__(self, name: str, line: str) -> None:
        self._name = name
        self._line = line

    def __str__(self) -> str:
        return f"{self._line} from {self._name!r}"

    def __call__(self, gradient: Tensor) -> None:
        raise RuntimeError(
            f"backward came to what was computed at {self} inside GatheredParameters, and no gradient of it would be "
            "reduced. Compute a penalty on weights inside the model's forward, and return it or keep it on the module"
        )


_EXTERNAL = "_zeropp_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's forward uses a parameter that is not its own, so that it is fetched ahead with its own.

    Needed by no model: such a parameter is fetched when it is touched. The same call on every rank; before or after
    the model is wrapped.

    Raises:
        TypeError: what is given is no module, or no parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter got a {type(module).__name__} and a {type(parameter).__name__}; expected a "
            "module and a parameter"
        )
    # A list, and no attribute of its own: module.parameters() must not find the parameter here, too.
    known = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(other is parameter for other in known):
        known.append(parameter)
        engine = handler_of(parameter)
        # Before wrapping there is none; hooks are set up from the list then.
        if isinstance(engine, Engine):
            engine.use_in(module, parameter)


def external_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters registered with a module."""
    yield from module.__dict__.get(_EXTERNAL, ())


class GatheredParameters:
    """Inside ``with``, the parameters have their whole values, in the precision of the main weights.

    Behind a training engine with an optimizer those that are only read, without ``modifier_rank``, have the dtype that
    they are computed with, as outside: scripts send them on to where they generate, which expects that one.

    Collective: every rank of the model enters and leaves, with the same parameters in the same order. They are of a
    wrapped model, or were built in :class:`zeropp.zero.Init`; what is not managed by zeropp is left alone. Between
    passes only: no step can be taken inside. With all parameters of a model it may run inside without gradients, on
    what is gathered, in the dtypes that it is trained in, and each rank for itself: as often as it likes. Inside a
    forward or backward this only fetches the parameters, as any use of them would.

    Args:
        params: one parameter, several, or a module, whose parameters are meant; None among several is passed over.
        modifier_rank: global rank whose edits are kept: they go to the main weights of every rank, and what was
            gathered of older ones is not used any more. None to read, or for edits that every rank makes alike.
        fwd_module: as in DeepSpeed, a module whose forward will use the parameters; see
            :func:`register_external_parameter`.
        enabled: False makes this do nothing.

    Raises:
        RuntimeError: inside a pass with ``modifier_rank``, inside another one that keeps edits of another rank, ranks
            at different calls; and at the end, on every rank, edits without ``modifier_rank`` that ranks do not share.
        ValueError: ``modifier_rank`` is no rank of the model.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if not enabled:
            params = ()
        elif isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, Tensor):
            params = [params]  # type: ignore[list-item]
        self._contexts: list[EngineGather | BuildGather] = []
        self._graphs: GraphTracker | None = None
        self._modifier_rank = modifier_rank
        # transformers gives a layer's weight and bias, and some layers have no bias.
        parameters = list({id(each): each for each in params if each is not None}.values())
        _refuse_others(parameters)
        if fwd_module is not None:
            for parameter in parameters:
                register_external_parameter(fwd_module, parameter)
        # Parameters of several wrapped models may be gathered in one call.
        by_engine: dict[int, tuple[Engine, list[nn.Parameter]]] = {}
        for parameter in parameters:
            engine = handler_of(parameter)
            if isinstance(engine, Engine):
                by_engine.setdefault(id(engine), (engine, []))[1].append(parameter)
        self._wanted = list(by_engine.values())
        self._built = builds_of(parameters)

    def __enter__(self) -> None:
        try:
            for engine, parameters in self._wanted:
                engine.notice_failed_backward()
                if engine.running:
                    self._fetch(engine, parameters)
                else:
                    # Helpers gather what their caller has gathered: it stays, with edits, until the outer one ends.
                    wanted = [
                        each
                        for each in parameters
                        if not engine.gather_contexts.has_gathered(each, self._modifier_rank)
                    ]
                    if wanted:
                        self._contexts.append(EngineGather(engine, wanted, self._modifier_rank))
            for build, parameters in self._built:
                self._contexts.append(BuildGather(build, parameters, self._modifier_rank))
        except BaseException:
            # A gather of another model may stand already.
            self._give_back()
            raise
        if self._contexts:
            # While gathered, parameters have their own class, and the guard sees nothing: a mode sees results.
            self._graphs = GraphTracker(
                {each: name for context in self._contexts for each, name in context.gathered.items()}
            )
            self._graphs.__enter__()  # type: ignore[no-untyped-call]

    def _fetch(self, engine: Engine, parameters: list[nn.Parameter]) -> None:
        if self._modifier_rank is not None:
            raise RuntimeError(
                f"GatheredParameters with modifier_rank {self._modifier_rank} inside a forward or backward, where "
                "weights are in use; edit them between passes"
            )
        for parameter in parameters:
            engine.fetch_touched(parameter)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts, graphs = self._contexts, self._graphs
        if graphs is not None:
            # First: giving back works on the same tensors, and is none of the user's computing.
            graphs.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        # Before edits are shared, which may fail: the parameters are released whatever happens.
        self._give_back()
        # Else other ranks may not come to where edits are shared.
        try:
            for context in contexts if kind is None else ():
                context.scatter_edits()
        except Exception as caught:
            _tell(contexts, caught)
            raise
        if error is not None:
            _tell(contexts, error)
        else:
            _warn_of_graphs(graphs)

    def _give_back(self) -> None:
        for context in self._contexts:
            context.take_back()
        self._contexts = []
        self._graphs = None


def _tell(contexts: Sequence[EngineGather | BuildGather], error: BaseException) -> None:
    """Say that this rank has failed, where others come to the end of a block whatever it does."""
    for context in contexts:
        if isinstance(context, BuildGather):
            context.report_failure(error)


def _warn_of_graphs(graphs: GraphTracker | None) -> None:
    """Say of graphs that backward will refuse where they began; those of values that were only read are gone."""
    lines = graphs.alive() if graphs is not None else []
    if lines:
        warn_user(
            f"what was computed at {', '.join(lines[:3])}{', ...' if lines[3:] else ''} inside GatheredParameters is "
            "still held with its graph, and backward through it will be refused: no gradient of it would be reduced. "
            "Compute a penalty on weights inside the model's forward; if it is only to be read, under torch.no_grad()"
        )


def _refuse_others(given: Sequence[object]) -> None:
    for each in given:
        if not isinstance(each, Tensor):
            raise TypeError(
                f"params holds {each!r}, a {type(each).__name__}; expected a module, a parameter, or several parameters"
            )


class EngineGather:
    """Whole values of one engine's parameters inside GatheredParameters."""

    def __init__(self, engine: Engine, parameters: list[nn.Parameter], modifier_rank: int | None) -> None:
        edits = modifier_rank is not None
        doing = f"GatheredParameters with modifier_rank {modifier_rank}"
        needs = WEIGHTS if edits else NOTHING
        engine.require_idle(doing, inside_gather=True, averaged=not edits, needs=needs)
        if modifier_rank is not None and modifier_rank not in engine.comm.ranks:
            ranks = list(engine.comm.ranks)
            raise ValueError(f"modifier_rank is {modifier_rank}; expected one of the model's ranks {ranks}, or None")
        wanted = {id(parameter) for parameter in parameters}
        self.engine = engine
        self.modifier_rank = modifier_rank
        self.places = [(b, i) for b in engine.buffers for i, p in enumerate(b.parameters) if id(p) in wanted]
        self.names = [buffer.names[index] for buffer, index in self.places]
        self.gathered = {buffer.parameters[index]: buffer.names[index] for buffer, index in self.places}
        inside_gather = [
            name for name, (b, i) in zip(self.names, self.places, strict=True) if not is_guarded(b.parameters[i])
        ]
        if inside_gather:
            raise RuntimeError(
                f"{inside_gather} are gathered already, by a GatheredParameters that has not been left; inside it "
                "leave modifier_rank out, or give the same"
            )
        # By names: ranks that gather other parameters would mix their values.
        engine.agreement.require_same_call(f"GatheredParameters of {self.names} with modifier_rank {modifier_rank}")
        self.computed = not edits and engine.gather_contexts.computed
        self._main: tuple[FlatBuffer | None, list[Tensor]] = None, []  # what was gathered to take edits into
        gather = gather_computed if self.computed else gather_main
        # A buffer is gathered whole, so once for all of its parameters.
        gathered = {buffer: gather(engine, buffer) for buffer in dict.fromkeys(b for b, _ in self.places)}
        self.values = [gathered[buffer][index] for buffer, index in self.places]
        # Edits without a modifier_rank are everyone's if all ranks make the same ones; else they are lost, and told of.
        self.before = [fingerprint(value) for value in self.values] if modifier_rank is None else []
        # requires_grad_ on a gathered parameter passes the guard by; what has changed is passed on at the end.
        self.trained = [buffer.parameters[index].requires_grad for buffer, index in self.places]
        for (buffer, index), value in zip(self.places, self.values, strict=True):
            buffer.show_whole(index, value)
        engine.gather_contexts.enter_context(self)

    def has_gathered(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """See :class:`zeropp.engine.preconditions.GatherContext`."""
        return parameter in self.gathered and modifier_rank in (None, self.modifier_rank)

    def lower(self) -> None:
        """See :class:`zeropp.engine.preconditions.GatherContext`; once, since nobody gives them back."""
        for number, (buffer, index) in enumerate(self.places):
            parameter, dtype = buffer.parameters[index], buffer.compute_dtype
            if parameter.dtype == dtype:
                continue
            if self.modifier_rank is not None or fingerprint(parameter) != self.before[number]:
                raise RuntimeError(
                    f"the model was called inside GatheredParameters whose edits are kept, and {self.names[number]!r} "
                    f"is computed with in {dtype}, to which they would be rounded; leave it first, and call the model "
                    "in one that only reads"
                )
            # One after the other goes, so that there is never twice the model.
            parameter.data = self.values[number] = parameter.data.to(dtype)
            self.before[number] = fingerprint(parameter)

    def take_back(self) -> None:
        """Let the parameters be partitioned again; what they have by now is kept in :attr:`values`."""
        self.engine.gather_contexts.leave_context(self)
        # What they hold now: .data may have been replaced, and not only written to.
        self.values = [buffer.release_whole(index) for buffer, index in self.places]
        for (buffer, index), before in zip(self.places, self.trained, strict=True):
            parameter = buffer.parameters[index]
            if parameter.requires_grad != before:
                self.engine.note_requires_grad(parameter, parameter.requires_grad)

    def scatter_edits(self) -> None:
        """Every rank takes its part of the edits; or learns that some rank made one that cannot be kept."""
        engine, keeps = self.engine, self.modifier_rank
        # Ranks agree before the first broadcast: all raise, or all go on.
        edits = self._edits() if keeps is None else {}
        wrong = self._misshapen()
        own = [int(bool(wrong)), digest_of(edits.items()) if edits else 0]
        rows = engine.agreement.exchange(GATHERED, own, "leaving GatheredParameters", "the end of GatheredParameters")
        if keeps is None and rows[0][1] and all(row == rows[0] for row in rows):
            # All ranks have done the same, as to an average that each of them keeps: any of them has what is meant.
            keeps = engine.comm.ranks[0]
        ranks = [engine.comm.ranks[i] for i, row in enumerate(rows) if row[0] or (keeps is None and row[1])]
        if ranks:
            raise RuntimeError(
                f"edits made inside GatheredParameters on ranks {ranks} are lost: "
                f"{wrong or list(edits) or 'see the error there'}. Say whose edits are kept, "
                "GatheredParameters(params, modifier_rank=0), or make the same ones on every rank, and keep shapes as "
                "they are"
            )
        if keeps is None:
            return
        # A refresh under way still reads the shards that are about to be written.
        engine.wait_for_refresh()
        with engine.agreement.watching("sharing edits made inside GatheredParameters"):
            for (buffer, index), value in zip(self.places, self.values, strict=True):
                # All shapes are right by now, but the user may have given another dtype or strides.
                whole = value.detach().to(buffer.main_dtype).contiguous()
                engine.comm.broadcast(whole, keeps)
                if self.computed:
                    whole = self._keep_main(buffer, index, whole)
                # Every rank cuts out its own piece: a replica of the states has the same bits then.
                buffer.load(buffer.parameters[index], whole)
        engine.weights_changed(dict.fromkeys(buffer for buffer, _ in self.places))

    def _keep_main(self, buffer: FlatBuffer, index: int, edited: Tensor) -> Tensor:
        """New main weights of a parameter that was gathered rounded: what nobody has edited keeps the bits it had."""
        if self._main[0] is not buffer:  # places are in the order of buffers
            self._main = buffer, gather_main(self.engine, buffer)
        main, dtype = self._main[1][index], buffer.compute_dtype
        return torch.where(main.to(dtype) == edited.to(dtype), main, edited)

    def _edits(self) -> dict[str, object]:
        """Parameters that were edited, by name, and what tells their values from others."""
        now = map(fingerprint, self.values)
        return {name: new for name, old, new in zip(self.names, self.before, now, strict=True) if old != new}

    def _misshapen(self) -> list[str]:
        """Parameters that were given a tensor of another shape."""
        return [
            f"{name} of shape {buffer.layout.slots[index].shape} was given {tuple(value.shape)}"
            for name, (buffer, index), value in zip(self.names, self.places, self.values, strict=True)
            if tuple(value.shape) != buffer.layout.slots[index].shape
        ]
