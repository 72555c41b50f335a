"""Tensors in modules' arguments and outputs are found and cast, and all other objects stay as they are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from zeropp.engine.hooks import cast_floating, differentiable


def grad(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Output:
    loss: Tensor | None = None
    extra: object = None


@dataclass(slots=True)
class Slotted:
    hidden: Tensor


@dataclass(slots=True)
class SlottedChild(Slotted):
    logits: Tensor


class PlainSlots:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class OneSlot:
    __slots__ = "value"  # ``__slots__`` may be a single string

    def __init__(self, value: object) -> None:
        self.value = value


class SlotsAndDict(PlainSlots):
    def __init__(self, value: object, other: object) -> None:
        super().__init__(value)
        self.other = other


class ModelOutput(OrderedDict[str, Any]):
    """A dict whose items are also attributes, as in transformers."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


# Finding tensors.

NESTS = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t,),
    "list in tuple in list": lambda t: [1, ([t], "text")],
    "dict": lambda t: {"a": {"b": t}},
    "defaultdict": lambda t: defaultdict(list, a=[t]),
    "named tuple": lambda t: Pair(None, t),
    "dataclass": lambda t: Output(extra=[Output(loss=t)]),
    "dataclass with slots": lambda t: Slotted(t),
    "model output": lambda t: ModelOutput(loss=None, logits=t),
    "user dict": lambda t: UserDict(a=t),
    "object": lambda t: SimpleNamespace(inner=SimpleNamespace(value=t)),
    "object with slots": lambda t: PlainSlots([t]),
    "object with one slot": lambda t: OneSlot(t),
    "own slots and the rest in a dict": lambda t: SlotsAndDict(1, t),
    "distribution": lambda t: torch.distributions.Normal(t, torch.ones(t.shape)),
    "namespace in a set": lambda t: {t},
}


@pytest.mark.parametrize("name", NESTS)
def test_found_wherever_it_is(name: str) -> None:
    tensor = grad(3)
    assert [id(found) for found in differentiable(NESTS[name](tensor))] == [id(tensor)]


def test_slots_of_base_classes() -> None:
    hidden, logits = grad(1), grad(2)
    assert {id(found) for found in differentiable(SlottedChild(hidden, logits))} == {id(hidden), id(logits)}


def test_slots_beside_a_dict() -> None:
    value, other = grad(1), grad(2)
    assert {id(found) for found in differentiable(SlotsAndDict(value, other))} == {id(value), id(other)}


def test_each_once_and_in_order() -> None:
    a, b = grad(1), grad(2)
    output = ModelOutput(first=a, all=[b, a], again=(a, b))
    assert [id(found) for found in differentiable(output)] == [id(a), id(b)]
    assert differentiable([a, a]) == [a]


def test_only_tensors_that_require_grad_are_found() -> None:
    a = grad(2)
    assert differentiable([torch.ones(1), a * 2, a.detach(), torch.ones(1, dtype=torch.long)])[0].grad_fn is not None
    assert len(differentiable((a, a * 2, a.detach()))) == 2
    with torch.no_grad():
        assert differentiable(a * 2) == []
    for value in (None, 1, "text", b"bytes", 1.5, True, Output, torch.float32, object(), lambda: a, range(3)):
        assert differentiable(value) == []


def test_cycles_end() -> None:
    a = grad(1)
    loop: list[object] = [a]
    loop.append(loop)
    namespace = SimpleNamespace(me=None, items={"loop": loop})
    namespace.me = namespace
    assert differentiable(namespace) == [a]


def test_modules_and_iterators_are_left_alone() -> None:
    """Parameters of a module among the outputs are no outputs, and an iterator must not be consumed."""
    module = nn.Linear(2, 2)
    assert differentiable({"model": module, "output": Output(extra=module)}) == []
    stream = iter([grad(1)])
    assert differentiable([stream]) == []
    assert next(stream) is not None


# Casting tensors.


