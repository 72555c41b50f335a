"""The plot of bench/checkpoint has two bars per way, with the medians of the warm rounds."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="the bench extra is not installed")

from bench.checkpoint.plot import draw


def test_bars_are_medians_of_warm_rounds() -> None:
    rows = [
        {"way": way, "blocked": base + turn, "done": 2 * base + turn, "peak": 10.0 * base, "warm": turn > 0}
        for base, way in enumerate(("disk", "zeropp"), 1)
        for turn in (0, 1, 2, 3)
    ]
    left, right = draw(rows).axes
    widths = [bar.get_width() for bar in left.patches]
    assert widths == [4, 6, 3, 4] and [bar.get_width() for bar in right.patches] == [10, 20]
    assert [label.get_text() for label in left.get_yticklabels()] == ["disk", "zeropp"]
