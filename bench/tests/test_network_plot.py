"""bench/network/plot.py: each system has its own name and colour, one rate gives bars, several give lines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the bench extra is not installed")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench.network import __main__ as network
from bench.network import measured, plot, report

SHOWN = [*network.NAMES, *(f"{name}_x{times}" for name in network.NAMES if "zeropp" in name for times in (2, 4))]
SETTINGS = {"nodes": 2, "local": 2, "dtype": "bf16", "batch": 4, "seq_len": 128}
ONE = [("free", None), ("wait80", 59.67)]
SEVERAL = [("free", None), ("wait80", 59.67), ("rate", 200.0), ("rate", 56.0)]


def made_up(systems: list[str], rates: list[tuple[str, float | None]]) -> dict:
    rows = [
        {"kind": kind, "rate": rate, "round": 0, "system": name, "s": (1 + index) * 50 / (rate or 1000), "bytes": 1e6}
        for kind, rate in rates
        for index, name in enumerate(systems)
    ]
    counted = {name: {"ledger": None, "device": 1e7 * index} for index, name in enumerate(systems, 1)}
    return {"rows": rows, "counted": counted, "losses": {}, "numel": 10**7, "tcp": "reno"}


def drawn(systems: list[str], rates: list[tuple[str, float | None]]) -> Figure:
    return plot.draw(measured.Measured(made_up(systems, rates), SETTINGS))


def test_every_system_has_a_name_and_a_colour_of_its_own() -> None:
    assert set(plot.LOOKS) == set(network.NAMES)
    labels = [plot.label(name) for name in SHOWN]
    assert len(set(labels)) == len(SHOWN) and not any("_" in label for label in labels)
    assert plot.label("zeropp_pp_x4") == "zeropp ZeRO++: int8 weights, int4 gradients, 4 micro-batches"
    assert len({plot.colour(name) for name in SHOWN}) == len(SHOWN)
    for first, second in itertools.combinations(network.NAMES, 2):
        one, other = (bytes.fromhex(plot.colour(name)[1:]) for name in (first, second))
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 50, f"{first} looks like {second}"


def test_one_rate_is_bars_of_tokens_a_second() -> None:
    systems = network.SYSTEMS.split(",")
    _, right = drawn(systems, ONE).axes
    tokens = 2 * 2 * 4 * 128 * 59.67 / 50
    for index, (bar, name) in enumerate(zip(right.patches, systems, strict=True)):
        assert bar.get_width() == pytest.approx((4 if "_x4" in name else 1) * tokens / (1 + index))
        assert to_hex(bar.get_facecolor()).upper() == plot.colour(name)
    assert not right.lines and "59.67 Mbit/s, where zeropp stage 3 waits 80 %" in right.get_xlabel()


def test_without_a_limited_rate_the_bars_say_so() -> None:
    _, right = drawn(["ddp", "zeropp_s3"], ONE[:1]).axes
    assert len(right.patches) == 2 and right.get_xlabel().endswith("no limit")


def test_several_rates_are_lines_in_the_same_colours() -> None:
    systems = network.SYSTEMS.split(",")
    left, right = drawn(systems, SEVERAL).axes
    assert {line.get_label(): line.get_color() for line in right.lines} == {
        plot.label(name): plot.colour(name) for name in systems
    }
    assert all(list(line.get_xdata()) == [56, 59.67, 200] for line in right.lines) and not right.patches
    assert [to_hex(bar.get_facecolor()).upper() for bar in left.patches] == [plot.colour(name) for name in systems]


def texts_of(figure: Figure) -> list[Text]:
    """Return all visible texts; axes also keep labels of ticks outside of their limits, which are left out."""
    found = [*figure.texts]
    for axes in figure.axes:
        found += [axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += axes.get_legend().get_texts() if axes.get_legend() else []
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text()]


@pytest.mark.every(2)
@pytest.mark.parametrize("rates", [ONE, SEVERAL])
@pytest.mark.parametrize("systems", [["zeropp_s3"], network.SYSTEMS.split(","), SHOWN])
def test_no_text_is_cut_off_or_covers_another(systems: list[str], rates: list[tuple[str, float | None]]) -> None:
    figure = drawn(systems, rates)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts_of(figure)]
    assert len(boxes) > 2 * len(systems)
    for words, box in boxes:
        assert min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, f"{words} is cut off"
    for (words, box), (others, other) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other), f"{words!r} covers {others!r}"


def test_page_numbers_and_plot_are_saved_and_name_the_congestion_control(tmp_path: Path) -> None:
    found = made_up(["zeropp_s3"], ONE) | {"losses": {"zeropp_s3": [2.0, 1.0]}}
    settings = {**SETTINGS, "layers": 1, "d_model": 8, "rounds": 1, "steps": 1}
    text = report.markdown(found, settings)
    page, numbers, picture = report.save(found, settings, text, tmp_path, "made-up")
    assert "TCP's congestion control: reno." in page.read_text() and '"tcp": "reno"' in numbers.read_text()
    assert picture.suffix == ".png" and picture.stat().st_size > 0
    figure = drawn(["zeropp_s3"], ONE)
    assert "TCP's congestion control: reno" in figure.get_suptitle()
