"""Events after which a prepared launch must not be repeated, and the checks that notice them, each removed once."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch._inductor  # before ``ways_with``, which forgets modules that were imported inside
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from bench.kernels.idle_driver import idle_card
from tests.kernels.prepared import HOST, Card, Case, Ways, cards, case_of, difference, moved, outcome, without_hooks
from tests.kernels.prepared_mutations import MUTATIONS
from zeropp_kernels import device, dispatch, message_layout
from zeropp_kernels.device import prepared

__all__ = ["events", "mutations"]

OTHER_CARD = torch.device("cuda", 1)


@dataclass
class Scene:
    """All that an event can change.

    Attributes:
        card: the driver.
        arguments: arguments of the call after the event.
        first: arguments of the calls before it, which prepare a launch.
        undo: takes back what the event has changed.
    """

    card: Card
    arguments: list[Any]
    first: list[Any]
    undo: ExitStack = field(default_factory=ExitStack)

    def patch(self, place: Any, name: str, value: object) -> None:
        self.undo.enter_context(mock.patch.object(place, name, value))

    def move(self, tensor: Tensor, place: torch.device) -> None:
        self.card.elsewhere[tensor.data_ptr()] = place


@dataclass(frozen=True)
class Event:
    """An event between two calls.

    Attributes:
        operation: name of the operation that is called.
        change: function that makes the event happen.
        changes: arguments of the operation's sample call that are replaced, by name.
        host: positions of the arguments in pinned host memory.
        start: function that is called before the first calls.
        before: True if the event happens before the first calls.
        repeated: True if the prepared launch must be repeated, with what has changed.
    """

    operation: str
    change: Callable[[Scene], object]
    changes: dict[str, object] = field(default_factory=dict)
    host: tuple[int, ...] = ()
    start: Callable[[Scene], object] = lambda scene: None
    before: bool = False
    repeated: bool = False

    def case(self) -> Case:
        return case_of(self.operation, self.host, **self.changes)


def put(place: int, value: Callable[[Any], object]) -> Callable[[Scene], None]:
    """Return an event that replaces an argument by a function of it."""

    def change(scene: Scene) -> None:
        scene.arguments[place] = value(scene.arguments[place])

    return change


def misaligned(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:1], tensor])[1:]


def with_gaps(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2)[::2]


def requiring_grad(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


def outputs_that_require_grad(scene: Scene) -> None:
    """Call with tensors that require grad, in no_grad mode until the event."""
    for arguments in (scene.first, scene.arguments):
        for tensor in arguments[1] if isinstance(arguments[1], list) else [arguments[1]]:
            requiring_grad(tensor)
    scene.undo.enter_context(torch.no_grad())


def grad_mode(scene: Scene) -> None:
    scene.undo.enter_context(torch.enable_grad())


def first_in_list(change: Callable[[Tensor], Tensor]) -> Callable[[Any], object]:
    return lambda tensors: [change(tensors[0]), *tensors[1:]]


def other_driver(scene: Scene) -> None:
    other = Card()
    other.stream = 8888
    scene.patch(triton.runtime.driver, "_active", other)


def hooked(name: str) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        chain, hook = getattr(knobs.runtime, name), lambda about: None
        chain.add(hook)
        scene.undo.callback(chain.remove, hook)

    return change


def hooked_kernel(scene: Scene) -> None:
    kernel = device.reduce.dequantize_kernel
    kernel.add_pre_run_hook(lambda *arguments, **options: None)
    scene.undo.callback(kernel.pre_run_hooks.clear)


def knob(group: str, name: str, value: object) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        knobs_of = getattr(knobs, group)
        scene.undo.enter_context(knobs_of.scope())
        setattr(knobs_of, name, value)

    return change


def other_table(row: int, values: list[int]) -> Callable[[Scene], None]:
    """Return an event that replaces a row of the table: 1 for sizes, 2 for offsets."""
    return lambda scene: scene.arguments[1][row].copy_(torch.tensor(values))


def for_amd(scene: Scene) -> None:
    """Make compiled kernels say that they are for an AMD GPU."""
    made = CompiledKernel.__init__

    def init(self: CompiledKernel, *arguments: object) -> None:
        made(self, *arguments)
        self.metadata = self.metadata._replace(target=GPUTarget("hip", "gfx942", 64))

    scene.patch(CompiledKernel, "__init__", init)
    recompiled(scene)


def recompiled(scene: Scene) -> None:
    """Make Triton forget the kernel of dequantize_, so that the next call compiles it or reads it from the disk."""
    kernel = device.reduce.dequantize_kernel
    kernel.device_caches.clear()
    scene.undo.callback(kernel.device_caches.clear)


def never_compiled(scene: Scene) -> None:
    """Have a hook tell Triton to compile nothing, and to launch nothing."""
    recompiled(scene)
    scene.patch(knobs.runtime, "jit_cache_hook", lambda **about: True)


def other_launch(operation: str, change: Callable[[list[Any]], None]) -> Callable[[Scene], None]:
    """Return an event that has an operation launch its kernel with arguments that it computes."""
    implementation = getattr(device, operation)

    def launch(*arguments: object) -> object:
        given = list(arguments)
        change(given)
        return implementation(*given)

    return lambda scene: scene.patch(device, operation, launch)


def computed_tensor(arguments: list[Any]) -> None:
    arguments[1] = arguments[1][:]


def computed_scale(arguments: list[Any]) -> None:
    arguments[3] = arguments[3] / 2


def captured(scene: Scene) -> None:
    """Let a CUDA graph be captured, in which no addresses may be sent."""
    scene.patch(Tensor, "is_cuda", property(lambda tensor: True))
    scene.patch(torch.cuda, "is_current_stream_capturing", lambda: True)


def other_table_in_between(scene: Scene) -> None:
    """Call with a table of other offsets, which has the same sizes."""
    other = [each.clone() if isinstance(each, Tensor) else each for each in scene.arguments]
    other_table(2, [0, 512])(Scene(scene.card, other, scene.first))
    sys.modules["zeropp_kernels.dispatch"].GPU_WAYS["gather_"][0](*other)


def input_that_requires_grad(scene: Scene) -> None:
    for arguments in (scene.first, scene.arguments):
        requiring_grad(arguments[0])


def guards_are(value: object) -> Callable[[Scene], None]:
    """Return an event that replaces the module of torch's guards."""
    return lambda scene: scene.patch(sys.modules["zeropp_kernels.dispatch"], "guards", value)


