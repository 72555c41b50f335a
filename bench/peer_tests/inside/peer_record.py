"""A plugin for pytest, loaded where the peer's tests run: writes what becomes of each test, as it happens.

It needs nothing but pytest, for the environment of the peer has no zeropp. Its instructions come in the environment:

``PEER_RECORD``: the file to append to, a JSON object a line: ``{"id": ..., "outcome": "started" | "passed" | "failed" |
"skipped", "why": ..., "seconds": ...}``.
``PEER_WANTED``: a file with a JSON list of test ids; others are left out. Unset: all of them are run.
``PEER_PRELOAD``: modules that the server of processes imports once, rather than every rank of every test.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest

RECORD = Path(os.environ["PEER_RECORD"])
LONGEST = 6000  # characters of an error's end that are kept


def write(**record: object) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    modules = os.environ["PEER_PRELOAD"].split()
    multiprocessing.set_forkserver_preload(modules)
    # Tests without ranks run in this process.
    if "peer_removed" in modules:
        importlib.import_module("peer_removed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier process of the same file has recorded, and what nobody wants to know of."""
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
    """A test's call; of what surrounds it, only what went wrong or was skipped."""
    if report.when == "call" or not report.passed:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        write(id=report.nodeid, outcome=report.outcome, why=why[-LONGEST:], seconds=round(report.duration, 2))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported has no tests to be counted: it is recorded itself."""
    if report.failed or (report.skipped and report.nodeid):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(id=report.nodeid, outcome=report.outcome, why=why[-LONGEST:])
