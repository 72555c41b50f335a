"""Prepared launches beside those of the general way, recorded by a driver that launches nothing.

Run as a program, with Triton's interpreter off:

    python -m tests.kernels.prepared agree|events|mutations

It prints the rows that are wrong and their number, and exits with 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._dynamo import guards
from triton.runtime import driver

from bench.kernels.idle_driver import IdleDriver, idle_card
from bench.kernels.operations import OPERATIONS
from tests.kernels.operations import listed, samples
from zeropp_kernels import dispatch, state_layout

__all__ = ["Card", "Case", "all_cases", "cards", "case_of", "moved", "outcome", "run_rows"]

CARD, HOST = torch.device("cuda", 0), torch.device("cpu")
Ways = tuple[Callable[..., None], Callable[..., None]]


class Card(IdleDriver):
    """A driver that records launches, and calls the hooks that it is given.

    A process has one, because Triton keeps the launcher of a compiled kernel.

    Attributes:
        taken: for each launch the grid, stream, kernel, packed metadata, current device, arguments, and last True if
            Triton itself launched: it passes hooks, prepared launches pass none.
        elsewhere: devices of tensors by address; all others are on the first card.
    """

    def __init__(self) -> None:
        super().__init__(self.take)
        self.device = CARD.index
        self.taken: list[tuple[object, ...]] = []
        self.elsewhere: dict[int, torch.device] = {}

    def take(self, *given: Any) -> None:
        (*place, about, enter, leave), arguments = given[:9], given[9:]
        if enter is not None:
            enter(about)
        passed = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        self.taken.append((*place, self.device, passed, enter is not None))
        if leave is not None:
            leave(about)


@contextmanager
def cards(card: Card) -> Iterator[None]:
    """Context in which CPU tensors seem to be on the first card, apart from those in ``card.elsewhere``."""

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        with mock.patch.object(card, "device", device.index):
            yield

    def device_of(tensor: Tensor) -> torch.device:
        return card.elsewhere.get(tensor.data_ptr(), CARD)

    def number_of(tensor: Tensor) -> int:
        return -1 if device_of(tensor) == HOST else device_of(tensor).index

    class Guards:
        """torch's guards, which also compare where tensors seem to be."""

        def __init__(self, *tensors: Tensor, **options: object) -> None:
            self.places = list(map(device_of, tensors))
            self.guards = sound(*tensors, **options)

        def check(self, *tensors: Tensor) -> bool:
            return self.guards.check(*tensors) and list(map(device_of, tensors)) == self.places

    sound = guards.TensorGuards
    # The driver stays active until the process ends, because Triton asks it to unload kernels.
    driver.set_active(card)
    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(guards, "TensorGuards", Guards))
        undo.enter_context(mock.patch.object(torch.cuda, "device", current))
        undo.enter_context(mock.patch.object(Tensor, "device", property(device_of), create=True))
        undo.enter_context(mock.patch.object(Tensor, "get_device", number_of))
        undo.enter_context(mock.patch.object(Tensor, "is_pinned", lambda tensor: device_of(tensor) == HOST))
        yield


@dataclass(frozen=True)
class Case:
    """A call of an operation.

    Attributes:
        operation: name of the operation.
        arguments: positional arguments; the last ones may be left out.
        host: positions of the arguments in pinned host memory.
    """

    operation: str
    arguments: tuple[Any, ...]
    host: tuple[int, ...] = ()


def moved(case: Case, card: Card) -> list[Any]:
    """Return the arguments of a case with all tensors at new, aligned addresses."""

    def copy(argument: object) -> object:
        if isinstance(argument, list):
            return [copy(each) for each in argument]
        return argument.detach().clone() if isinstance(argument, Tensor) else argument

    arguments = [copy(argument) for argument in case.arguments]
    card.elsewhere.update({arguments[place].data_ptr(): HOST for place in case.host})
    return arguments


