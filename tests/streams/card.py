"""A simulated GPU on the CPU: zeropp takes its CUDA code paths, and every access to memory is checked.

Each storage is tagged as device memory, pinned memory or host memory. ``Tensor.device`` and ``is_cuda`` follow the tag,
so zeropp's ``CudaStream``, ``LaunchedStream`` and all tests for "cuda" run unchanged. Streams and events are replaced
by those of :mod:`tests.streams.clocks`. Values are computed at once by torch's CPU operations, in the order of
launches.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.streams.clocks import DEVICE, HOST, PINNED, Clocks, Memory, Now, Timeline
from zeropp._compat import unguarded
from zeropp.comm import hops, streams
from zeropp.comm.streams import Event
from zeropp.offload import read_ahead, storage_tiers, transfer
from zeropp.offload.swap import Descriptors
from zeropp.optimizer import cpu_pool, host_step
from zeropp.params import guard, wire_copy
from zeropp.wire import codecs

__all__ = ["CARD", "Card", "pretended_card"]

CARD = torch.device("cuda", 0)
# The device that factories receive in place of CARD. torch distinguishes cpu:0 from cpu, the host's device.
_HERE = torch.device("cpu", 0)
_COPIES = ("copy_", "_to_copy", "_foreach_copy_")
_INDEXED = ("index", "index_put_")
# The host reads a result of these operations, so it waits for the stream.
_READ = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero")
# These operations take a tensor as argument but do not access its memory.
_NO_ACCESS = ("set_", "detach_", "requires_grad_", "resize_", "_has_compatible_shallow_copy_type")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "empty_strided", "empty_like", "zeros_like")
_plain_device = Tensor.device
_plain_to = Tensor.to
_plain_tolist = Tensor.tolist
_plain_resize = torch.UntypedStorage.resize_


class Card:
    """The storages of the simulated GPU and of the host, and the effect of each operation on their clocks.

    Attributes:
        clocks: clocks of the GPU's streams and of the host's threads.
    """

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.inside = threading.local()  # ``deep`` is True while torch runs an operation on the CPU tensors
        self._memories: dict[int, Memory] = {}

    def memory(self, storage: torch.UntypedStorage, kind: str = HOST) -> Memory:
        """Return the record of a storage. A new record has the given kind."""
        number = storage._cdata
        found = self._memories.get(number)
        if found is None:
            found = self._memories[number] = Memory(kind, storage.nbytes())
            if found.nbytes:
                self.clocks.allocate(found)
            weakref.finalize(storage, self._forget, number).atexit = False
        return found

    def _forget(self, number: int) -> None:
        memory = self._memories.pop(number, None)
        if memory is not None:
            self.clocks.free(memory)

    def of(self, tensor: Tensor) -> Memory:
        """Return the record of a tensor's storage."""
        with unguarded():
            return self.memory(tensor.untyped_storage())

    def of_card(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in device memory. Inside an operation of torch, the result is always False."""
        if getattr(self.inside, "deep", False):
            return False
        with unguarded():
            found = self._memories.get(tensor.untyped_storage()._cdata)
        return found is not None and found.kind == DEVICE

    def take(self, *tensors: Tensor, kind: str = DEVICE) -> None:
        """Tag newly made tensors as device memory or pinned memory."""
        for each in tensors:
            with self.clocks.lock:
                memory = self.of(each)
                if memory.kind != kind:
                    memory.kind = kind
                    self.clocks.allocate(memory)
                    by = self.clocks.stream if kind == DEVICE else self.clocks.host
                    self.clocks.begin(by)
                    self.access(each, writes=True, by=by, what="filling")

    def access(self, tensor: Tensor, *, writes: bool, by: Timeline, what: str, counted: bool = False) -> None:
        """Record that an operation reads or writes a tensor.

        Args:
            tensor: the tensor.
            writes: True for a write.
            by: timeline of the operation.
            what: name of the operation, for reports.
            counted: True if torch's allocator of pinned memory waits for the access before it reuses the memory.
        """
        if tensor.numel() and not tensor.is_meta:
            start = tensor.storage_offset() * tensor.itemsize
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            stop = start + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
            memory = self.of(tensor)
            if stop > memory.nbytes:
                self.clocks.report(f"{what} by {by.name} comes to memory that was freed")
            self.clocks.access(memory, (start, stop), writes=writes, by=by, what=what, counted=counted)

    def launch(self, name: str, reads: list[Tensor], writes: list[Tensor], *, on_card: bool, waits: bool) -> None:
        """Record one operation.

        Args:
            name: name of the operation.
            reads: tensors that it reads.
            writes: tensors that it writes.
            on_card: True if the GPU runs it; False if the host runs it at once.
            waits: True if the host waits for it.
        """
        clocks = self.clocks
        stream, host = clocks.stream, clocks.host
        clocks.begin(host)
        if on_card:
            clocks.begin(stream)
        for given, written in ((reads, False), (writes, True)):
            for tensor in given:
                kind = self.of(tensor).kind
                # A host tensor without dimensions is passed to the kernel by value.
                number = kind == HOST and tensor.dim() == 0 and not written
                if on_card and kind == HOST and not number and name not in (*_COPIES, *_INDEXED):
                    raise RuntimeError(f"{name}: expected tensors of the card, found {list(tensor.shape)} of the host")
                by = stream if on_card and not number else host
                self.access(tensor, writes=written, by=by, what=name, counted=kind == PINNED and name in _COPIES)
                waits |= on_card and kind == HOST and not number
        if waits:
            host.join(stream.now)


class _Operations(TorchDispatchMode):
    """A dispatch mode that records the reads and writes of each operation of torch."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card
        # Operation -> its tensor arguments: position, name, and True if the operation writes it.
        self._declared: dict[Any, list[tuple[int, str, bool]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, card = kwargs or {}, self._card
        name: str = func.overloadpacket.__name__
        with card.clocks.lock:
            reads, writes = self._given(func, args, kwargs)
            given, device = [*reads, *writes], kwargs.get("device")
            here = any(map(card.of_card, given)) if given or device is None else device.index == 0
            returned = [each.alias_info for each in func._schema.returns]
            # An operation that returns a view accesses no memory.
            views = any(alias is not None and not alias.is_write for alias in returned)
            noted = not views and name not in (*_NO_ACCESS, *_EMPTY)
            if noted:
                # Record before running: without a wait the operation may access memory that is freed.
                non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
                crosses = name in _COPIES and len({card.of(each).kind for each in given}) > 1
                waits = here and (name in _READ or (crosses and not non_blocking))
                card.launch(name, reads, writes, on_card=here, waits=waits)
            before = {each.untyped_storage()._cdata for each in given}
            card.inside.deep = True
            try:
                found = func(*args, **kwargs)
            finally:
                card.inside.deep = False
            for each in tree_leaves(found):
                if isinstance(each, Tensor) and each.untyped_storage()._cdata not in before:
                    card.memory(each.untyped_storage(), DEVICE if here else HOST)
                    if noted:
                        by = card.clocks.stream if here else card.clocks.host
                        card.access(each, writes=True, by=by, what=name)
            return found

    def _given(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that an operation reads and the tensors that it writes."""
        declared = self._declared.get(func)
        if declared is None:
            # Skip the argument ``host`` of zeropp's operations, because the launching thread reads that table, not the
            # kernel.
            declared = self._declared[func] = [
                (place, each.name, each.alias_info is not None and each.alias_info.is_write)
                for place, each in enumerate(func._schema.arguments)
                if not (func.namespace == "zeropp" and each.name == "host")
            ]
        given: tuple[list[Tensor], list[Tensor]] = [], []
        for place, name, written in declared:
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                given[written].append(value)
            elif isinstance(value, list | tuple):
                given[written].extend(each for each in value if isinstance(each, Tensor))
        return given


class _Stream:
    """The replacement of ``torch.cuda.Stream``."""

    def __init__(self, card: Card, name: str = "comm stream", timeline: Timeline | None = None) -> None:
        self._card = card
        self.timeline = card.clocks.timeline(name) if timeline is None else timeline
        self.cuda_stream = self.timeline.number

    def wait_stream(self, other: _Stream) -> None:
        with self._card.clocks.lock:
            self.timeline.join(other.timeline.now)

    def wait_event(self, event: _Event) -> None:
        with self._card.clocks.lock:
            self.timeline.join(event.now)

    def record_event(self) -> _Event:
        event = _Event(self._card)
        event.record(self)
        return event

    def synchronize(self) -> None:
        with self._card.clocks.lock:
            self._card.clocks.host.join(self.timeline.now)


class _Event:
    """The replacement of ``torch.cuda.Event``."""

    def __init__(self, card: Card, enable_timing: bool = False) -> None:
        self._card = card
        # A query of a timing event is no wait for work, so query() of such an event always returns False.
        self._timed = enable_timing
        # As in CUDA, an event that was never recorded counts as complete.
        self.now: Now = {}

    def record(self, stream: _Stream | None = None) -> None:
        with self._card.clocks.lock:
            timeline = self._card.clocks.stream if stream is None else stream.timeline
            timeline.join(self._card.clocks.host.now)
            self.now = dict(timeline.now)

    def synchronize(self) -> None:
        with self._card.clocks.lock:
            self._card.clocks.host.join(self.now)

    def query(self) -> bool:
        if not self._timed:
            self.synchronize()
        return not self._timed


class _Queue(SimpleQueue):  # type: ignore[type-arg]
    """A queue whose ``get`` also joins the clock of the thread that called ``put``."""

    card: Card

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put((item, dict(self.card.clocks.host.now)))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item, now = super().get(block, timeout)
        self.card.clocks.host.join(now)
        return item


class _Late:
    """A queue that delays each ``get``, so that its thread begins work late."""

    def __init__(self, tasks: Any, seconds: float) -> None:
        self._tasks, self._seconds = tasks, seconds

    def get(self) -> Any:
        item = self._tasks.get()
        time.sleep(self._seconds)
        return item


class _ThreadEvent(streams.ThreadEvent):
    """A thread event whose waiters also join the clock of the thread that finished the event."""

    __slots__ = ("now",)
    card: Card

    def finish(self, error: BaseException | None) -> None:
        self.now = dict(self.card.clocks.host.now)
        super().finish(error)

    def wait(self, timeout: float) -> bool:
        ended = super().wait(timeout)
        if ended:
            self.card.clocks.host.join(self.now)
        return ended


def _page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, pin_memory=True)


def _ring_calls(card: Card) -> dict[str, Callable[..., Any]]:
    """Return replacements of the buffer ring's methods.

    A thread that takes a buffer joins the clock of the thread that returned the buffer.
    """
    known: dict[int, Now] = {}
    plain_take, plain_give = read_ahead.Ring.take_buffer, read_ahead.Ring.return_buffer

    def take(self: read_ahead.Ring) -> Tensor:
        buffer = plain_take(self)
        card.clocks.host.join(known.get(buffer.data_ptr(), {}))
        return buffer

    def give_back(self: read_ahead.Ring, buffer: Tensor) -> None:
        known[buffer.data_ptr()] = dict(card.clocks.host.now)
        plain_give(self, buffer)

    return {"take_buffer": take, "return_buffer": give_back}


class _Noted:
    """The event of a file transfer. Its ``wait`` joins the clock of the transfer's timeline."""

    def __init__(self, card: Card, event: Event, now: Now) -> None:
        self._card, self._event, self._now = card, event, now

    def wait(self, timeout: float) -> bool:
        ended = self._event.wait(timeout)
        self._card.clocks.host.join(self._now)
        return ended

    def done(self) -> bool:
        return self._event.done()


def _transfer(card: Card) -> Callable[..., Event]:
    """Return a ``Transfers._begin_transfer`` that gives each read or write of a file its own timeline."""
    plain, files = transfer.Transfers._begin_transfer, weakref.WeakKeyDictionary[Descriptors, Memory]()

    def begin(self: transfer.Transfers, extent: Any, start: int, memory: Tensor, *, reads: bool) -> Event:
        clocks = card.clocks
        with clocks.lock:
            by = clocks.timeline("a transfer")
            clocks.begin(by)
            what = "reading a file" if reads else "writing a file"
            card.access(memory, writes=reads, by=by, what=what)
            file, first = files.setdefault(extent.descriptors, Memory(HOST, 0)), extent.offset + start
            clocks.access(file, (first, first + memory.nbytes), writes=not reads, by=by, what=what)
            now = dict(by.now)
        return _Noted(card, plain(self, extent, start, memory, reads=reads), now)

    return begin


def _cuda(card: Card) -> dict[str, Any]:
    """Return replacements of the attributes of ``torch.cuda`` that zeropp uses."""
    model = _Stream(card, timeline=card.clocks.model)
    streams_of = {card.clocks.model.number: model}

    def make_stream(device: object = None, priority: int = 0) -> _Stream:
        made = _Stream(card)
        streams_of[made.timeline.number] = made
        return made

    @contextlib.contextmanager
    def enter(stream: _Stream) -> Iterator[None]:
        before, card.clocks.stream = card.clocks.stream, stream.timeline
        try:
            yield
        finally:
            card.clocks.stream = before

    def set_stream(stream: _Stream) -> None:
        card.clocks.stream = stream.timeline

    return {
        "Stream": make_stream,
        "Event": lambda enable_timing=False: _Event(card, enable_timing),
        "current_stream": lambda device=None: streams_of[card.clocks.stream.number],
        "stream": enter,
        "set_stream": set_stream,
        "device": lambda device: contextlib.nullcontext(),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }


def _tensor_calls(card: Card) -> dict[str, Any]:
    """Return replacements of the tensor methods that depend on the device."""

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        words = [*args, *kwargs.values()]
        like = next((word for word in words if isinstance(word, Tensor)), None)
        devices = [torch.device(word) for word in words if isinstance(word, str | torch.device)]
        if like is not None:
            devices = [like.device]
        dtype = next((word for word in words if isinstance(word, torch.dtype)), None if like is None else like.dtype)
        if not devices or devices[0].type == tensor.device.type or "meta" in (devices[0].type, tensor.device.type):
            if devices and devices[0].type == "cuda" and tensor.device.type == "cuda":
                kwargs.pop("device", None)
                args = tuple(word for word in args if not isinstance(word, str | torch.device | Tensor))
                return _plain_to(tensor, *args, **({"dtype": dtype} | kwargs if dtype and like is not None else kwargs))
            return _plain_to(tensor, *args, **kwargs)
        non_blocking = kwargs.get("non_blocking", True in args[1:])
        pinned = non_blocking and devices[0].type == "cpu"
        made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=devices[0], pin_memory=pinned)
        return made.copy_(tensor, non_blocking=non_blocking)

    def device_of(tensor: Tensor) -> torch.device:
        with unguarded():
            plain: torch.device = _plain_device.__get__(tensor)
        return plain if plain.type != "cpu" else CARD if card.of_card(tensor) else torch.device("cpu")

    def tolist(tensor: Tensor) -> Any:
        with card.clocks.lock:
            on_card = card.of_card(tensor)
            card.launch("tolist", [tensor], [], on_card=on_card, waits=on_card)
        return _plain_tolist(tensor)

    def record_stream(tensor: Tensor, stream: _Stream) -> None:
        card.of(tensor).named.add(stream.timeline)

    return {
        "to": to,
        "cpu": lambda tensor: to(tensor, "cpu"),
        "device": property(device_of),
        "is_cuda": property(card.of_card),
        "is_pinned": lambda tensor: card.of(tensor).kind == PINNED,
        "tolist": tolist,
        "record_stream": record_stream,
    }


def _factory(card: Card, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        given = None if device is None else torch.device(device)
        on_card = given is not None and given.type == "cuda"
        if given is not None:
            kwargs["device"] = _HERE if on_card else given
        made = plain(*args, **kwargs)
        if on_card or pin_memory:
            card.take(made, kind=DEVICE if on_card else PINNED)
        return made

    return make


def _grouped(card: Card) -> Callable[..., Any]:
    """Return a function that groups an optimizer's tensors by dtype and by simulated device."""
    plain = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def group(tensors: Any, with_indices: bool = False) -> Any:
        found = plain(tensors, with_indices)
        return {(CARD if card.of_card(each[0][0][0]) else key[0], key[1]): each for key, each in found.items()}

    return group


def _resize(card: Card) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        with card.clocks.lock:
            memory = card.memory(storage)
            if memory.nbytes:
                card.clocks.free(memory)
            _plain_resize(storage, nbytes)
            memory.nbytes = nbytes
            if nbytes:
                card.clocks.allocate(memory)
        return storage

    return resize_


def _collectives(world: int) -> dict[str, Callable[..., None]]:
    """Return collectives that act as if all ranks had the tensors of this rank; they run on the current stream."""

    def all_gather(out: Tensor, own: Tensor, group: object = None) -> None:
        out.view(-1, own.numel()).copy_(own.view(1, -1).clone())

    def all_to_all(out: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        parts = message.view(group.size(), -1)
        out.view(group.size(), -1).copy_(parts[group.rank()])

    def reduce_scatter(part: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        part.copy_(message.view(group.size(), -1)[group.rank()]).mul_(group.size())

    def all_reduce(tensor: Tensor, op: Any, group: object = None) -> None:
        tensor.mul_(world if op == dist.ReduceOp.SUM else 1)

    return {
        "all_gather_single": all_gather,
        "all_to_all_single": all_to_all,
        "reduce_scatter_single": reduce_scatter,
        "all_reduce": all_reduce,
    }


@contextlib.contextmanager
def pretended_card(world: int, *, late: float = 0.0) -> Iterator[Card]:
    """Simulate a GPU in the block, for one rank among ranks that all have its values. Yields the simulated GPU.

    Args:
        world: size of torch's fake process group, which exists already.
        late: seconds by which threads delay each piece of work.
    """
    card = Card()
    queue, event = type("_Queue", (_Queue,), {"card": card}), type("_ThreadEvent", (_ThreadEvent,), {"card": card})
    serve = streams._serve

    def serve_noted(tasks: Any) -> None:
        with _Operations(card):
            serve(_Late(tasks, late) if late else tasks)

    # torch caches its factories at the first ``with torch.device(...)``. Fill that cache before the factories are
    # patched.
    _device_constructors()
    collectives = _collectives(world)
    patches = [
        *((torch.cuda, name, call) for name, call in _cuda(card).items()),
        *((Tensor, name, call) for name, call in _tensor_calls(card).items()),
        *((torch, name, _factory(card, getattr(torch, name))) for name in _FACTORIES),
        (torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(_grouped(card))),
        (torch.UntypedStorage, "resize_", _resize(card)),
        *((read_ahead.Ring, name, call) for name, call in _ring_calls(card).items()),
        *((module, "SimpleQueue", queue) for module in (streams, cpu_pool, read_ahead, wire_copy)),
        *((module, "page_locked", _page_locked) for module in (storage_tiers, read_ahead)),
        (transfer.Transfers, "_begin_transfer", _transfer(card)),
        (streams, "ThreadEvent", event),
        (streams, "_serve", serve_noted),
        # Work of the card is as late as possible, so zeropp must wait for it wherever it may still run.
        (streams._CudaEvent, "done", lambda event: False),
        # A fixed number, because zeropp would measure the speed of this machine.
        (host_step, "spare_cores", lambda ranks: 2),
        *((hops, name, collectives[name]) for name in ("all_gather_single", "reduce_scatter_single")),
        *((dist, name, collectives[name]) for name in ("all_to_all_single", "all_reduce")),
        (dist, "broadcast", lambda tensor, source, group=None: None),
    ]
    with contextlib.ExitStack() as stack:
        # zeropp caches some device tensors for the life of the process. They must not outlive this simulated GPU.
        for kept in (guard.nothing, codecs._one_tensor):
            kept.cache_clear()
            stack.callback(kept.cache_clear)
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Operations(card))
        yield card
