"""Command-line options of the kernel benchmarks."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sizes", default="", help="mebibytes of bfloat16 values, comma-separated")
