"""A plugin of pytest: writes down what each test came to as it ends, and leaves out what has passed before.

    pytest -p bench.gpu.outcomes --outcomes=FILE ...

So a run that is ended in the middle goes on from there. With pytest-xdist the controller writes, and every worker
leaves out the same tests: workers collect before the first test runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_PASSED = ("passed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--outcomes``."""
    parser.addoption("--outcomes", type=Path, required=True, help="JSON lines, one a test")


def pytest_configure(config: pytest.Config) -> None:
    """Write where reports come together."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.getoption("outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed."""
    path: Path = config.getoption("outcomes")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    before = {line["test"] for line in lines if line["outcome"] in _PASSED}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


class _Writer:
    """One line for each test, at once: this process may be ended at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a call that ended, or a setup or teardown that did not go well."""
        if report.when != "call" and report.outcome == "passed":
            return
        reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
