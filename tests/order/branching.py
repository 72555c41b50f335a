"""A simulation of models whose control flow depends on each rank's data: a rank runs a part of the model's code.

The forward of a module runs other modules and uses parameters, some of them only for some data. A module may run inside
another module of its unit, or without that module. A module may be checkpointed, and may run without a use of its own
parameter. A backward covers one or several forwards, and forwards without gradients may come between.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.order.rank import Rank
from tests.order.world import Deadlock, World
from zeropp.engine.backward import OutOfModuleUses
from zeropp.order.known_orders import PhaseKey
from zeropp.order.prefetch import Limits
from zeropp.params.unit import UnitState

__all__ = [
    "DEADLOCKS",
    "SCENARIOS",
    "Case",
    "Model",
    "check_alike",
    "check_seeds",
    "train",
]

# Seeds of cases that have deadlocked and must train. Their causes: calls that a backward makes itself, kinds of
# backwards that were not distinguished, modules that run for the first time, and modules that run without the module
# usually around them.
DEADLOCKS = [3, 538, 626, 3260, 6941, 8950, 12782, 17809, 18999, 19411, 19498, 19992]


@dataclass(frozen=True)
class Touch:
    """A use of a parameter outside of its module; ``optional`` if only some data causes the use."""

    unit: int
    optional: bool = False


@dataclass(frozen=True)
class Call:
    """A run of a module.

    Attributes:
        module: path of the module.
        checkpoint: "", "reentrant" or "plain" (non-reentrant).
        optional: True if some data skips the call.
        unwrapped: True if some data runs the inner calls without this module.
        inside: calls and uses in its forward, for the data of one rank.
        used: True if the data uses the module's own parameter.
    """

    module: str
    checkpoint: str = ""
    optional: bool = False
    unwrapped: bool = False
    inside: tuple[Call | Touch, ...] = ()
    used: bool = True


Code = tuple[Call | Touch, ...]


@dataclass(frozen=True)
class Model:
    """Modules, the unit of each, and the code of their forwards. The code of the model's own forward has the path "".

    Attributes:
        units: number of units.
        modules: module path -> unit.
        bodies: module path -> code.
    """

    units: int
    modules: Mapping[str, int]
    bodies: Mapping[str, Code]

    def full(self) -> Code:
        """Return the code of a forward that runs everything, in the order of the code."""
        return self._expand(self.bodies[""])

    def _expand(self, code: Code) -> Code:
        return tuple(
            Call(n.module, n.checkpoint, n.optional, n.unwrapped, self._expand(self.bodies[n.module]))
            if isinstance(n, Call)
            else n
            for n in code
        )

    def outermost(self) -> dict[str, int]:
        """Return the modules that are not inside another module of their unit: path -> unit."""
        return {path: unit for path, unit in self.modules.items() if all(self.modules[p] != unit for p in _above(path))}


def _above(path: str) -> Iterator[str]:
    names = path.split(".")
    yield from (".".join(names[:count]) for count in range(1, len(names)))


def draw_model(draw: random.Random) -> Model:
    units = draw.choice([2, 3, 4])
    modules = {f"m{index}": index % units for index in range(draw.randint(units, units + 3))}
    for parent in list(modules):
        if draw.random() < 0.4:
            modules[f"{parent}.c"] = modules[parent] if draw.random() < 0.7 else draw.randrange(units)
    names = list(modules)
    bodies: dict[str, Code] = {}
    for place, name in enumerate(names):
        # A module runs only modules that come later, so no module runs itself.
        later = [other for other in names[place + 1 :] if "." not in other or other.startswith(f"{name}.")]
        children = [other for other in later if other.startswith(f"{name}.")]
        inner = children + ([draw.choice(later)] if later and draw.random() < 0.25 else [])
        bodies[name] = tuple(_draw_node(draw, other, units) for other in inner)
    # Remove calls that lead back to their module. The order above excludes such calls already, so this is a safeguard.
    bodies = {name: tuple(n for n in code if _is_free(n, name, bodies)) for name, code in bodies.items()}
    tops = [name for name in names if "." not in name]
    bodies[""] = tuple(_draw_node(draw, draw.choice(tops), units) for _ in range(draw.randint(2, 6)))
    return Model(units, modules, bodies)


def _is_free(node: Call | Touch, name: str, bodies: Mapping[str, Code]) -> bool:
    """Return True if running the node does not run module ``name`` again."""
    if isinstance(node, Touch):
        return True
    return node.module != name and all(_is_free(inner, name, bodies) for inner in bodies.get(node.module, ()))


def _draw_node(draw: random.Random, module: str, units: int) -> Call | Touch:
    if draw.random() < 0.15:
        return Touch(draw.randrange(units), draw.random() < 0.5)
    checkpoint = draw.choices(["", "reentrant", "plain"], [6, 1, 1])[0]
    return Call(module, checkpoint, draw.random() < 0.4, draw.random() < 0.2)


def for_data(draw: random.Random, code: Code, much: float) -> Code:
    """Return the part of some code that a rank's data runs, sometimes with two neighbours in reverse order.

    ``much`` is the probability that an optional or unwrapped node runs as written.
    """
    found: list[Call | Touch] = []
    for node in code:
        if node.optional and draw.random() > much:
            continue
        if isinstance(node, Touch):
            found.append(node)
            continue
        inside = for_data(draw, node.inside, much)
        if node.unwrapped and draw.random() > much:
            found += inside
        else:
            used = draw.random() < 0.8
            found.append(Call(node.module, node.checkpoint, node.optional, node.unwrapped, inside, used))
    if len(found) > 1 and draw.random() > max(much, 0.7):
        place = draw.randrange(len(found) - 1)
        found[place], found[place + 1] = found[place + 1], found[place]
    return tuple(found)


@dataclass(frozen=True)
class Phase:
    """One forward, backward, evaluation or step.

    Attributes:
        kind: "forward", "evaluation", "backward" or "step".
        runs: for a forward or evaluation, the code that each rank's data runs.
        graphs: for a backward, the forwards that it covers, numbered since the last step.
        unused: for a backward, how many of the last calls of these forwards each rank's loss does not use; 0 by
            default.
    """

    kind: str
    runs: tuple[Code, ...] = ()
    graphs: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A model and the phases that its ranks run."""

    model: Model
    ranks: int
    phases: tuple[Phase, ...]
    limits: Limits

    @staticmethod
    def draw(seed: int) -> Case:
        draw = random.Random(seed)
        model = draw_model(draw)
        ranks = draw.choice([2, 2, 2, 3, 4, 8])
        full = model.full()
        much = draw.choice([0.3, 0.6, 0.9])
        # Usually all ranks run everything at first. Otherwise all run the same part, or each runs its own part.
        first = draw.choices(["full", "part", "apart"], [6, 2, 2])[0]

        def runs(step: int) -> tuple[Code, ...]:
            if (step == 0 and first != "apart") or draw.random() < 0.3:
                alike = full if first == "full" and step < 2 else for_data(draw, full, much)
                return (alike,) * ranks
            return tuple(full if draw.random() < 0.3 else for_data(draw, full, much) for _ in range(ranks))

        way = draw.choice(["one", *WAYS])
        phases = [phase for step in range(draw.randint(2, 6)) for phase in _step(draw, way, lambda s=step: runs(s))]
        return Case(model, ranks, tuple(phases), draw.choice(LIMITS))

    @staticmethod
    def draw_alike(seed: int) -> Case:
        """Draw a case without branches. For each step, the way in which backwards cover forwards is drawn anew."""
        draw = random.Random(seed)
        model = draw_model(draw)
        runs = (model.full(),) * 2
        phases = [phase for _ in range(draw.randint(3, 6)) for phase in _step(draw, draw.choice(WAYS), lambda: runs)]
        return Case(model, 2, tuple(phases), draw.choice(LIMITS))


