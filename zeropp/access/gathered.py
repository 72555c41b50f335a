"""``GatheredParameters``: whole values of sharded parameters, to read or edit them between passes.

:class:`EngineGather` gathers parameters of a wrapped model. :class:`BuildGather` gathers parameters that ``zero.Init``
has built and that no engine manages yet.

Backward must not run through a value that was gathered outside a pass: its memory is freed at the end of the ``with``
block, and no hook reduces its gradient. Such a backward would give the right gradient for some operations (a sum), and
NaN for operations that saved the weight (a square). But reading values with grad mode on is allowed. So
:class:`GraphTracker` registers a hook on each result that raises an error in backward, and at the end of the block it
lists the graphs that are still alive.

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
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.guard import handler_of, is_guarded
from zeropp.params.sharded_build import Piece, ShardedBuild, piece_of

__all__ = [
    "BuildGather",
    "GatheredParameters",
    "GraphTracker",
    "builds_of",
    "external_parameters",
    "register_external_parameter",
]


def builds_of(parameters: Sequence[nn.Parameter]) -> list[tuple[ShardedBuild, list[nn.Parameter]]]:
    """Group parameters that ``zero.Init`` has built and no engine manages yet, by their :class:`ShardedBuild`.

    Args:
        parameters: parameters of any kind; plain parameters and those of engines are left out.

    Returns:
        Each build with its parameters, in the given order.
    """
    found: dict[int, tuple[ShardedBuild, list[nn.Parameter]]] = {}
    for parameter in parameters:
        piece = piece_of(parameter)
        if piece is not None and isinstance(piece.fetcher, ShardedBuild):
            found.setdefault(id(piece.fetcher), (piece.fetcher, []))[1].append(parameter)
    return list(found.values())


class BuildGather:
    """Whole values, inside GatheredParameters, of parameters that ``zero.Init`` built for one process group.

    The constructor gathers the values. It is collective over the ranks of that group.

    Args:
        build: the parameters' build.
        parameters: parameters of that build.
        modifier_rank: global rank whose edits are kept, or None.

    Attributes:
        gathered: the parameters with their names.
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
            # While the model is built, parameters that are still whole have different values on each rank, so send rank
            # 0's values to all ranks first.
            build.broadcast([parameter for parameter, piece in self._pieces if piece.row is None])
        build.gather(parameters, inside_gather=True)
        for parameter, piece in self._pieces:
            piece.begin_gathered(parameter)
        self._before = [(tuple(p.shape), p.dtype) for p in parameters]
        # Without a modifier_rank, edits are lost unless all ranks make the same ones. Take fingerprints to detect
        # edits.
        self._prints = [fingerprint(p.data) for p in parameters] if modifier_rank is None else []
        # Copy the parameters that are not sharded (small ones, or not sharded yet), to restore them if edits are
        # rejected.
        whole = [(p, p.data.clone()) for p, piece in self._pieces if piece.row is None]
        self._restored = dict(whole)
        self._values: list[Tensor] = []

    def take_back(self) -> None:
        """Reshard the parameters. Keep the user's values until :meth:`scatter_edits`."""
        self._values = [parameter.data for parameter, _ in self._pieces]
        for parameter, piece in self._pieces:
            piece.end_gathered(parameter)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that an exception ended the block on this rank, so that they do not wait for it."""
        self._build.report_failure(error)

    def scatter_edits(self) -> None:
        """Distribute the edits: each rank stores its shard of the edited values. Collective.

        Raises:
            RuntimeError: on all ranks, if a rank made an edit that cannot be kept.
        """
        build, keeps = self._build, self._modifier_rank
        edits = self._edits() if keeps is None else {}
        wrong = self._misshapen()
        parameters = [parameter for parameter, _ in self._pieces]
        own = bool(wrong), digest_of(edits.items()) if edits else 0
        accounts = build.agree("leaving GatheredParameters", parameters, own)
        if keeps is None and accounts[0][1] and all(each == accounts[0] for each in accounts):
            # All ranks have made the same edits, so take the values of the first rank.
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
            # Convert to the old dtype, because the user may have assigned a tensor of another dtype.
            piece.unshard(parameter, value.detach().to(dtype), inside_gather=True)
        build.broadcast(whole, source)
        build.scatter(cut, source)

    def _edits(self) -> dict[str, object]:
        """Return the names of edited parameters with the fingerprints of their new values."""
        rows = zip(self._pieces, self._prints, map(fingerprint, self._values), strict=True)
        return {piece.name: new for (_, piece), old, new in rows if old != new}

    def _misshapen(self) -> list[str]:
        """Return messages for parameters that were assigned a tensor of another shape."""
        rows = zip(self.gathered.values(), self._before, self._values, strict=True)
        return [f"{name} of shape {old} got {tuple(new.shape)}" for name, (old, _), new in rows if new.shape != old]


def _piece(parameter: nn.Parameter) -> Piece:
    piece = piece_of(parameter)
    assert piece is not None  # checked by the caller
    return piece


class GraphTracker(TorchFunctionMode):
    """Torch function mode that records the user's lines that start autograd graphs from gathered values.

    Args:
        names: gathered parameters with their names.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._names = {id(parameter): name for parameter, name in names.items()}
        # Weak references to the hooks. A hook lives as long as its graph, so the hooks that are alive at the end of the
        # block show which graphs the user still holds.
        self._hooks: list[weakref.ref[_BackwardRefusal]] = []
        # Views of gathered values: graphs that start from a view are recorded, too. Keep the views alive, so that no
        # new tensor reuses the id of one.
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
        # Under no_grad there are no graphs to record.
        for name in self._named((*args, *kwargs.values())) if torch.is_grad_enabled() else ():
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    if tensor._is_view():
                        self._names[id(tensor)] = name
                        self._views.append(tensor)
                    # Do not raise here: reading a norm with grad mode on is allowed, and its graph is freed with the
                    # result.
                    trip = _BackwardRefusal(name, line_of_user())
                    tensor.register_hook(trip)
                    self._hooks.append(weakref.ref(trip))
        return result

    def _named(self, args: Iterable[object]) -> Iterator[str]:
        """Iterate over the names of gathered parameters among arguments, also inside lists, tuples and dicts."""
        for arg in args:
            if id(arg) in self._names:
                yield self._names[id(arg)]
            elif isinstance(arg, (list, tuple)):
                yield from self._named(arg)
            elif isinstance(arg, dict):
                yield from self._named(arg.values())

    def alive(self) -> list[str]:
        """Return the user's lines whose graphs are still alive. Called at the end of the block."""
        # Drop this object's own references first, because they keep graphs alive, too.
        self._views.clear()
        return list(dict.fromkeys(str(trip) for ref in self._hooks if (trip := ref()) is not None))


