"""A pytest plugin, loaded in the process that runs DeepSpeed's tests, that records each test's outcome at once.

The plugin only needs pytest, because DeepSpeed's environment has no zeropp. Environment variables configure it:

``PEER_RECORD``: file to append to, one JSON object per line: ``{"id": ..., "outcome": "started" | "passed" | "failed" |
"skipped", "why": ..., "seconds": ...}``.
``PEER_WANTED``: file with a JSON list of test ids to run; unset to run all tests.
``PEER_PRELOAD``: modules that the fork server imports once, so that not every rank of every test imports them.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest

RECORD = Path(os.environ["PEER_RECORD"])
LONGEST = 6000  # number of characters kept of an error's text, from its end


def write(**record: object) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    modules = os.environ["PEER_PRELOAD"].split()
    multiprocessing.set_forkserver_preload(modules)
    # Tests without ranks run in this process, so it needs the replacements, too.
    if "peer_removed" in modules:
        importlib.import_module("peer_removed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that an earlier process has recorded for this file, and tests that are not wanted."""
    wanted = {item.nodeid for item in items}
    if "PEER_WANTED" in os.environ:
        wanted &= set(json.loads(Path(os.environ["PEER_WANTED"]).read_text()))
    if RECORD.exists():
        wanted -= {json.loads(line)["id"] for line in RECORD.read_text().splitlines()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


def pytest_runtest_logstart(nodeid: str) -> None:
    write(id=nodeid, outcome="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test's call, and of its setup and teardown only if they fail or skip."""
    if report.when == "call" or not report.passed:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        write(id=report.nodeid, outcome=report.outcome, why=why[-LONGEST:], seconds=round(report.duration, 2))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be imported under the file's own name, because its tests are unknown."""
    if report.failed or (report.skipped and report.nodeid):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(id=report.nodeid, outcome=report.outcome, why=why[-LONGEST:])
