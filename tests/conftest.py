"""Settings that must be in place before torch or Triton start, marker rules, and the end of the rank pool."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

# One thread a process: a pool of ranks shares two cores, and sums keep one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton binds its interpreter when it is imported, so this cannot wait for a fixture.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/conftest.py could set TRITON_INTERPRET=1")
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ImportError):  # bench/gpu.sh needs no hypothesis
    import hypothesis

    # Time tells nothing on a machine that does other things too.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    not_root = pytest.mark.skip(reason="needs root (network namespaces)")
    has_gpu = torch.cuda.is_available()
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("root") and not is_root:
            item.add_marker(not_root)


def pytest_unconfigure() -> None:
    """Runs after the last test, also after an interrupt."""
    harness = sys.modules.get("tests.distributed.harness")
    if harness is not None:
        harness.shutdown()