def test_floating_tensors_are_cast_and_others_not() -> None:
    cast = cast_floating((torch.ones(2), torch.ones(2, dtype=torch.long), torch.tensor(True)), torch.bfloat16)
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.long, torch.bool]
    same = torch.ones(2, dtype=torch.bfloat16)
    assert cast_floating(same, torch.bfloat16) is same
    assert cast_floating(torch.ones(2, dtype=torch.complex64), torch.bfloat16).dtype == torch.complex64


def test_a_cast_keeps_the_graph() -> None:
    a = grad(3)
    cast_floating([a], torch.float64)[0].sum().backward()
    assert a.grad is not None and a.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(1), "x"),
        [torch.ones(1), 2],
        {"a": torch.ones(1), "b": None},
        Pair(torch.ones(1), [torch.ones(2)]),
        Output(torch.ones(1), {"deep": [torch.ones(1)]}),
        torch.max(torch.ones(2, 2), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_keep_their_type(value: object) -> None:
    cast = cast_floating(value, torch.float64)
    assert type(cast) is type(value)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(_plain(cast)) if isinstance(leaf, Tensor)]
    assert leaves and all(leaf.dtype in (torch.float64, torch.long) for leaf in leaves)
    assert any(leaf.dtype == torch.float64 for leaf in leaves)
    assert all(leaf.dtype in (torch.float32, torch.long) for leaf in _tensors(value)), "the caller's tensors changed"


@pytest.mark.parametrize("kind", [OrderedDict, ModelOutput])
def test_kinds_of_dict_keep_their_type(kind: type) -> None:
    value = kind(a=torch.ones(1), b=1)
    cast = cast_floating(value, torch.float64)
    assert type(cast) is kind and cast["a"].dtype == torch.float64 and list(cast) == ["a", "b"]


def test_a_defaultdict_keeps_its_factory() -> None:
    cast = cast_floating(defaultdict(list, a=torch.ones(1)), torch.float64)
    assert cast["a"].dtype == torch.float64
    assert cast["missing"] == []


def _plain(value: object) -> object:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(_plain(value)) if isinstance(leaf, Tensor)]


class Custom:
    def __init__(self) -> None:
        self.tensor = torch.ones(1)


@dataclass
class Cache:
    """A cache without tensors before the call, which the model fills."""

    steps: int = 0
    seen: list[object] = field(default_factory=list)
    hits: int = field(default=0, init=False)


@dataclass
class Checked:
    size: int
    strict: dataclasses.InitVar[bool]

    def __post_init__(self, strict: bool) -> None:
        self.size = self.size if strict else -1


@dataclass(frozen=True)
class FrozenBatch:
    values: Tensor
    kind: str = "train"


@pytest.mark.parametrize(
    "value",
    [None, "text", 3, 2.5, Custom(), nn.Linear(1, 1), Output, range(3), torch.Size([2]), torch.float32, {1, 2}, (1, 2)],
    ids=lambda value: type(value).__name__,
)
def test_values_without_floating_tensors_are_not_cast(value: object) -> None:
    assert cast_floating(value, torch.bfloat16) == value


@pytest.mark.parametrize(
    "value",
    [[], {}, [1, {"a": 2}], {"ids": torch.zeros(1, dtype=torch.long)}, OrderedDict(a=1), Cache(), Checked(4, True)],
    ids=lambda value: type(value).__name__,
)
def test_containers_without_floating_tensors_are_the_caller_s_own(value: object) -> None:
    """A list or cache that the model fills must reach the caller, so it is not copied if nothing in it is cast."""
    assert cast_floating(value, torch.bfloat16) is value
    assert cast_floating((torch.ones(1), value), torch.bfloat16)[1] is value


def test_dataclasses() -> None:
    cast = cast_floating(FrozenBatch(torch.ones(2), "eval"), torch.bfloat16)
    assert (cast.values.dtype, cast.kind) == (torch.bfloat16, "eval")
    slotted = cast_floating(Slotted(torch.ones(1)), torch.bfloat16)
    assert type(slotted) is Slotted and slotted.hidden.dtype == torch.bfloat16
