"""A pytest plugin that records the outcome of each test when it ends, and skips tests that have passed before.

    pytest -p bench.gpu.outcomes --outcomes=FILE ...

A run that is killed can so be continued. With pytest-xdist, the controller records. All workers skip the same tests,
because they collect before the first test runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_PASSED = ("passed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--outcomes``."""
    parser.addoption("--outcomes", type=Path, required=True, help="file of JSON lines, one per test")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that receives all reports: the controller of pytest-xdist, or the only process."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.getoption("outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that have passed or were skipped before."""
    path: Path = config.getoption("outcomes")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    before = {line["test"] for line in lines if line["outcome"] in _PASSED}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


class _Writer:
    """Appends one line per test at once, because this process may be killed at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the end of a test's call, and a setup or teardown that failed or skipped."""
        if report.when != "call" and report.outcome == "passed":
            return
        reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
