"""Where figures are kept: bench/results has dated tables, the numbers they were made of, and pictures."""

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
    """A table with its title, the command that made it, and the machine.

    Args:
        title: without a mark.
        module: what ``python -m`` ran.
        argv: its arguments; None for those of this process.
        about: from :func:`bench.common.machine.machine`.
        body: the table and what is to be said about it.
    """
    words = " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)])
    return "\n".join([f"# {title}", "", f"`{words}`, {about['date']}", "", describe(about), "", body, ""])


def save(measured: dict[str, Any], text: str, name: str, draw: Callable[[], Figure] | None = None) -> list[Path]:
    """Write <date>_<name>.md and .json to :data:`RESULTS`, and with matplotlib what is drawn as .png; their paths.

    Args:
        measured: for JSON; ``measured["machine"]["date"]`` is the date.
        text: the table.
        name: of the files.
        draw: makes the picture, and imports what that needs; it is not called without matplotlib.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    base = RESULTS / f"{measured['machine']['date']}_{name}"
    # Not with_suffix: a name may have a dot.
    paths = [base.with_name(base.name + suffix) for suffix in (".md", ".json", ".png")]
    paths[0].write_text(text)
    paths[1].write_text(json.dumps(measured, indent=1) + "\n")
    if draw is None or importlib.util.find_spec("matplotlib") is None:
        return paths[:2]
    draw().savefig(paths[2], dpi=110)
    return paths
