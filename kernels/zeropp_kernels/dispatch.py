"""Registration of the operations with torch.library: argument checks, then a Triton kernel or plain torch.

CUDA and ROCm tensors are passed to Triton kernels (:mod:`.device`), CPU tensors to plain torch (:mod:`.reference`).
Operations are registered by ``Library.define`` and ``Library.impl``, which cost less per call than
``torch.library.custom_op``. Triton is imported at the first call on a GPU, so the package works on CPU without
Triton.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.autograd.graph import increment_version

from . import reference
from .checks import (
    FLOATS,
    Memory,
    check_bits,
    check_blocks,
    check_count,
    check_encoding,
    check_flat,
    check_lossless,
    check_messages,
    check_scale,
    check_starts,
    check_stats,
    check_table,
)
from .version import __version__
from .wire import message_layout

try:
    from torch._C._dynamo import guards
except ImportError:  # a private module; torch has no public function that compares tensors in one call
    guards = None  # type: ignore[assignment]

__all__ = ["GPU_WAYS", "LAUNCHES", "NAMESPACE", "operation"]

NAMESPACE = "zeropp"
# Functions that run an operation on a GPU, by its name: the one that is registered, which uses prepared launches, and
# the one that checks everything and launches through Triton.
GPU_WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}
# The prepared launches of each operation, by its name.
LAUNCHES: dict[str, Launches] = {}
# Most kinds of prepared launches of an operation, and most launches of one kind. With more kinds, all are dropped: a
# program whose sizes change at every call would fill the memory.
_MOST_PREPARED, _MOST_ALIKE = 4096, 64
# Types of tensors whose methods are torch's own.
_PLAIN = (Tensor, torch.nn.Parameter)
_requires_grad = attrgetter("requires_grad")
_function_modes = torch._C._len_torch_function_stack
_FEEDBACK = "Tensor(b!)? state, float beta, bool reset"
# host and entries are marked as written, because both change when addresses are sent again. Otherwise torch.compile
# could reorder or drop those writes.
_TABLE = "Tensor(x!) host, Tensor(y!) entries, Tensor owners"
# Arguments that must start at a multiple of 16 bytes, because kernels store codes with 128-bit stores.
_ENCODED = ("messages", "state")
# The scale is two arguments, a number and an optional tensor, of which the tensor is used if given. A number that was
# converted to a tensor would cost a copy to the device per call.
_DEVICE_SCALE = "Tensor? device_scale=None"
_FP32 = (torch.float32,)
_BF16_OR_FP16 = (torch.bfloat16, torch.float16)


def _quantize(
    x: Tensor, messages: Tensor, count: int, bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool
) -> Memory:
    check_flat("x", x)
    check_encoding(check_count("count", count, x.numel(), "x"), messages, count, bits, state, beta)
    return Memory({"x": x, "messages": messages, "state": state}, _ENCODED)


def _quantize_tensors(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, numel: int, messages: Tensor, count: int,
    bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool,
) -> Memory:  # fmt: skip
    part = check_count("count", count, numel, "table")
    check_blocks("table.numel // count", part, count)
    check_table(tensors, host, entries, owners, numel, "table")
    check_encoding(part, messages, count, bits, state, beta)
    memory = {"entries": entries, "owners": owners, "messages": messages, "state": state}
    return Memory(memory, _ENCODED, many=tensors, host=host, room=numel)


def _reduce_quantize(
    sources: Tensor, numel: int, count: int, source_bits: int, scale: float, messages: Tensor, out_count: int,
    bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool, device_scale: Tensor | None = None,
) -> Memory:  # fmt: skip
    check_bits("source_bits", source_bits)
    check_scale(scale, device_scale)
    # This call checks only the bounds of count. The size of sources is checked against count and numel below.
    check_count("count", count, numel * count, "sources")
    check_messages("sources", sources, message_layout(numel, source_bits), count)
    part = check_count("out_count", out_count, numel, "the sum")
    check_blocks("numel // out_count", part, out_count)
    check_encoding(part, messages, out_count, bits, state, beta)
    memory = {"sources": sources, "messages": messages, "state": state}
    return Memory(memory, ("sources", *_ENCODED), scale=device_scale)


def _dequantize(messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool) -> Memory:
    check_bits("bits", bits)
    check_flat("out", out)
    check_messages("messages", messages, message_layout(check_count("count", count, out.numel(), "out"), bits), count)
    return Memory({"messages": messages, "out": out}, ("messages",))


def _reduce(
    messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool, scale: float, accumulate: bool,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> Memory:  # fmt: skip
    check_bits("bits", bits)
    check_scale(scale, device_scale)
    # This call checks only the bounds of count. The size of a message follows from out.
    check_count("count", count, 0, "messages")
    # A 16-bit out is only for sending. Sums that are added to or measured must be float32.
    plain = not accumulate and norms is None and flag is None
    check_flat("out", out, FLOATS if plain else _FP32)
    check_messages("messages", messages, message_layout(out.numel(), bits), count)
    check_stats(norms, flag, out.numel())
    return Memory({"messages": messages, "out": out, "norms": norms, "flag": flag}, ("messages",), scale=device_scale)


def _sum(
    messages: Tensor, out: Tensor, count: int, scale: float, accumulate: bool, norms: Tensor | None,
    flag: Tensor | None, device_scale: Tensor | None = None,
) -> Memory:  # fmt: skip
    check_scale(scale, device_scale)
    check_flat("messages", messages)
    check_flat("out", out, _FP32, check_count("count", count, messages.numel(), "messages"))
    check_stats(norms, flag, out.numel())
    return Memory({"messages": messages, "out": out, "norms": norms, "flag": flag}, scale=device_scale)


def _delta_encode(shard: Tensor, reference: Tensor, message: Tensor, update: bool) -> Memory:
    check_flat("shard", shard, _FP32)
    check_flat("reference", reference, _BF16_OR_FP16, shard.numel())
    check_messages("message", message, message_layout(shard.numel(), 4), 1)
    memory = {"shard": shard, "reference": reference, "message": message}
    return Memory(memory, ("message",))


def _delta_apply(messages: Tensor, reference: Tensor, count: int) -> Memory:
    check_flat("reference", reference, _BF16_OR_FP16)
    numel = check_count("count", count, reference.numel(), "reference")
    check_messages("messages", messages, message_layout(numel, 4), count)
    return Memory({"messages": messages, "reference": reference}, ("messages",))


def _lossless_count(values: Tensor, reference: Tensor, starts: Tensor) -> Memory:
    check_flat("values", values, (torch.float32, torch.bfloat16))
    check_flat("reference", reference, (torch.bfloat16,), values.numel())
    check_starts(starts, values.numel())
    return Memory({"values": values, "reference": reference, "starts": starts})


def _lossless_encode(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, room8: int, room16: int
) -> Memory:
    tensors = _lossless_count(values, reference, starts).tensors
    check_lossless(message, "message", values.numel(), 1, room8, room16)
    return Memory({**tensors, "message": message}, ("message",))


def _lossless_decode(messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int) -> Memory:
    check_flat("out", out, (torch.bfloat16,))
    check_flat("reference", reference, (torch.bfloat16,), out.numel())
    numel = check_count("count", count, out.numel(), "out")
    check_lossless(messages, "messages", numel, count, room8, room16)
    return Memory({"messages": messages, "reference": reference, "out": out}, ("messages",))


def _gather(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, accumulate: bool = False, device_scale: Tensor | None = None,
) -> Memory:  # fmt: skip
    check_flat("flat", flat, _FP32 if accumulate else FLOATS)
    check_scale(scale, device_scale)
    check_table(tensors, host, entries, owners, flat.numel(), "flat")
    check_stats(norms, flag, flat.numel())
    memory = {"entries": entries, "owners": owners, "flat": flat, "norms": norms, "flag": flag}
    # flat may start at any address: it is the caller's buffer, and kernels use narrow access where it is not aligned.
    return Memory(memory, pinned="flat", many=tensors, host=host, room=flat.numel(), scale=device_scale)


def _scatter(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> Memory:  # fmt: skip
    return _gather(tensors, host, entries, owners, flat, scale, norms, flag, False, device_scale)


def _unsupported(name: str, *arguments: object) -> None:
    given = [each for argument in arguments for each in (argument if isinstance(argument, list) else [argument])]
    tensors = [each for each in given if isinstance(each, Tensor)]
    # A quantized tensor is the only other kind of tensor that is dispatched to this function.
    elsewhere = [f"one on {each.device}" for each in tensors if each.device.type not in ("cpu", "cuda")]
    elsewhere += [f"a {each.layout} one" for each in tensors if each.layout != torch.strided]
    what = elsewhere[0] if elsewhere else "a quantized one"
    raise ValueError(f"{NAMESPACE}.{name} runs on dense CPU, CUDA and ROCm tensors; got {what}")


# (name, position) of each argument that an operation writes.
_Written = Sequence[tuple[str, int]]


def _outputs(written: _Written, arguments: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for _, place in written:
        given = arguments[place]
        # A list, a tensor or None. isinstance(given, Tensor) would be slow where given is no tensor.
        if isinstance(given, list):
            found += given
        elif given is not None:
            found.append(given)
    return found


def _refuse_gradients(written: _Written, arguments: Sequence[Any]) -> None:
    """Raise ValueError if an output requires grad: autograd would not notice that a kernel has overwritten it."""
    if not torch.is_grad_enabled():
        return
    for name, place in written:
        given = arguments[place]
        if isinstance(given, list):
            if any(map(_requires_grad, given)):
                index = [tensor.requires_grad for tensor in given].index(True)
                raise ValueError(f"{name}[{index}] requires grad and would be overwritten; call under torch.no_grad()")
        elif given is not None and given.requires_grad:
            raise ValueError(f"{name} requires grad and would be overwritten; call under torch.no_grad()")


class _Known(NamedTuple):
    """A prepared launch of an operation.

    Attributes:
        alike: function of tensors that returns True if types, dtypes, devices, shapes, strides and dispatch keys are
            those of the launch.
        requires_grad: True if a tensor requires grad.
        refused: True if an output requires grad.
        places: numbers of elements and offsets in the table of the launch; empty without a table.
        launch: function from :func:`.device.prepared.prepare`.
        written: function of the tensors that returns those that the operation writes.
    """

    alike: Callable[..., bool]
    requires_grad: bool
    refused: bool
    places: list[list[int]]
    launch: Callable[[Sequence[Any]], bool]
    written: Callable[[list[Tensor]], Any]


def _alike(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return the function ``alike`` of :class:`_Known` for these tensors; None if there can be none.

    torch's guards of compiled code compare all tensors in one call, in 0.1 us a tensor. They also compare the state of
    the thread: a launch that was prepared outside of a dispatch mode, autocast, functorch or tracing is not repeated
    inside, and the reverse.
    """
    # Calls with tensors of other types must come to the types' own code.
    if guards is None or not all(type(tensor) in _PLAIN for tensor in tensors):
        return None
    # Guards refuse a tensor that is given twice, so they get the first place of each only.
    seen: dict[int, int] = {}
    first = [seen.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
    places = list(seen.values())
    try:
        made = guards.TensorGuards(
            *(tensors[place] for place in places), dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
    except TypeError:
        return None  # other arguments in another version of torch
    check: Callable[..., bool] = made.check
    if len(places) == len(tensors):
        return check

    def alike(*given: Tensor) -> bool:
        same = all(tensor is given[place] for tensor, place in zip(given, first, strict=True))
        return same and check(*(given[place] for place in places))

    return alike


class Launches:
    """The prepared launches of one operation.

    Attributes:
        names: names of the operation's arguments.
        found: lists of launches, the most recent first, by a key of sizes and numbers. ``alike`` chooses within a list.
    """

    def __init__(self, declared: Sequence[Any], written: _Written) -> None:
        """Start without launches.

        Args:
            declared: arguments in the operation's schema.
            written: arguments that the operation writes.
        """
        self._written = written
        self.names = [each.name for each in declared]
        self.found: dict[tuple[object, ...], list[_Known]] = {}
        types = [str(each.type) for each in declared]
        self._lists = [place for place, each in enumerate(types) if each == "List[Tensor]"]
        self._optional = [place for place, each in enumerate(types) if each == "Optional[Tensor]"]
        required = [place for place, each in enumerate(types) if each == "Tensor"]
        self._single = [*required, *self._optional]
        self._numbers = [place for place in range(len(types)) if place not in (*self._single, *self._lists)]
        # Values of the scale are passed on, and checked by each launch.
        self._fixed = [place for place in self._numbers if self.names[place] != "scale"]
        # The number of elements of this tensor tells most calls apart.
        self._sized = required[-1]

    def _tensors(self, arguments: Sequence[Any]) -> list[Tensor]:
        tensors = [each for place in self._single if (each := arguments[place]) is not None]
        for place in self._lists:
            tensors += arguments[place]
        return tensors

    def _key(self, arguments: Sequence[Any], tensors: list[Tensor]) -> tuple[object, ...]:
        return (
            len(tensors),
            arguments[self._sized].numel(),
            *[arguments[place] for place in self._fixed],
            # 1, 1.0 and True are equal, and torch's dispatcher does not accept each of them.
            *[type(arguments[place]) for place in self._numbers],
            *[arguments[place] is None for place in self._optional],
        )

    def repeat(self, arguments: Sequence[Any], *, dispatched: bool = False) -> bool:
        """Launch again if a launch with such arguments was prepared; return True if so.

        Args:
            arguments: all arguments of the operation.
            dispatched: True if the call has come through torch's dispatcher.
        """
        # Methods of other types may do anything.
        if type(arguments[self._sized]) not in _PLAIN:
            return False
        try:
            tensors = self._tensors(arguments)
            found = self.found.get(self._key(arguments, tensors), ())
        except TypeError:
            return False  # a list in place of a number, for example, which the general way refuses
        for each in found:
            if not each.alike(*tensors):
                continue
            # The general way refuses outputs that require grad, and torch's dispatcher takes note of inputs.
            if (each.refused or (each.requires_grad and not dispatched)) and torch.is_grad_enabled():
                return False
            if each.launch(arguments):
                increment_version(each.written(tensors))
                return True
        return False

    def note_written(self, arguments: Sequence[Any]) -> None:
        """Increase the versions of the outputs, which kernels write without torch's knowledge.

        The new version lets autograd detect saved tensors that were overwritten.
        """
        increment_version(_outputs(self._written, arguments))

    def add(self, arguments: Sequence[Any], launch: Callable[[Sequence[Any]], bool]) -> None:
        """Keep a prepared launch for calls with such arguments."""
        tensors = self._tensors(arguments)
        alike = _alike(tensors)
        if alike is None:
            return
        if len(self.found) >= _MOST_PREPARED:
            self.found.clear()
        outputs = _outputs(self._written, arguments)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        written = itemgetter(*[places[id(each)] for each in outputs])
        refused = any(map(_requires_grad, outputs))
        table = arguments[self.names.index("host")].tolist()[1:] if self._lists else []
        made = _Known(alike, any(map(_requires_grad, tensors)), refused, table, launch, written)
        key = self._key(arguments, tensors)
        # A launch for such a call was not repeated, so it is outdated, for example by a change of Triton's knobs.
        others = [each for each in self.found.get(key, ()) if each.places != table or not each.alike(*tensors)]
        self.found[key] = [made, *others][:_MOST_ALIKE]


def _on_gpu(
    name: str,
    launches: Launches,
    defaults: tuple[object, ...],
    checked: Callable[[Sequence[object]], tuple[Memory, torch.device]],
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the two functions of :data:`GPU_WAYS` for an operation with these arguments, outputs and checks."""

    @functools.cache
    def device_side() -> tuple[Callable[..., Any], Any]:
        folder = importlib.import_module(f"{__package__}.device")
        return getattr(folder, name), importlib.import_module(f"{__package__}.device.prepared")

    def through_triton(arguments: Sequence[object]) -> Callable[[Sequence[object]], bool] | None:
        memory, device = checked(arguments)
        launch, prepared = device_side()
        # Triton launches on the current device, which may be another one than that of the arguments.
        with torch.cuda.device(device), torch.no_grad():
            if not prepared.preparable():
                launch(*arguments)
                return None
            # prepare() tells numbers apart by identity, and a program may have one object for two of them.
            apart = [each * 1.0 if isinstance(each, float) else each for each in arguments]
            return prepared.prepare(launch(*apart), apart, launches.names, memory, device)  # type: ignore[no-any-return]

    def general(*arguments: object) -> None:
        arguments += defaults[len(arguments) :]
        through_triton(arguments)
        launches.note_written(arguments)

    def fast(*arguments: object) -> None:
        # torch leaves out the last arguments if they are equal to their defaults.
        if len(arguments) < len(defaults):
            arguments += defaults[len(arguments) :]
        if launches.repeat(arguments, dispatched=True):
            return
        made = through_triton(arguments)
        if made is not None:
            launches.add(arguments, made)
        launches.note_written(arguments)

    return fast, general


def _define(library: torch.library.Library, name: str, schema: str, check: Callable[..., Memory]) -> None:
    """Define the operation ``name``, which :mod:`.reference` and :mod:`.device` implement under the same name."""

    library.define(f"{name}({schema}) -> ()")
    declared = getattr(torch.ops.zeropp, name).default._schema.arguments
    # The outputs are read from the schema, so that the arguments checked here are those that autograd and torch.compile
    # see as written.
    written = [
        (each.name, place) for place, each in enumerate(declared) if each.alias_info and each.alias_info.is_write
    ]

    def checked(arguments: Sequence[object]) -> tuple[Memory, torch.device]:
        _refuse_gradients(written, arguments)
        memory = check(*arguments)
        device = memory.check()
        # check_data is a separate step, because it reads addresses and values, which fake tensors do not have.
        memory.check_data(device)
        return memory, device

    def on_cpu(*arguments: object) -> None:
        checked(arguments)
        # Without no_grad, autograd would record a graph of the work on scratch buffers when an input requires grad.
        with torch.no_grad():
            getattr(reference, name)(*arguments)

    def fake(*arguments: object) -> None:
        _refuse_gradients(written, arguments)
        check(*arguments).check()

    LAUNCHES[name] = Launches(declared, written)
    GPU_WAYS[name] = _on_gpu(name, LAUNCHES[name], tuple(each.default_value for each in declared), checked)
    library.impl(name, on_cpu, "CPU")
    library.impl(name, GPU_WAYS[name][0], "CUDA")
    # This implementation is called for every tensor that the two others do not take: other devices, sparse and
    # quantized tensors.
    library.impl(name, functools.partial(_unsupported, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


_operations: dict[str, tuple[str, Callable[..., Memory]]] = {}


def _register(name: str, schema: str, check: Callable[..., Memory]) -> None:
    _operations[name] = schema, check


_register(
    "quantize_",
    f"Tensor x, Tensor(a!) messages, SymInt count, int bits, bool rotate, {_FEEDBACK}",
    _quantize,
)
_register(
    "quantize_tensors_",
    f"Tensor[] tensors, {_TABLE}, SymInt numel, Tensor(a!) messages, SymInt count, int bits, bool rotate, {_FEEDBACK}",
    _quantize_tensors,
)
_register(
    "reduce_quantize_",
    "Tensor sources, SymInt numel, SymInt count, int source_bits, float scale, Tensor(a!) messages, SymInt out_count, "
    f"int bits, bool rotate, {_FEEDBACK}, {_DEVICE_SCALE}",
    _reduce_quantize,
)
_register("dequantize_", "Tensor messages, Tensor(a!) out, SymInt count, int bits, bool rotate", _dequantize)
_register(
    "reduce_",
    "Tensor messages, Tensor(a!) out, SymInt count, int bits, bool rotate, float scale, bool accumulate, "
    f"Tensor(b!)? norms, Tensor(c!)? flag, {_DEVICE_SCALE}",
    _reduce,
)
_register(
    "sum_",
    "Tensor messages, Tensor(a!) out, SymInt count, float scale, bool accumulate, Tensor(b!)? norms, Tensor(c!)? flag, "
    f"{_DEVICE_SCALE}",
    _sum,
)
_register(
    "delta_encode_",
    "Tensor shard, Tensor(a!) reference, Tensor(b!) message, bool update",
    _delta_encode,
)
_register("delta_apply_", "Tensor messages, Tensor(a!) reference, SymInt count", _delta_apply)
_register("lossless_count_", "Tensor values, Tensor reference, Tensor(a!) starts", _lossless_count)
_register(
    "lossless_encode_",
    "Tensor values, Tensor reference, Tensor starts, Tensor(a!) message, SymInt room8, SymInt room16",
    _lossless_encode,
)
_register(
    "lossless_decode_",
    "Tensor messages, Tensor reference, Tensor(a!) out, SymInt count, SymInt room8, SymInt room16",
    _lossless_decode,
)
_register(
    "gather_",
    f"Tensor[] tensors, {_TABLE}, Tensor(a!) flat, float scale, Tensor(b!)? norms, Tensor(c!)? flag, bool accumulate, "
    f"{_DEVICE_SCALE}",
    _gather,
)
_register(
    "scatter_",
    f"Tensor flat, Tensor(a!)[] tensors, {_TABLE}, float scale, Tensor(b!)? norms, Tensor(c!)? flag, {_DEVICE_SCALE}",
    _scatter,
)


_REMEDY = "keep one of them on the path and restart Python"


def _are_defined() -> bool:
    """Return True if an earlier import of this package in this process has defined the operations already.

    The package may be reloaded or imported as a second copy. The existing operations then serve the new import, too.

    Raises:
        ImportError: the existing operations are from another version of the package.
    """
    ours = getattr(torch.ops, NAMESPACE)
    packets = {name: getattr(ours, name, None) for name in _operations}
    if all(packet is None for packet in packets.values()):
        return False
    for name, (schema, _) in _operations.items():
        packet = packets[name]
        found = f"no {NAMESPACE}::{name}" if packet is None else str(packet.default._schema)
        wanted = str(torch._C.parse_schema(f"{NAMESPACE}::{name}({schema}) -> ()"))
        if found != wanted:
            raise ImportError(
                f"zeropp_kernels {__version__} in {Path(__file__).parent} needs {wanted}; this process has {found}, "
                f"from another version of zeropp_kernels: {_REMEDY}"
            )
    there = ours.version() if hasattr(ours, "version") else "an older one"
    # Operations of two versions may have equal signatures and different results.
    if there != __version__:
        raise ImportError(
            f"zeropp_kernels {__version__} in {Path(__file__).parent} finds the operations of another version, "
            f"{there}, in this process: {_REMEDY}"
        )
    return True


# Define all operations or none, so that those of two versions never mix. A reload defines none again: a new Library in
# _library would destroy the old one, and with it the operations that it defined.
if not _are_defined():
    _library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for _name, _given in _operations.items():
        _define(_library, _name, *_given)
    _library.define("version() -> str")
    _library.impl("version", lambda: __version__, "CompositeExplicitAutograd")


def operation(name: str) -> Callable[..., None]:
    """Return the function that runs an operation. It takes all arguments by position.

    It repeats a prepared launch without torch's dispatcher, which would take 3 to 8 us more. Calls go through the
    dispatcher under torch.compile, under this thread's profiler, and under modes of torch functions, which
    ``torch.set_default_device`` sets, too; the guards of :func:`_alike` refuse under all other modes. Observers of all
    threads, such as ExecutionTraceObserver, do not see repeated launches. Neither do implementations that other code
    registers for an operation after its first call.
    """
    through_dispatcher: Callable[..., None] = getattr(getattr(torch.ops, NAMESPACE), name)
    # Nothing is there if an earlier import of the package has defined the operations.
    launches = LAUNCHES.get(name)
    if launches is None:
        return through_dispatcher
    found, repeat = launches.found, launches.repeat

    def run(*arguments: object) -> None:
        # is_compiling() comes first: torch.compile then reads nothing else here.
        observed = torch.compiler.is_compiling() or not found or _profiler_enabled() or _function_modes()
        if observed or not repeat(arguments):
            through_dispatcher(*arguments)

    return run