WAYS = ["one", "sum", "each", "later first", "some"]


def _step(draw: random.Random, way: str, runs: Callable[[], tuple[Code, ...]]) -> Iterator[Phase]:
    """Yield the phases of one step; ``way`` decides which backwards cover which forwards."""
    count = 1 if way == "one" else draw.choice([2, 2, 3])
    for number in range(count):
        yield Phase("forward", runs())
        if draw.random() < 0.15:
            yield Phase("evaluation", runs())
        if way == "each":
            yield Phase("backward", graphs=(number,))
    if way in ("one", "sum"):
        yield Phase("backward", graphs=tuple(range(count)))
    if way == "later first":
        yield from (Phase("backward", graphs=(number,)) for number in reversed(range(count)))
    if way == "some":
        yield Phase("backward", graphs=(0,) if draw.random() < 0.5 else tuple(range(count)))
    yield Phase("step")


LIMITS = [Limits(0, 0, 0), Limits(0, 0, 0), Limits(4, 8, 100), Limits(100, 8, 8), Limits(100, 1000, 1000)]


@dataclass(eq=False)
class _Made:
    """A recorded call in a graph, with the part of BackwardCall's interface that BackwardUses needs."""

    hooked: Any
    executed: list[bool]
    expected: bool = False

    def note_outputs(self, outputs: object) -> None:
        self.expected = True  # the outputs are not needed, because ``executed`` is shared by all calls of a graph

    def is_to_come(self) -> bool:
        return self.executed[0]


