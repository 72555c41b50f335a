"""Windows of micro-batches: what each `step()` does, told from the calls alone."""

from __future__ import annotations

import pytest

from zeropp.engine.engine import GradAccumulation


def play(calls: str, steps: int = 4, *, managed: bool = True) -> str:
    """Calls: f a forward of the root, p of a part, b a backward, x one that fails, s a step(), z a zero_grad().

    Returns one letter for each s and z: T a step that is taken, z gradients that are forgotten, "." neither.
    """
    window, said = GradAccumulation(steps, managed=managed), ""
    for call in calls.replace(" ", ""):
        if call in "fp":
            window.note_forward("" if call == "f" else "head")
        elif call == "b":
            window.note_backward()
        elif call == "x":
            window.note_failure()
        elif call == "s":
            taken = window.note_step_call()
            said += "T" if taken else "."
            if taken:
                window.restart()
        elif call == "z":
            said += "." if window.keeps_gradients else "z"
            if not window.keeps_gradients:
                window.restart()
    return said


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("fbs fbs fbs fbs fbs", "...T."),
        ("fbsz fbsz fbsz fbsz fbsz", "......Tz.."),
        ("zfbs zfbs zfbs zfbs zfbs", "z......Tz."),
        ("fbb s fbb s fbb s fbb s", "...T"),  # two losses
        ("ffbb s ffbb s ffbb s ffbb s", "...T"),  # and two forwards
        ("f p b p b s f b s f b s f b s", "...T"),  # an auxiliary loss from a part of the model
        ("p b s p b s p b s p b s", "...T"),  # a model that is never called as a whole
        ("f b s p b s p b s p b s", "...T"),  # or once
        ("pb pb pb pb s pb pb pb pb s", "TT"),  # never as a whole, and one step() a window
        ("p b s f b s p b p b s f b s p b s", "...T."),
        ("fb fb fb fb s fb fb fb fb s", "TT"),
        ("fb fb fb fb sz fb fb s fb s fb fb fb fb s", "TzTTT"),  # short windows, even of one
        ("fb fb fb fb fb fb s", "T"),  # a long one
        ("fbs fbs fb fbs fbs fbs fbs fbs fbs", "..T...T."),  # a step() left out once: not forgotten, not for ever
        ("fb z fbs fbs fbs fbs", "z...T"),  # discarded without a step() before: as in torch
        ("fs fbs fbs fbs fbs", "....T"),  # no backward ran
        ("fbs s s fbs fbs fbs", ".....T"),
        ("fbsz fx z fbs fbs fbs fbs", "..z...T"),  # what a failed backward leaves can be discarded
        ("fbsz fx fbsz fbsz fbsz fbsz", "......Tz.."),  # or it is left there
    ],
)
def test_what_a_step_does(calls: str, said: str) -> None:
    assert play(calls) == said


def test_where_every_step_is_taken() -> None:
    assert play("fbsz fbsz", steps=1) == "TzTz"
    assert play("fbsz fbsz", managed=False) == "TzTz"


@pytest.mark.parametrize(
    ("calls", "closing"), [("", False), ("fbfb", False), ("fbfbfb", True), ("fbfbfbf", True), ("fbfbfbfb", True)]
)
def test_which_backward_is_the_last(calls: str, closing: bool) -> None:
    """Asked before the backward begins."""
    window = GradAccumulation(4, managed=True)
    for call in calls:
        window.note_forward("") if call == "f" else window.note_backward()
    if not calls.endswith("f"):
        assert window.closing is (len(calls) == 8)
        window.note_forward("")
    assert window.closing is closing


def test_what_is_said() -> None:
    window, said = GradAccumulation(4, managed=True), []
    for call in "fbsfbsfbfbs":
        if call == "s":
            window.note_step_call()
            said.append(window.warning())
        else:
            window.note_forward("") if call == "f" else window.note_backward()
    first, second, third = said
    assert first is not None and "after 1 of gradient_accumulation_steps 4" in first and "step_was_taken" in first
    assert second is None, "said twice"
    assert third is None, "the window is whole"
    window = GradAccumulation(4, managed=True)
    for call in "fbsfbfb":
        if call == "s":
            window.note_step_call()
            window.warning()
        else:
            window.note_forward("") if call == "f" else window.note_backward()
    assert window.note_step_call()
    assert "taken after 3 of" in str(window.warning())


@pytest.mark.parametrize(
    ("steps", "count", "divided", "said"),
    [(2, 4, True, True), (2, 4, False, False), (2, 2, True, False), (4, 2, True, False), (1, 4, True, False)],
)
def test_a_window_longer_than_it_should_be_is_told_once(steps: int, count: int, divided: bool, said: bool) -> None:
    """If losses were divided by the smaller number. A caller who divides them himself may do as he likes."""
    window = GradAccumulation(steps, managed=True)
    told = []
    for _ in range(2):
        for _ in range(count):
            window.note_forward("")
            window.divided |= divided
            window.note_backward()
        assert window.note_step_call()
        told.append(str(window.warning()))
        window.restart()
    assert [f"after {count} micro-batches, and gradient_accumulation_steps is {steps}" in each for each in told] == [
        said, False
    ]  # fmt: skip
