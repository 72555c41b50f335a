"""Imports the settings, markers and rank pool of tests/conftest.py for the tests of the benchmarks."""

from tests.conftest import pytest_collection_finish, pytest_collection_modifyitems, pytest_unconfigure

__all__ = ["pytest_collection_finish", "pytest_collection_modifyitems", "pytest_unconfigure"]