@dataclass
class _Hooked:
    units: list[Any]


@dataclass
class _Entry:
    """A node of a graph.

    Attributes:
        node: the call or use.
        call: the record of the call; None if no graph was recorded.
        again: True if the node ran inside a backward, where checkpoints do not nest.
        inside: entries of the calls and uses inside this call.
    """

    node: Call | Touch
    call: _Made | None = None
    again: bool = False
    inside: list[_Entry] = field(default_factory=list)


class Branching:
    """The engine of one rank, which runs the phases of a case on a simulated Rank."""

    def __init__(self, world: World, number: int, case: Case) -> None:
        model = case.model
        self.model = model
        self.rank = Rank(world, number, [4] * model.units, case.limits, modules=model.outermost())
        self.touched = OutOfModuleUses(self.rank.units, self.rank.schedule)
        self.in_backward = False
        self.running: list[str] = []  # paths of the modules whose forwards are running
        self.run_by: dict[str, set[str]] = {path: set() for path in model.modules}
        self.counts: list[tuple[PhaseKey, Counter[str]]] = []  # per phase: its kind, runs of each module
        self.stepped = 0  # number of phases up to the last step
        self.strays = False  # True if a step had to reduce gradients that a backward should have reduced

    def forward(self, code: Code, *, grad: bool) -> tuple[list[_Entry], list[bool]]:
        schedule, executed = self.rank.schedule, [False]
        self.rank._begin_forward(grad)
        schedule.repeats |= grad and len(self.rank.outstanding) > 1
        self.counts.append((schedule.key, Counter()))
        entries = [self._run(node, executed if grad else None, grad) for node in code]
        if grad:
            self.rank.backward_uses.expect_in_backward(self.touched.expected(), whole=True)
            self.rank.backward_uses.forward_ended(first=len(self.rank.outstanding) == 1)
        self.touched.let_go()
        schedule.end_phase()
        self.rank._guard_all()
        return entries, executed

    def _run(self, node: Call | Touch, executed: list[bool] | None, grad: bool) -> _Entry:
        """Run one node. ``executed`` is None if no graph is recorded."""
        if isinstance(node, Touch):
            unit = self.rank.units[node.unit]
            self.counts[-1][1][f"parameter {node.unit}"] += 1
            if unit.state is not UnitState.UNSHARDED:  # guards report a use only while the unit is guarded
                self.touched.use(unit)
            return _Entry(node)
        index = self.model.modules[node.module]
        unit = self.rank.units[index]
        self.counts[-1][1][node.module] += 1
        if self.in_backward:
            self.rank.backward_uses.come_to(node.module, self.run_by[node.module])
        self.rank.enter(index, node.module)
        if self.running and not node.module.startswith(begins := f"{self.running[-1]}."):
            self.run_by[node.module].add(begins)
        self.running.append(node.module)
        inner = None if node.checkpoint == "reentrant" and not self.in_backward else executed
        inside = [self._run(each, inner, grad) for each in node.inside]
        self.running.pop()
        call = None if inner is None else _Made(_Hooked([unit]), inner)
        made: Any = call
        if self.in_backward:
            self.rank.backward_uses.expect_fresh_call(made)
            self.rank.schedule.expect_again([unit])
        elif grad:
            if call is not None and (self.rank.schedule.repeats or self.rank.schedule.learning):
                self.rank.backward_uses.expect_call(made, [])
            if call is None:
                self.rank.schedule.note_unrecorded(node.module, [unit])
            self.rank.backward_uses.expect_in_backward([unit], whole=False)
        self.rank.leave(index)
        return _Entry(node, call, self.in_backward, inside)

    def backward(self, graphs: Sequence[tuple[list[_Entry], list[bool]]], unused: int = 0) -> None:
        rank = self.rank
        rank.reductions.last = True
        rank.schedule.begin_phase(rank._backward_key(rank.outstanding), None)
        self.counts.append((rank.schedule.key, Counter()))
        self.in_backward = True
        for _, executed in graphs:
            executed[0] = True
        rank.backward_uses.fetch_known_uses()
        entries = [entry for entries, _ in graphs for entry in entries]
        self._over(entries[: len(entries) - unused])
        for _, executed in graphs:
            executed[0] = False
        self.in_backward = False
        self.touched.let_go()
        rank.backward_uses.give_up()
        rank.schedule.end_phase()
        rank._guard_all()
        rank.since += 1

    def _over(self, entries: Sequence[_Entry]) -> None:
        """Run one backward of autograd. A parameter's gradient arrives after the last use that the backward covers."""
        events = list(self._events(entries))
        last = {unit: place for place, (kind, unit, _) in enumerate(events) if kind == "use"}
        for place, (kind, index, entry) in enumerate(events):
            unit = self.rank.units[index]
            if kind == "read":
                assert unit.state is UnitState.UNSHARDED, f"{unit.name} is read in backward, but is {unit.state}"
            elif kind == "reach":
                assert isinstance(entry.node, Call)
                path, run_by = entry.node.module, self.run_by[entry.node.module]
                self.rank.backward_uses.come_to(path, run_by)
                if entry.call is not None:
                    made: Any = entry.call
                    self.rank.backward_uses.note_reached(made)
                self.rank.backward_uses.use(unit, path, run_by)
                assert unit.state is UnitState.UNSHARDED, f"{unit.name} is used, but is {unit.state}"
            elif kind == "again":
                self._again(entry)
            elif last[index] == place:
                self.rank._give(unit)

    def _again(self, entry: _Entry) -> None:
        assert isinstance(entry.node, Call)
        fresh = self._run(entry.node, [True], True)
        if entry.call is None:  # reentrant checkpoint: an inner backward covers the calls that were just run
            self._over([fresh])

    def _events(self, entries: Sequence[_Entry]) -> Iterator[tuple[str, int, _Entry]]:
        for entry in reversed(entries):
            node = entry.node
            if isinstance(node, Touch):
                yield "use", node.unit, entry
                continue
            index = self.model.modules[node.module]
            if entry.call is None:
                yield "again", index, entry
                continue
            yield "reach", index, entry
            if node.checkpoint == "plain" and not entry.again:
                yield "again", index, entry
            yield from self._events(entry.inside)
            if node.used:
                yield "use", index, entry
            # The first operation of a forward comes last in backward. It may read the weight without yielding a
            # gradient for it.
            yield "read", index, entry

    def step(self) -> None:
        self.strays |= any(unit.gradients[0].has_stray() for unit in self.rank.units)
        self.rank.step()
        self.rank.backward_uses.forget_graphs()
        self.stepped = len(self.counts)