class _BackwardRefusal:
    """Tensor hook that raises an error in backward. The hook object lives as long as the graph of its tensor."""

    def __init__(self, name: str, line: str) -> None:
        self._name = name
        self._line = line

    def __str__(self) -> str:
        return f"{self._line} from {self._name!r}"

    def __call__(self, gradient: Tensor) -> None:
        raise RuntimeError(
            f"backward reached a tensor computed at {self} inside GatheredParameters; its gradient would not be "
            "reduced. Compute a penalty on weights inside the model's forward, and return it or keep it on the module"
        )


_EXTERNAL = "_zeropp_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module's forward uses a parameter of another module.

    The unit of the parameter is then gathered before the forward of the module. Without this call it is gathered when
    the forward accesses the parameter, so models work without it. All ranks must make the same call, before or after
    the model is wrapped.

    Args:
        module: module whose forward uses the parameter.
        parameter: parameter of another module.

    Raises:
        TypeError: ``module`` is not a module, or ``parameter`` is not a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter got a {type(module).__name__} and a {type(parameter).__name__}; expected a "
            "module and a parameter"
        )
    # Store the parameter in a list, because module.parameters() would also list it if it were an attribute.
    known = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(other is parameter for other in known):
        known.append(parameter)
        engine = handler_of(parameter)
        # Without an engine the model is not wrapped yet. Wrapping reads the list.
        if isinstance(engine, Engine):
            engine.use_in(module, parameter)


