"""The golden run: pairs of configurations that lose no precision give the same bits, and so does a second run."""

from __future__ import annotations

import dataclasses

import pytest

from tests.golden.runs import CASES, EQUAL, differences, run

BITS = ("losses", "norms", "weights")


ROWS = [(EQUAL[0], 6), *(pytest.param(pair, 20, marks=pytest.mark.campaign) for pair in EQUAL)]


@pytest.mark.parametrize(
    ("pair", "steps"), ROWS, ids=lambda value: " = ".join(value) if isinstance(value, tuple) else None
)
def test_configurations_that_lose_nothing_are_bit_equal(
    pair: tuple[str, str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in pair:
        monkeypatch.setitem(CASES, name, dataclasses.replace(CASES[name], steps=steps))
    found = run(pair)
    one, other = ([{key: rank[key] for key in BITS} for rank in found[name]] for name in pair)
    assert differences(one, other) == []


def test_differences_are_named() -> None:
    before = {"stage 3": [{"losses": "ab", "bytes": {"unit 0": [1, 20]}}]}
    after = {"stage 3": [{"losses": "cd", "bytes": {"unit 0": [1, 21], "unit 1": [1, 4]}}]}
    assert differences(before, before) == []
    assert differences(before, after) == [
        "/stage 3/0/losses: ab before, cd now",
        "/stage 3/0/bytes/unit 0/1: 20 before, 21 now",
        "/stage 3/0/bytes/unit 1: None before, [1, 4] now",
    ]


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_run_is_the_same_twice() -> None:
    assert differences(run(CASES), run(CASES)) == []
