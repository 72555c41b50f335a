"""Bounded families of programs, enumerated: all short sequences of events, and failures of ranks at every place.

A route is the sequence of units that a rank uses in a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tests.order.programs import UNITS, Failure, Pass, Program, Step, Uses, alike

__all__ = ["CORNERS", "EVENTS", "failures", "sequences"]

FULL: Uses = tuple(range(UNITS))
BACK: Uses = FULL[::-1]


def _apart(*forward: Uses, back: Sequence[Uses] = (), late: Sequence[Uses] = (), again: Sequence[Uses] = ()) -> Pass:
    """Return a micro-batch in which each rank has its own routes."""
    return Pass(forward, tuple(back) or tuple(way[::-1] for way in forward), tuple(late), tuple(again))


def _fails(*failures: Failure) -> Step:
    return Step((alike(3, FULL),), fails=failures)


EVENTS: dict[str, Step] = {
    "usual": Step((alike(3, FULL),)),
    "leaves one out": Step((_apart(FULL, (0, 1, 3), FULL),)),
    "all leave one out": Step((alike(3, (0, 1, 3)),)),
    "another order": Step((_apart(FULL, FULL, (0, 2, 1, 3)),)),
    "all in another order": Step((alike(3, (2, 1, 0, 3)),)),
    "its own each": Step((_apart((0, 1), (0, 2), (0, 3)),)),
    "once more": Step((_apart((0, 1, 0, 2, 3), FULL, FULL),)),
    "all once more": Step((alike(3, (0, 1, 0, 2, 3)),)),
    "part of a backward": Step((_apart(FULL, FULL, FULL, back=(BACK, (1, 0), BACK)),)),
    "all part of a backward": Step((alike(3, FULL, (2, 0)),)),
    "backward in another order": Step((_apart(FULL, FULL, FULL, back=((2, 3, 1, 0), BACK, BACK)),)),
    "late": Step((_apart(FULL, FULL, FULL, late=((), (), (3,))),)),
    "late and another": Step((_apart(FULL, FULL, (0, 1, 3), late=((3, 2), (), ())),)),
    "two, no_sync": Step((alike(3, FULL, no_sync=True), alike(3, FULL))),
    "two, one held": Step((_apart(FULL, FULL, (0, 1, 2)), alike(3, (0, 1)))),
    "evaluation": Step((alike(3, FULL),), evaluation=(FULL, (0, 2), FULL)),
    "checkpointed": Step((_apart(FULL, FULL, FULL, again=((2, 3),) * 3),)),
    "one checkpointed": Step((_apart(FULL, FULL, FULL, again=((2, 3), (), ())),)),
    "a unit frozen": Step((alike(3, FULL),), freezes=(1,)),
    "all units trained": Step((alike(3, FULL),), freezes=()),
    "fails forward": _fails(*[Failure(False, 2)] * 3),
    "fails backward": _fails(*[Failure(True, 3)] * 3),
}
"""Steps of three ranks, from which the sequences are made."""


_USUAL = EVENTS["usual"]
_SHORT = Step((alike(3, FULL, (2, 1, 0)),))
CORNERS: dict[str, Program] = {
    name: Program(3, steps)
    for name, steps in {
        "one in another order": (_USUAL, _USUAL, EVENTS["another order"]),
        "one once more, after ranks have differed": (EVENTS["leaves one out"], EVENTS["once more"]),
        "one once more, after all have changed": (
            _USUAL,
            EVENTS["all once more"],
            Step((_apart(FULL, FULL, FULL + FULL),)),
        ),
        "one comes once more to what all have found still there": (
            _USUAL,
            _USUAL,
            Step((alike(3, (1, 1, 3, 3, 0, 2), BACK),)),
            Step((_apart(FULL, FULL, (1, 2, 3, 0, 3, 1)),)),
        ),
        "one comes once more to what all have passed over and then used twice": (
            _USUAL,
            _USUAL,
            Step((alike(3, (3, 0, 0, 1, 2), BACK),)),
            Step((_apart(FULL, FULL, (*FULL, 0)),)),
        ),
        "one uses what nobody has used": (EVENTS["all leave one out"], EVENTS["leaves one out"]),
        "one backward comes to more, after forwards have differed": (
            EVENTS["leaves one out"],
            EVENTS["two, no_sync"],
            Step((_apart(FULL, FULL, FULL, back=(BACK, (*BACK, 3), BACK)), alike(3, FULL))),
        ),
        "one runs modules again in a backward that has been learned without": (
            _USUAL,
            _USUAL,
            EVENTS["one checkpointed"],
        ),
        "one order after another was left": (
            Step((alike(3, (0, 1, 2)),)),
            Step((alike(3, (0, 3)),)),
            Step((_apart((0, 1, 3), (0, 2), (2, 3)),)),
        ),
        "reductions of an order that is left, and come to, and left": (
            _USUAL,
            Step((alike(3, FULL), alike(3, (3, 1, 1, 1, 2)))),
            Step((_apart((0,) * 5, (0, 1, 1, 1, 0), (0,) * 5),)),
            Step((_apart(*[(3, 1, 1, 1, 2)] * 3, back=((2, 1, 1, 1, 3), (1, 1, 1, 3), (2, 1, 1, 1, 3))),)),
        ),
    }.items()
} | {
    "only one rank has a graph of what it comes to later": Program(
        3, (_SHORT, Step((_apart(FULL, FULL, FULL, back=((2, 1, 0), (2, 1, 0), BACK)),))), leaves=((3,), (3,), ())
    ),
}
"""Special programs that must train with any limits, because every request of a rank comes at an exchange."""


def sequences(length: int, first: str = "usual", persistent: Uses = ()) -> Iterator[Program]:
    """Yield programs: the event ``first``, any ``length`` events, "usual", and the last of these events again."""
    for middle in itertools.product(EVENTS, repeat=length):
        names = (first, *middle, "usual", middle[-1])
        yield Program(3, tuple(EVENTS[name] for name in names), persistent=persistent)


def failures(ranks: int, places: Sequence[Failure | None], pasts: Sequence[Sequence[Step]]) -> Iterator[Program]:
    """Yield programs in which ranks fail at any combination of ``places`` after each of ``pasts``, and then train on.

    None in ``places`` stands for no failure. The steps after the failure have one micro-batch, equal on all ranks, or
    two micro-batches, so that differences in the ranks' knowledge show.
    """
    two = Step((alike(ranks, FULL), Pass((FULL,) * ranks, (BACK,) * ranks, ((3,), *[()] * (ranks - 1)))))
    for past, fails in itertools.product(pasts, itertools.product(places, repeat=ranks)):
        for step in (Step((alike(ranks, FULL),)), Step((alike(ranks, (0, 2)),))) if any(fails) else ():
            yield Program(ranks, (*past, Step(step.passes, fails=fails), two, step, two))