def external_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Iterate over the parameters that were registered for a module with :func:`register_external_parameter`."""
    yield from module.__dict__.get(_EXTERNAL, ())


class GatheredParameters:
    """Context manager that gives parameters their whole values, in the dtype of the main weights.

    Values have the compute dtype instead if an engine of ``zeropp.initialize`` trains the model and no
    ``modifier_rank`` is given, because scripts pass these values on to inference engines, which expect that dtype.
    Parameters that no engine manages yet keep their own dtype.

    Collective: all ranks of the model enter and leave, with the same parameters in the same order. The parameters
    belong to a wrapped model or were built in :class:`zeropp.zero.Init`; other parameters are left unchanged. Use it
    between passes; no optimizer step can be taken inside. Inside a forward or backward it only gathers the parameters
    for that pass.

    If all parameters of a model are gathered, the model can be called inside under ``torch.no_grad()``. It then
    computes with the gathered values, in the compute dtype and without communication, so each rank may make any number
    of calls.

    Args:
        params: a parameter, several parameters, or a module for all of its parameters. None among several is ignored.
        modifier_rank: global rank whose edits are kept. At the end its values are sent to all ranks and stored in the
            main weights. None to read values, or if all ranks make the same edits.
        fwd_module: module whose forward will use the parameters, as in DeepSpeed; see
            :func:`register_external_parameter`.
        enabled: False makes the context do nothing.

    Raises:
        RuntimeError: on entry, ``modifier_rank`` is given inside a pass, a parameter is gathered already with another
            ``modifier_rank`` (before wrapping: gathered already at all), or other ranks make another call. At the end,
            on all ranks: ranks made different edits without ``modifier_rank``, or assigned a tensor of another shape.
        TypeError: ``params`` contains an object that is not a tensor.
        ValueError: ``modifier_rank`` is not a rank of the model.
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
        # Skip None: transformers passes a layer's weight and bias, and the bias may be None.
        parameters = list({id(each): each for each in params if each is not None}.values())
        _refuse_others(parameters)
        if fwd_module is not None:
            for parameter in parameters:
                register_external_parameter(fwd_module, parameter)
        # One call may gather parameters of several wrapped models, so group them by engine.
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
                    # Skip parameters that an outer GatheredParameters has gathered, unless this one names another
                    # modifier_rank, which is an error. Skipped parameters stay gathered, with their edits, until the
                    # outer context ends.
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
            # The parameters of another engine may be gathered already, so reshard them.
            self._give_back()
            raise
        if self._contexts:
            # Gathered parameters have their normal class, so the guard does not intercept operations on them. A torch
            # function mode does.
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
            # Leave the mode before resharding, so that it does not record operations of zeropp itself.
            graphs.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        # Reshard before the edits are distributed, because that may fail.
        self._give_back()
        # After an error in the block, distribute no edits: other ranks may not reach that collective.
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
    """Report an exception on this rank to the other ranks, for parameters that ``zero.Init`` has built."""
    for context in contexts:
        if isinstance(context, BuildGather):
            context.report_failure(error)


def _warn_of_graphs(graphs: GraphTracker | None) -> None:
    """Warn about graphs from gathered values that are still alive, because a backward through them raises an error."""
    lines = graphs.alive() if graphs is not None else []
    if lines:
        warn_user(
            f"a tensor computed at {', '.join(lines[:3])}{', ...' if lines[3:] else ''} inside GatheredParameters is "
            "still held with its graph; backward through it raises an error, since its gradient would not be reduced. "
            "Compute a penalty on weights inside the model's forward, or use torch.no_grad() if you only read the value"
        )


def _refuse_others(given: Sequence[object]) -> None:
    for each in given:
        if not isinstance(each, Tensor):
            raise TypeError(
                f"params holds {each!r}, a {type(each).__name__}; expected a module, a parameter, or several parameters"
            )