def train(case: Case, choose: Any = min, *, strays: bool = True) -> bool:
    """Run a case and return True if its ranks trained.

    False means an allowed deadlock: one rank alone ran a module more often than any rank before.

    Args:
        case: the case.
        choose: selects one of the ranks that can continue.
        strays: False to fail if a step has to reduce gradients that a backward should have reduced.

    Raises:
        AssertionError: a property is violated.
        Deadlock: ranks wait for each other although no rank ran a module more often than before.
    """
    world = World(case.ranks, choose)
    ranks: list[Branching | None] = [None] * case.ranks

    def program(number: int) -> Rank:
        branching = ranks[number] = Branching(world, number, case)
        graphs: dict[int, tuple[list[_Entry], list[bool]]] = {}
        for phase in case.phases:
            if phase.kind == "forward":
                graphs[len(graphs)] = branching.forward(phase.runs[number], grad=True)
            elif phase.kind == "evaluation":
                branching.forward(phase.runs[number], grad=False)
            elif phase.kind == "backward":
                unused = phase.unused[number] if phase.unused else 0
                branching.backward([graphs[each] for each in phase.graphs], unused)
            else:
                graphs.clear()
                branching.step()
        return branching.rank

    try:
        done = world.run(program)
    except Deadlock:
        if any(map(_exceeds, [each for each in ranks if each is not None], [ranks] * case.ranks)):
            return False
        raise
    for rank in done:
        assert rank.delivered == rank.given, f"gradients {rank.given} arrived, but {rank.delivered} were reduced"
        left = [unit.name for unit in rank.units if unit.users or unit.state is not unit.resting]
        assert not left, f"{left} are still gathered or in use"
        assert not any(rank.schedule.live_units.owed) and not rank.schedule.live_units.due
    assert all(issued == world.issued[0] for issued in world.issued), world.issued
    assert strays or not any(each is not None and each.strays for each in ranks), "gradients were left to the step sync"
    return True


def _exceeds(one: Branching, ranks: Sequence[Branching | None]) -> bool:
    """Return True if a rank has run a module more often than any rank before.

    Phases since the last step are compared with earlier phases of the same kind.
    """
    for now in range(one.stepped, len(one.counts)):
        key, own = one.counts[now]
        known: Counter[str] = Counter()
        for each in ranks:
            for before, counts in each.counts[:now] if each is not None else ():
                if before == key:
                    known |= counts
        # A first use of a parameter outside of its module counts. A first run of a module does not: while a module has
        # never been run, phases that may reach it end with an exchange.
        if any(count > known[path] and (known[path] or path.startswith("parameter")) for path, count in own.items()):
            return True
    return False