def nothing(scene: Scene) -> None:
    """Change only the addresses."""


def in_place(scene: Scene) -> None:
    """Decode into the reference."""
    for arguments in (scene.first, scene.arguments):
        arguments[2] = arguments[1]


def other_optional(scene: Scene) -> None:
    """Give a scale in a tensor [1] in place of the norms [1] of one block."""
    norms, scale = 5, 7
    scene.arguments[scale], scene.arguments[norms] = scene.arguments[norms], None


_FP16, _HALF = torch.float16, 0.5
# A flat buffer of gather_ with room for other offsets, and arguments of sum_ for sums of one block.
_ROOM: dict[str, object] = {"flat": torch.zeros(1024), "norms": None, "owners": torch.zeros(4, dtype=torch.int32)}
_ONE_BLOCK = {
    "messages": torch.ones(512), "out": torch.zeros(256), "count": 2, "norms": torch.zeros(1), "flag": None,
    "device_scale": None,
}  # fmt: skip
EVENTS: dict[str, Event] = {
    "new addresses": Event("dequantize_", nothing, repeated=True),
    "new addresses of a count": Event("lossless_count_", nothing, repeated=True),
    "moved tensors": Event("gather_", nothing, repeated=True),
    "a tensor given twice": Event("lossless_decode_", in_place, before=True, repeated=True),
    "a number given twice": Event(
        "reduce_quantize_", put(4, lambda scale: 0.25), changes={"scale": _HALF, "beta": _HALF}, repeated=True
    ),
    "another current stream": Event(
        "dequantize_", lambda scene: scene.patch(scene.card, "stream", 8888), repeated=True
    ),
    "another scale": Event("sum_", put(3, lambda scale: 0.25), repeated=True),
    "another driver": Event("dequantize_", other_driver),
    "another current device": Event("dequantize_", lambda scene: scene.patch(scene.card, "device", 1)),
    "a hook before launches": Event("dequantize_", hooked("launch_enter_hook")),
    "a hook after launches": Event("dequantize_", hooked("launch_exit_hook")),
    "a hook of the kernel": Event("dequantize_", hooked_kernel),
    "a knob of the runtime": Event("dequantize_", knob("runtime", "debug", True)),
    "a knob of the compilation": Event("dequantize_", knob("compilation", "instrumentation_mode", "")),
    "a misaligned pointer": Event("delta_encode_", put(2, misaligned)),
    "a misaligned pointer that need not be aligned": Event("lossless_count_", put(0, misaligned)),
    "NaN as scale": Event("sum_", put(3, lambda scale: float("nan"))),
    "infinity as scale": Event("sum_", put(3, lambda scale: float("inf"))),
    "other sizes in the table": Event("gather_", other_table(1, [99, 300])),
    "an end beyond the buffer": Event("gather_", other_table(2, [0, 512])),
    "moved tensors in a graph": Event("gather_", captured),
    "pageable memory": Event(
        "gather_", lambda scene: scene.patch(Tensor, "is_pinned", lambda tensor: False), host=(4,)
    ),
    "an output that requires grad": Event("dequantize_", put(1, requiring_grad)),
    "outputs that require grad": Event("scatter_", put(1, first_in_list(requiring_grad))),
    "grad mode": Event("dequantize_", grad_mode, start=outputs_that_require_grad),
    "grad mode with a list": Event("scatter_", grad_mode, start=outputs_that_require_grad),
    "another dtype": Event("dequantize_", put(1, lambda out: out.to(_FP16))),
    "another shape": Event("delta_encode_", put(0, lambda shard: shard[:-1].clone())),
    "another shape with the same bytes": Event("dequantize_", put(1, lambda out: out.view(2, -1))),
    "gaps": Event("dequantize_", put(1, with_gaps)),
    "another card": Event("dequantize_", lambda scene: scene.move(scene.arguments[1], OTHER_CARD)),
    "another number": Event("dequantize_", put(4, lambda rotate: True)),
    "another dtype of all tensors": Event("gather_", put(0, lambda tensors: [each.to(_FP16) for each in tensors])),
    "another dtype of a tensor": Event("gather_", put(0, first_in_list(lambda tensor: tensor.to(_FP16)))),
    "another card of a tensor": Event("gather_", lambda scene: scene.move(scene.arguments[0][1], OTHER_CARD)),
    "a tensor in host memory": Event("gather_", lambda scene: scene.move(scene.arguments[0][0], HOST)),
    "gaps in a tensor": Event("gather_", put(0, first_in_list(with_gaps))),
    "a tensor less": Event("gather_", put(0, lambda tensors: tensors[:1])),
    "another optional argument": Event("sum_", other_optional, changes=_ONE_BLOCK),
    "other tensors than one given twice": Event(
        "lossless_decode_", put(2, lambda out: out.to(_FP16)), start=in_place
    ),
    "two tables in turn": Event("gather_", other_table_in_between, changes=_ROOM, repeated=True),
    "an input that requires grad, in grad mode": Event(
        "quantize_", nothing, start=input_that_requires_grad, repeated=True
    ),
    "an empty buffer": Event(
        "dequantize_", nothing, changes={"messages": torch.empty(0, dtype=torch.uint8), "out": torch.empty(0)},
        before=True,
    ),
    "a misaligned pointer of a kernel that needs no alignment": Event("quantize_", put(0, misaligned), repeated=True),
    "no tensor": Event("quantize_", put(1, lambda messages: None)),
    "a Triton that is not known": Event(
        "dequantize_", lambda scene: scene.patch(triton, "__version__", "3.10.0"), before=True
    ),
    "a torch without guards": Event("dequantize_", guards_are(None), before=True),
    "guards that take other arguments": Event(
        "dequantize_", guards_are(types.SimpleNamespace(TensorGuards=lambda *tensors: None)), before=True
    ),
    "the interpreter": Event("dequantize_", lambda scene: scene.patch(prepared, "INTERPRETED", True), before=True),
    "an AMD GPU": Event("dequantize_", for_amd, before=True),
    "no compilation": Event("dequantize_", never_compiled, before=True),
    "a hook on the stages of the compiler": Event(
        "dequantize_",
        lambda scene: scene.patch(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
        before=True,
    ),
    "a hook that is no chain": Event(
        "dequantize_", lambda scene: scene.patch(knobs.runtime, "launch_exit_hook", None), before=True
    ),
    "a pointer that is computed": Event("dequantize_", other_launch("dequantize_", computed_tensor), before=True),
    "a scale that is computed": Event("sum_", other_launch("sum_", computed_scale), before=True),
    "a misaligned pointer at first": Event(
        "lossless_count_", lambda scene: scene.first.__setitem__(0, misaligned(scene.first[0])), before=True
    ),
}  # fmt: skip


def fault_of(event: Event, case: Case, ways: dict[str, Ways], card: Card) -> str:
    """Return "" if the call after an event does what the general way does, else how it differs."""
    fast, general = ways[case.operation]
    card.elsewhere.clear()
    with cards(card):
        scene = Scene(card, moved(case, card), moved(case, card))
        with scene.undo:
            event.start(scene)
            if event.before:
                event.change(scene)
            for _ in range(2):
                outcome(fast, scene.first, card)
            was_prepared = bool(card.taken) and not card.taken[0][-1]
            if not event.before:
                event.change(scene)
            wanted, found = (outcome(way, scene.arguments, card) for way in (general, fast))
    if not was_prepared and (event.repeated or not event.before):
        return "no launch was prepared"
    if not event.repeated:
        return difference(found, wanted)
    if found == wanted:
        return "the launch was not repeated"
    return difference(without_hooks(found), without_hooks(wanted))


def aligned_rows() -> Iterator[tuple[str, Event]]:
    """Yield an event for each argument that must be aligned: it is not."""
    for name, (schema, check) in dispatch._operations.items():
        names = [part.split()[-1].partition("=")[0] for part in schema.split(", ")]
        case = case_of(name)
        for argument in check(*case.arguments).aligned:
            place = names.index(argument)
            if case.arguments[place] is not None:
                yield f"misaligned {argument} of {name}", Event(name, put(place, misaligned))


def keeps_no_tensor(made: Any, case: Case, card: Card) -> str:
    """Return "" if the tensors of a call can be freed afterwards."""
    with cards(card):
        arguments = moved(case, card)
        kept = [weakref.ref(each) for each in arguments if isinstance(each, Tensor)]
        made.GPU_WAYS["dequantize_"][0](*arguments)
        card.taken.clear()
        del arguments
        gc.collect()
        return "the launch keeps a tensor" if any(ref() is not None for ref in kept) else ""


def keeps_the_kernel(made: Any, case: Case, card: Card) -> str:
    """Return "" if a kernel stays loaded that Triton itself has forgotten."""
    caches = device.reduce.dequantize_kernel.device_caches
    with cards(card):
        caches.clear()
        made.GPU_WAYS["dequantize_"][0](*moved(case, card))
        gc.collect()
        card.unloaded.clear()
        caches.clear()
        gc.collect()
        return "the function of the launch is unloaded" if card.unloaded else ""


def keeps_few_kinds(made: Any, case: Case, card: Card) -> str:
    """Return "" if launches of other sizes do not stay for ever."""
    with cards(card), mock.patch.object(made, "_MOST_PREPARED", 2):
        for numel in range(600, 606):
            message = torch.zeros(message_layout(numel, 8).nbytes, dtype=torch.uint8)
            made.GPU_WAYS["dequantize_"][0](message, torch.empty(numel), 1, 8, False)
        count = len(made.LAUNCHES["dequantize_"].found)
        return "" if 0 < count <= 2 else f"{count} kinds are kept, not 1 or 2"


def keeps_no_outdated_launch(made: Any, case: Case, card: Card) -> str:
    """Return "" if a launch that can not be repeated is replaced by the next one."""
    with cards(card), mock.patch.object(card, "device", 1):
        for _ in range(5):
            made.GPU_WAYS["dequantize_"][0](*moved(case, card))
        (found,) = made.LAUNCHES["dequantize_"].found.values()
        return "" if len(found) == 1 else f"{len(found)} launches are kept, not 1"


def keeps_few_of_a_kind(made: Any, case: Case, card: Card) -> str:
    """Return "" if launches for other shapes of the same sizes do not stay for ever."""
    case = case_of("gather_")
    with cards(card), mock.patch.object(made, "_MOST_ALIKE", 2):
        for rows in (1, 2, 4, 5, 10):
            arguments = moved(case, card)
            arguments[0][0] = arguments[0][0].view(rows, -1)
            made.GPU_WAYS["gather_"][0](*arguments)
        (found,) = made.LAUNCHES["gather_"].found.values()
        return "" if len(found) == 2 else f"{len(found)} launches are kept, not 2"


# Function of an operation, its arguments, and a list that gets an item for each call that comes to the dispatcher.
Observer = Callable[[Callable[..., None], list[Any], list[str]], object]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class OwnTensor(Tensor):
    """A tensor that records the functions of torch that are called with it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def under(context: Callable[[], Any]) -> Observer:
    """Return an observer that is a context around the call."""

    def observer(run: Callable[..., None], arguments: list[Any], reached: list[str]) -> None:
        with context():
            run(*arguments)

    return observer


def own_type(place: int) -> Observer:
    """Return an observer that calls three times with a tensor of a subclass, and counts only the third call."""

    def observer(run: Callable[..., None], arguments: list[Any], reached: list[str]) -> None:
        arguments[place] = arguments[place].as_subclass(OwnTensor)
        run(*arguments)
        run(*arguments)
        reached.clear()
        OwnTensor.seen.clear()
        run(*arguments)
        if "numel" in OwnTensor.seen:
            raise TypeError("a method of the type was called before the operation")

    return observer


def in_grad_mode(run: Callable[..., None], arguments: list[Any], reached: list[str]) -> None:
    """Prepare a launch in no_grad mode for an input that requires grad, and call in grad mode."""
    arguments[0] = arguments[0].requires_grad_()
    with torch.no_grad():
        run(*arguments)
        run(*arguments)
    reached.clear()
    run(*arguments)


def in_vmap(run: Callable[..., None], arguments: list[Any], reached: list[str]) -> None:
    torch.vmap(lambda x: (run(*arguments), x)[1])(torch.ones(2))


def compiled(run: Callable[..., None], arguments: list[Any], reached: list[str]) -> None:
    torch.compile(run, backend="eager", fullgraph=True)(*arguments)


def wrong(place: int, value: object) -> Observer:
    """Return an observer that gives a value of a type that the dispatcher refuses."""

    def observer(run: Callable[..., None], arguments: list[Any], reached: list[str]) -> None:
        try:
            run(*arguments[:place], value, *arguments[place + 1 :])
        except RuntimeError as error:
            if "value of type" in str(error):
                raise Refused from error
            raise

    return observer


class Refused(Exception):
    """The dispatcher has refused an argument."""


# Functions that call in a way in which something in torch may observe or change the call, or must refuse it; and the
# operations that they call.
OBSERVERS: dict[str, tuple[Observer, str]] = {
    "a dispatch mode": (under(Passing), "quantize_"),
    "a function mode": (under(PassingFunctions), "quantize_"),
    "the profiler": (under(torch.autograd.profiler.profile), "quantize_"),
    "a type with code of its own": (own_type(1), "quantize_"),
    "an input of a type with code of its own": (own_type(0), "quantize_"),
    "an input that requires grad": (in_grad_mode, "quantize_"),
    "vmap": (in_vmap, "quantize_"),
    "torch.compile": (compiled, "quantize_"),
    "a list in place of a number": (wrong(2, [1]), "quantize_"),
    "a number of an equal value": (wrong(2, 1.0), "quantize_"),
    "a scale of another type": (wrong(3, 1j), "sum_"),
}


def reaches_the_dispatcher(observer: Observer, made: Any, case: Case, card: Card) -> str:
    """Return "" if a call of a public function under an observer comes to torch's dispatcher."""
    reached: list[str] = []

    def way(name: str) -> Callable[..., None]:
        def implementation(*arguments: object) -> None:
            reached.append(name)
            made.GPU_WAYS[name][0](*arguments)

        return implementation

    arguments = moved(case, card)
    with idle_card(way, card):
        run = made.operation(case.operation)
        for _ in range(3):
            run(*arguments)
        if len(reached) != 1:
            return f"3 calls have come {len(reached)} times to the dispatcher, not once"
        reached.clear()
        try:
            observer(run, arguments, reached)
        except Refused:
            return ""
        return "" if reached else "the dispatcher was not reached"


KEPT: dict[str, Callable[[Any, Case, Card], str]] = {
    "no tensor is kept": keeps_no_tensor,
    "the kernel is kept": keeps_the_kernel,
    "no outdated launch is kept": keeps_no_outdated_launch,
    "more kinds of calls than are kept": keeps_few_kinds,
    "more calls of a kind than are kept": keeps_few_of_a_kind,
}


@contextmanager
def ways_with(file: str = "", old: str = "", new: str = "") -> Iterator[Any]:
    """Context with a new module ``dispatch``, after a replacement in one source file of the package."""
    folder, changed = Path(dispatch.__file__).parent, {}
    for name, path in {"dispatch": "dispatch.py", "device.prepared": "device/prepared.py"}.items():
        source = (folder / path).read_text()
        if path == file:
            assert source.count(old) == 1, f"{file} has {source.count(old)} times {old!r}; expected once"
            source = source.replace(old, new)
        module = types.ModuleType(f"zeropp_kernels.{name}")
        module.__file__, module.__package__ = str(folder / path), f"zeropp_kernels.{name}".rpartition(".")[0]
        changed[module.__name__] = module
        with mock.patch.dict(sys.modules, changed):
            exec(compile(source, f"<{path}>", "exec"), vars(module))
    library = types.SimpleNamespace(define=lambda *_: None, impl=lambda *_: None)
    with mock.patch.dict(sys.modules, changed), mock.patch.object(torch.library, "register_fake"):
        # A second copy of the module finds the operations of the first and defines none.
        made = changed["zeropp_kernels.dispatch"]
        for name, given in made._operations.items():
            made._define(library, name, *given)
        with mock.patch.object(sys.modules[__name__], "prepared", changed["zeropp_kernels.device.prepared"]):
            yield made


def events() -> Iterator[tuple[str, str]]:
    card, decoding = Card(), case_of("dequantize_")
    rows = {name: (event, event.case()) for name, event in (EVENTS | dict(aligned_rows())).items()}
    for name, (event, case) in rows.items():
        with ways_with() as made:
            yield name, fault_of(event, case, made.GPU_WAYS, card)
    for name, check in KEPT.items():
        with ways_with() as made:
            yield name, check(made, decoding, card)
    for name, (observer, operation) in OBSERVERS.items():
        with ways_with() as made:
            yield name, reaches_the_dispatcher(observer, made, case_of(operation), card)


def mutations() -> Iterator[tuple[str, str]]:
    """Yield the removed checks, each with a fault if the event that it is there for is still handled."""
    card, decoding = Card(), case_of("dequantize_")
    cases = {name: event.case() for name, event in EVENTS.items()}
    unknown = {name for name, *_ in MUTATIONS} - {**EVENTS, **KEPT, **OBSERVERS}.keys()
    assert not unknown, f"no event is called {unknown}"
    for name, file, old, new in MUTATIONS:
        observer, operation = OBSERVERS.get(name, (under(nullcontext), "dequantize_"))
        observed = case_of(operation)
        with ways_with(file, old, new) as made:
            try:
                if name in KEPT:
                    fault = KEPT[name](made, decoding, card)
                elif name in OBSERVERS:
                    fault = reaches_the_dispatcher(observer, made, observed, card)
                else:
                    fault = fault_of(EVENTS[name], cases[name], made.GPU_WAYS, card)
            except (AttributeError, LookupError, RuntimeError, TypeError) as raised:
                fault = repr(raised)
        print(f"{name}: without {old.strip()!r}: {fault[:160] or 'not noticed'}")
        yield name, "" if fault else f"is still handled without {old.strip()!r} in {file}"
    for name in {**EVENTS, **KEPT, **OBSERVERS}.keys() - {name for name, *_ in MUTATIONS}:
        yield name, "no removed check shows that this event is noticed"
