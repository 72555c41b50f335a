"""Accumulation windows: calls of `step()` follow one rule, whatever was called before."""

from __future__ import annotations

import pytest

from zeropp.engine.accumulation import GradAccumulation


def play(calls: str, steps: int = 4, *, managed: bool = True) -> str:
    """Play a sequence of calls, and return one letter for each step() and zero_grad().

    Args:
        calls: "f" is a forward of the model, "p" a forward of a part, "b" a backward, "x" a backward that fails, "s" a
            step(), "n" a step(now=True), and "z" a zero_grad().
        steps: micro-batches in a window.
        managed: value of managed_gradient_accumulation.

    Returns:
        "T" for a step that is taken, "z" for gradients that are discarded, "." for a call that does nothing.
    """
    window, said = GradAccumulation(steps, managed=managed), ""
    for call in calls.replace(" ", ""):
        if call in "fp":
            window.note_forward("" if call == "f" else "head")
        elif call == "b":
            window.note_backward()
        elif call == "x":
            window.note_failure()
        elif call in "sn":
            taken = window.note_step_call(now=call == "n")
            said += "T" if taken else "."
            if taken:
                window.restart()
        elif call == "z":
            said += "." if window.ignores_zero_grad else "z"
            if not window.ignores_zero_grad:
                window.restart()
    return said


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("fbs fbs fbs fbs fbs", "...T."),
        ("fbsz fbsz fbsz fbsz fbsz", "......Tz.."),
        ("zfbs zfbs zfbs zfbs zfbs", "z......Tz."),
        ("fbb s fbb s fbb s fbb s", "...T"),  # two losses per micro-batch
        ("ffbb s ffbb s ffbb s ffbb s", "...T"),  # two forwards and two losses per micro-batch
        ("f p b p b s f b s f b s f b s", "...T"),  # an auxiliary loss from a part of the model
        ("p b s p b s p b s p b s", "...."),  # forwards of parts begin no micro-batch, and a warning says so
        ("pb pb pb pb s", "."),
        ("fb fb fb fb s fb fb fb fb s", "TT"),
        ("fb fb fb fb sz fb fb sz", "Tz.."),  # step() and zero_grad() in a short window do nothing
        ("fb fb fb fb sz fb fb sz fb fb fb fb sz", "Tz..Tz"),  # gradients of a short window stay for the next one
        ("fb fb nz fb fb fb fb sz", "TzTz"),  # step(now=True) ends a window early
        ("n fb n n", ".T."),  # step(now=True) without gradients does nothing
        ("fb fb fb fb fb fb s", "T"),  # a window longer than configured
        ("fbs fbs fb fbs fbs fbs fbs fbs", "..T...T"),  # one micro-batch without step()
        ("fb z fbs fbs fbs fbs", "z...T"),  # zero_grad() without step() discards, as in torch
        ("fs fbs fbs fbs fbs", "....T"),  # a step() before any backward
        ("fbs s s fbs fbs fbs", ".....T"),
        ("fbsz fx z fbs fbs fbs fbs", "..z...T"),  # zero_grad() after a failed backward discards
        ("fbsz fx fbsz fbsz fbsz fbsz", "......Tz.."),  # without that zero_grad() gradients stay
    ],
)
def test_each_sequence_of_calls_steps_as_expected(calls: str, said: str) -> None:
    assert play(calls) == said


def test_where_every_step_is_taken() -> None:
    assert play("fbsz fbsz", steps=1) == "TzTz"
    assert play("fbsz fbsz", managed=False) == "TzTz"


@pytest.mark.parametrize(
    ("calls", "closing"), [("", False), ("fbfb", False), ("fbfbfb", True), ("fbfbfbf", True), ("fbfbfbfb", True)]
)
def test_which_backward_is_the_last(calls: str, closing: bool) -> None:
    """``closing`` is read before the backward begins, and is True if that backward is the last of its window."""
    window = GradAccumulation(4, managed=True)
    for call in calls:
        window.note_forward("") if call == "f" else window.note_backward()
    if not calls.endswith("f"):
        assert window.closing is (len(calls) == 8)
        window.note_forward("")
    assert window.closing is closing


def warnings_of(calls: str) -> list[str | None]:
    """Return the warning after each step() in windows of four micro-batches; None for no warning."""
    window, said = GradAccumulation(4, managed=True), []
    for call in calls:
        if call == "s":
            if window.note_step_call():
                window.restart()
            said.append(window.warning())
        elif call == "b":
            window.note_backward()
        else:
            window.note_forward("" if call == "f" else "head")
    return said


@pytest.mark.parametrize(("calls", "count"), [("fbsfbsfbsfbs", 1), ("fbfbfbfbsfbfbs", 2), ("fbfbfbs", 3)])
def test_the_first_step_that_does_nothing_says_so(calls: str, count: int) -> None:
    """The warning contains both counts and both remedies. It also comes in a short window at the end of a loop."""
    (text,) = [each for each in warnings_of(calls) if each is not None]
    assert f"did nothing after {count} of gradient_accumulation_steps 4 micro-batches" in text
    assert "step(now=True)" in text and '{"managed_gradient_accumulation": false}' in text
    assert "only modules inside it" not in text


def test_a_model_that_is_called_by_its_parts_is_told() -> None:
    (text, *others) = warnings_of("pbspbs")
    assert text is not None and "only modules inside it" in text and others == [None]


@pytest.mark.parametrize(
    ("steps", "count", "divided", "said"),
    [(2, 4, True, True), (2, 4, False, False), (2, 2, True, False), (1, 4, True, False)],
)
def test_a_window_longer_than_it_should_be_is_told_once(steps: int, count: int, divided: bool, said: bool) -> None:
    """The warning comes only if zeropp divided the losses; callers may divide losses themselves."""
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