def check_seeds(seeds: range) -> None:
    """Draw cases by seed. All must train, except a few with a rank that alone runs a module more often than before."""
    trained = Counter[bool]()
    for number in seeds:
        draw = random.Random(number)
        try:
            trained[train(Case.draw(number), lambda able, draw=draw: able[draw.randrange(len(able))])] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {error}") from error
    # In the cases that do not train, the rank that runs a module more often needs an additional gather.
    assert trained[False] < 0.02 * len(seeds), trained


def check_alike(seeds: range) -> None:
    """Check that backwards reduce all of their gradients if all ranks run alike and every forward is the same."""
    for number in seeds:
        draw = random.Random(number)
        choose: Any = lambda able, draw=draw: able[draw.randrange(len(able))]  # noqa: E731
        try:
            assert train(Case.draw_alike(number), choose, strays=False)
        except Exception as error:
            raise AssertionError(f"case {number}: {error}") from error


def _backward_over_more() -> None:
    """Check a backward over two forwards, after a backward over one of the two was learned.

    A checkpointed module then runs twice in the backward.

    The data of one rank does not use the module's parameter in one of the forwards. So this rank still expects a
    gradient when the other rank has already released the unit.
    """
    model = Model(1, {"m0": 0}, {"": (), "m0": ()})
    used, unused = (Call("m0", "reentrant"),), (Call("m0", "reentrant", used=False),)
    phases = [
        *[Phase("forward", (used,) * 2), Phase("forward", (used,) * 2), Phase("backward", graphs=(0,)), Phase("step")]
        * 2,
        *(Phase("forward", (used,) * 2), Phase("forward", (unused, used))),
        *(Phase("backward", graphs=(0, 1)), Phase("step")),
    ]
    assert train(Case(model, 2, tuple(phases), Limits(0, 0, 0)))


def _more_often_without_gradients() -> None:
    """Check that a rank may run a module twice in an evaluation, and later also in a forward with gradients."""
    model = Model(2, {"m0": 0, "m1": 1}, {"": (), "m0": (), "m1": ()})
    once, twice = (Call("m0"), Call("m1")), (Call("m0"), Call("m1"), Call("m0"))
    steps = [("forward", (once, once)), ("evaluation", (once, twice)), ("forward", (once, twice))]
    phases = [
        (Phase(kind, runs), *[Phase("backward", graphs=(0,)), Phase("step")] * (kind == "forward"))
        for kind, runs in steps
    ]
    assert train(Case(model, 2, tuple(phase for step in phases for phase in step), Limits(0, 0, 0)))


def _backward_over_all_calls() -> None:
    """Check a backward over two calls of a checkpointed module, after backwards over one of the two were learned.

    In the last step only the second rank's loss uses both calls, so only this rank gathers the unit twice.
    """
    model = Model(1, {"m0": 0}, {"": (), "m0": ()})
    twice = (Call("m0", "reentrant"),) * 2
    phases = [
        phase
        for unused in ((1, 1), (1, 1), (1, 0))
        for phase in (Phase("forward", (twice,) * 2), Phase("backward", graphs=(0,), unused=unused), Phase("step"))
    ]
    assert train(Case(model, 2, tuple(phases), Limits(0, 0, 0)))


def _gathers_one_more_unit() -> None:
    """Check a forward that may gather one more unit after its order was learned.

    `register_external_parameter` adds such a unit, for example to a part of the model that the user calls by itself.
    Both ranks learn a forward over units 0 and 1. Then module m1 gets unit 2, too. Rank 0 runs only m0 now, and rank 1
    runs both modules; neither may wait for ever.
    """
    world = World(2, min)

    def program(number: int) -> None:
        rank = Rank(world, number, [4] * 3, Limits(0, 0, 0), inside=(0, 1))
        for _ in range(2):
            rank.forward((0, 1), grad=False)
        rank.inside, rank.modules = (0, 1, 2), {"m0": 0, "m1": 1}
        rank.forward((0,) if number == 0 else (0, 1, 2), grad=False)

    world.run(program)


SCENARIOS: dict[str, Callable[[], None]] = {
    "a backward over more": _backward_over_more,
    "a backward over all calls": _backward_over_all_calls,
    "more often without gradients": _more_often_without_gradients,
    "one more unit": _gathers_one_more_unit,
}
"""Cases that random ones contain rarely or never, by name. Each function raises an error if the ranks do not train."""