class EngineGather:
    """Whole values, inside GatheredParameters, of parameters that one engine manages.

    The constructor gathers the values. It is collective over the engine's ranks.

    Attributes:
        places: flat buffer and index in it of each parameter.
        names: names of the parameters in the model.
        gathered: the parameters with their names.
        computed: True if the values have the compute dtype instead of the main dtype.
        values: whole values, in the order of ``places``.
        before: fingerprints of the values at the start; [] with a modifier_rank.
        trained: ``requires_grad`` of the parameters at the start.
    """

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
        # Compare the names over ranks. Ranks that gather different parameters would mix their values.
        engine.agreement.require_same_call(f"GatheredParameters of {self.names} with modifier_rank {modifier_rank}")
        self.computed = not edits and engine.gather_contexts.computed
        self._main: tuple[FlatBuffer | None, list[Tensor]] = None, []  # the last buffer of _keep_main, its main weights
        gather = gather_computed if self.computed else gather_main
        # Gather each buffer once for all of its parameters.
        gathered = {buffer: gather(engine, buffer) for buffer in dict.fromkeys(b for b, _ in self.places)}
        self.values = [gathered[buffer][index] for buffer, index in self.places]
        # Without a modifier_rank, edits are kept if all ranks make the same ones; otherwise they raise an error at the
        # end. Take fingerprints to detect edits.
        self.before = [fingerprint(value) for value in self.values] if modifier_rank is None else []
        # The guard does not intercept requires_grad_ on a gathered parameter. take_back reports changes to the engine.
        self.trained = [buffer.parameters[index].requires_grad for buffer, index in self.places]
        for (buffer, index), value in zip(self.places, self.values, strict=True):
            buffer.show_whole(index, value)
        engine.gather_contexts.enter_context(self)

    def has_gathered(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Return True if this context has gathered a parameter and its ``modifier_rank`` allows the given one."""
        return parameter in self.gathered and modifier_rank in (None, self.modifier_rank)

    def lower(self) -> None:
        """Convert the gathered values to the compute dtype, for a forward inside the context.

        Values are not converted back. Each later call finds them converted.

        Raises:
            RuntimeError: a value with another dtype was edited, or ``modifier_rank`` is given. The conversion would
                round the edits.
        """
        for number, (buffer, index) in enumerate(self.places):
            parameter, dtype = buffer.parameters[index], buffer.compute_dtype
            if parameter.dtype == dtype:
                continue
            if self.modifier_rank is not None or fingerprint(parameter) != self.before[number]:
                raise RuntimeError(
                    "the model was called inside GatheredParameters with edits or with modifier_rank, and its forward "
                    f"would round {self.names[number]!r} to {dtype}. Call the model after the block, or in a block "
                    "without modifier_rank and without edits"
                )
            # Convert one value at a time, so that only one of them exists in both dtypes.
            parameter.data = self.values[number] = parameter.data.to(dtype)
            self.before[number] = fingerprint(parameter)

    def take_back(self) -> None:
        """Reshard the parameters. Keep their current values, with edits, in :attr:`values`."""
        self.engine.gather_contexts.leave_context(self)
        # Take the current .data, because the user may have assigned another tensor to it.
        self.values = [buffer.release_whole(index) for buffer, index in self.places]
        for (buffer, index), before in zip(self.places, self.trained, strict=True):
            parameter = buffer.parameters[index]
            if parameter.requires_grad != before:
                self.engine.note_requires_grad(parameter, parameter.requires_grad)

    def scatter_edits(self) -> None:
        """Distribute the edits: each rank stores its shard of the edited values in the main weights. Collective.

        Raises:
            RuntimeError: on all ranks, if a rank made an edit that cannot be kept.
        """
        engine, keeps = self.engine, self.modifier_rank
        # Compare edits over ranks before the first broadcast, so that either all ranks raise or all continue.
        edits = self._edits() if keeps is None else {}
        wrong = self._misshapen()
        own = [int(bool(wrong)), digest_of(edits.items()) if edits else 0]
        rows = engine.agreement.exchange(GATHERED, own, "leaving GatheredParameters", "the end of GatheredParameters")
        if keeps is None and rows[0][1] and all(row == rows[0] for row in rows):
            # All ranks have made the same edits, so take the values of the first rank.
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
        # A refresh in flight still reads the shards that the edits are written to.
        engine.wait_for_refresh()
        with engine.agreement.watching("sharing edits made inside GatheredParameters"):
            for (buffer, index), value in zip(self.places, self.values, strict=True):
                # The shapes are checked. The dtype and strides may differ if the user has assigned another tensor.
                whole = value.detach().to(buffer.main_dtype).contiguous()
                engine.comm.broadcast(whole, keeps)
                if self.computed:
                    whole = self._keep_main(buffer, index, whole)
                # Each rank copies its own shard from the broadcast value, so all replicas of a shard get the same bits.
                buffer.load(buffer.parameters[index], whole)
        engine.weights_changed(dict.fromkeys(buffer for buffer, _ in self.places))

    def _keep_main(self, buffer: FlatBuffer, index: int, edited: Tensor) -> Tensor:
        """Return new main weights [shape of the parameter] for values that were gathered in the compute dtype.

        Elements without an edit keep their old main weight. Otherwise they would be rounded to the compute dtype.
        """
        if self._main[0] is not buffer:  # gather each buffer once: the places are sorted by buffer
            self._main = buffer, gather_main(self.engine, buffer)
        main, dtype = self._main[1][index], buffer.compute_dtype
        return torch.where(main.to(dtype) == edited.to(dtype), main, edited)

    def _edits(self) -> dict[str, object]:
        """Return the names of edited parameters with the fingerprints of their new values."""
        now = map(fingerprint, self.values)
        return {name: new for name, old, new in zip(self.names, self.before, now, strict=True) if old != new}

    def _misshapen(self) -> list[str]:
        """Return messages for parameters that were assigned a tensor of another shape."""
        return [
            f"{name} of shape {buffer.layout.slots[index].shape} was given {tuple(value.shape)}"
            for name, (buffer, index), value in zip(self.names, self.places, self.values, strict=True)
            if tuple(value.shape) != buffer.layout.slots[index].shape
        ]