def outcome(way: Callable[..., None], arguments: Sequence[Any], card: Card) -> tuple[object, ...]:
    """Return all that a call does: launches, error, bytes of all tensors, and new versions. Tensors are restored."""
    tensors = [tensor for argument in arguments for tensor in listed(argument)]
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    card.taken, error = [], ""
    try:
        way(*arguments)
    except (TypeError, ValueError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    versions = [tensor._version - old for tensor, (_, old) in zip(tensors, before, strict=True)]
    contents = [bytes(tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()) for tensor in tensors]
    for tensor, (old, _) in zip(tensors, before, strict=True):
        tensor.detach().copy_(old)
    return card.taken, error, contents, versions


def without_hooks(found: tuple[Any, ...]) -> tuple[object, ...]:
    """Return an outcome without the mark of launches that Triton itself made."""
    launches, *rest = found
    return [each[:-1] for each in launches], *rest


def difference(found: tuple[object, ...], wanted: tuple[object, ...]) -> str:
    """Return "" if two outcomes are equal, else where they differ."""
    parts = zip(("launches", "errors", "contents", "versions"), found, wanted, strict=True)
    return "; ".join(f"{name} {str(a)[:300]} and {str(b)[:300]}" for name, a, b in parts if a != b)


def case_of(name: str, host: tuple[int, ...] = (), **changes: object) -> Case:
    """Return the sample call of an operation, with other arguments by name."""
    names = [each.name for each in getattr(torch.ops.zeropp, name).default._schema.arguments]
    given = dict(zip(names, samples()[name], strict=True))
    assert changes.keys() <= given.keys(), changes
    return Case(name, tuple((given | changes).values()), host)


def sample_cases() -> dict[str, Case]:
    found = {name: case_of(name) for name in samples()}
    norms, flag, scale = torch.zeros(3), torch.zeros(1, dtype=torch.int32), torch.tensor(0.5)
    state = torch.zeros(state_layout(600, 8).nbytes, dtype=torch.uint8)
    variants: dict[str, list[dict[str, object]]] = {
        "quantize_": [{"state": None}, {"reset": True}],
        "quantize_tensors_": [{"state": state}],
        "reduce_quantize_": [{"device_scale": None}, {"state": None}],
        "reduce_": [{"norms": None}, {"flag": None}, {"accumulate": False}, {"device_scale": scale}],
        "sum_": [{"norms": None}, {"flag": None}, {"accumulate": False}, {"device_scale": None}],
        "delta_encode_": [{"update": False}],
        "gather_": [{"accumulate": True}, {"norms": None, "flag": None}, {"device_scale": None}, {"host": (4,)}],
        "scatter_": [{"norms": norms, "flag": flag}, {"device_scale": scale}, {"host": (0,)}],
    }
    for name, changes in variants.items():
        for index, change in enumerate(changes):
            found[f"{name}, variant {index}: {', '.join(change)}"] = case_of(name, **change)  # type: ignore[arg-type]
    return found


def bench_cases() -> dict[str, Case]:
    """Return the calls of the benchmark's operations, with the arguments that torch's dispatcher passes on."""
    found: dict[str, Case] = {}

    def taken(name: str) -> Callable[..., None]:
        return lambda *arguments: found.update({f"{operation.name}: {name}": Case(name, arguments)})

    for operation in OPERATIONS:
        run = operation.make(1 << 13, "cpu").ours
        with idle_card(taken):
            run()
    return found


def all_cases() -> dict[str, Case]:
    return sample_cases() | bench_cases()


def agree(ways: dict[str, Ways], case: Case, card: Card) -> str:
    """Return "" if the second and the third call of a case, at new addresses, do what the general way does."""
    fast, general = ways[case.operation]
    card.elsewhere.clear()
    kept = [moved(case, card) for _ in range(3)]  # alive, so that all addresses differ
    outcome(fast, kept[0], card)
    for arguments in kept[1:]:
        wanted, found = outcome(general, arguments, card), outcome(fast, arguments, card)
        if not card.taken or card.taken[0][-1]:
            return "the launch was not prepared"
        if said := difference(without_hooks(found), without_hooks(wanted)):
            return said
    return ""


def run_rows(rows: Iterator[tuple[str, str]]) -> int:
    """Print the names and faults of wrong rows, and their number; return the exit status."""
    found = list(rows)
    wrong = [(name, fault) for name, fault in found if fault]
    for name, fault in wrong:
        print(f"{name}: {fault}")
    print(f"{len(found)} rows, {len(wrong)} wrong")
    return 1 if wrong or not found else 0


def agreements() -> Iterator[tuple[str, str]]:
    cases, card = all_cases(), Card()
    with cards(card):
        for name, case in cases.items():
            yield name, agree(dispatch.GPU_WAYS, case, card)


def main() -> int:
    from tests.kernels import prepared_events

    rows = {"agree": agreements, "events": prepared_events.events, "mutations": prepared_events.mutations}
    return run_rows(rows[sys.argv[1]]())


if __name__ == "__main__":
    sys.exit(main())
