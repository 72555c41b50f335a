"""Files in bench/results: dated tables, their data as JSON, and plots."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.machine import describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RESULTS", "page", "save"]

RESULTS = Path(__file__).resolve().parents[1] / "results"


def page(title: str, module: str, argv: list[str] | None, about: dict[str, Any], body: str) -> str:
    """Return a report: a title, the command that made it, the machine, and the body.

    Args:
        title: title without Markdown's mark.
        module: module that ``python -m`` ran.
        argv: the module's arguments; None for those of this process.
        about: result of :func:`bench.common.machine.machine`.
        body: the table and its notes.
    """
    words = " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)])
    return "\n".join([f"# {title}", "", f"`{words}`, {about['date']}", "", describe(about), "", body, ""])


def save(measured: dict[str, Any], text: str, name: str, draw: Callable[[], Figure] | None = None) -> list[Path]:
    """Write <date>_<name>.md and .json to :data:`RESULTS`, and .png if matplotlib is installed; return their paths.

    Args:
        measured: values for JSON; ``measured["machine"]["date"]`` is the date.
        text: the report.
        name: part of the file names.
        draw: function that returns the plot; called only if matplotlib is installed.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    base = RESULTS / f"{measured['machine']['date']}_{name}"
    # with_name instead of with_suffix, because a name may contain a dot.
    paths = [base.with_name(base.name + suffix) for suffix in (".md", ".json", ".png")]
    paths[0].write_text(text)
    paths[1].write_text(json.dumps(measured, indent=1) + "\n")
    if draw is None or importlib.util.find_spec("matplotlib") is None:
        return paths[:2]
    draw().savefig(paths[2], dpi=110)
    return paths
