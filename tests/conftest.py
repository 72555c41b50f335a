"""Pytest setup: environment variables read at import, fast and campaign marks, skips, and pool shutdown."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from importlib.util import find_spec

import pytest

# One thread per process: the rank processes share few cores, and a fixed number of threads fixes the order in which
# sums add.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads TRITON_INTERPRET when it is imported, so a fixture would set the variable too late.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/conftest.py could set TRITON_INTERPRET=1")
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ImportError):  # hypothesis is optional, because bench/gpu.sh runs the GPU tests without it
    import hypothesis

    # No time limit for one example: the duration of a call depends on the load of the machine.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")


# Test folders that are not collected if a package is missing. The tests of the core pass without these packages. The
# integrations need zeropp.deepspeed as well.
_FOLDERS = {
    "zeropp.deepspeed": ["distributed/deepspeed", "unit/deepspeed", "distributed/integrations"],
    "zeropp.integrations": ["distributed/integrations"],
}
collect_ignore = [folder for package, folders in _FOLDERS.items() if find_spec(package) is None for folder in folders]


def pytest_report_header() -> str:
    """Return the versions of Python and of packages that zeropp is tested with; pytest prints them at a run's start."""
    found = [f"tested: Python {platform.python_version()}"]
    for name in ("torch", "triton", "pydantic", "transformers", "lightning"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


# Prefixes of test ids that `pytest -m fast` selects, besides tests that are marked fast in their files: informative
# tests, in at most two minutes.
FAST = (
    "tests/unit/test_house.py::test_dependencies",
    "tests/unit/test_house.py::test_rooms",
    "tests/unit/test_house.py::test_modules",
    # partition, config, plan
    "tests/unit/test_topology.py",
    "tests/unit/test_layout.py",
    "tests/unit/test_units_cut.py",
    "tests/unit/test_units_persistent.py",
    "tests/unit/test_units_padding.py",
    "tests/unit/test_units_of_any_tree.py",
    "tests/unit/test_config_load.py",
    "tests/unit/test_config_rules.py",
    "tests/unit/test_config_support.py",
    "tests/unit/test_plan_memory.py",
    # comm, wire, kernels
    "tests/unit/test_streams.py",
    "tests/unit/test_ledger.py",
    "tests/unit/test_accounts.py",
    "tests/unit/test_encoding.py",
    "tests/kernels/test_statement.py",
    "tests/distributed/wire/test_quantized.py::test_every_rank_computes_with_the_decoded_weights[1-stage 3]",
    # order, engine, params
    "tests/unit/test_prefetch.py",
    "tests/unit/test_window.py",
    "tests/order/test_order.py::test_equal",
    "tests/order/test_order.py::test_two_ranks_two_steps[first0]",
    "tests/order/test_programs.py",
    "tests/order/test_live_units.py",
    "tests/distributed/engine/test_refresh.py::test_weights_of_an_older_version_are_never_used",
    "tests/distributed/engine/test_refresh.py::test_a_step_does_not_wait_for_the_refresh_and_a_use_only_for_its_own",
    "tests/distributed/engine/test_refresh.py::test_a_hook_after_the_step_may_edit_weights[hpz]",
    "tests/distributed/engine/test_guard_backward.py::test_a_backward_through_changed_weights_is_refused",
    "tests/distributed/order/test_ranks_differ.py::test_random_parts_on_every_rank",
    "tests/distributed/comm/test_waiting.py::test_a_rank_that_waits_says_so_once",
    "tests/distributed/access/test_parity_state.py::test_partial_load",
    "tests/distributed/wire/test_bytes.py::test_each_placement_sends_the_bytes_of_its_levels",
    "tests/distributed/engine/test_walk.py::test_the_way_from_a_hook_to_a_collective_is_short[stage 3]",
    "tests/distributed/engine/test_golden.py::test_configurations",
    # offload
    "tests/unit/test_offload_division.py",
    "tests/unit/test_offload_files.py::test_ranks_that_begin_at_once_in_a_new_directory",
    "tests/unit/test_tiles.py",
    "tests/distributed/offload/test_offload_gradients.py::test_forgetting_waits_for_the_step",
    "tests/distributed/offload/test_offload_ratio.py::test_the_border_lies_where_the_fraction_says",
    # optimizer, access, setup, fsdp2
    "tests/distributed/optimizer/test_parity_steps.py::test_optimizers[AdamW]",
    "tests/distributed/optimizer/test_group_settings.py::test_settings_that_differ[betas]",
    "tests/distributed/optimizer/test_gradient_norms.py::test_norms_of_each_gradient[mics]",
    "tests/distributed/access/test_gathered.py::test_values_are_those_of_the_main_weights",
    "tests/distributed/docs/test_contributing.py",
    "tests/distributed/engine/test_warnings.py",
    "tests/distributed/fsdp2/test_fsdp2.py::test_the_divide_factor_replaces_the_mean",
)


def thin_out(items: list[pytest.Item]) -> None:
    """Mark most parameter sets of tests with ``every(n)`` as campaign tests; about one in n stays a default test.

    Args:
        items: collected tests, in the order of collection.
    """
    rows: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is None or item.get_closest_marker("campaign"):
            continue
        test = item.nodeid.partition("[")[0]
        # Choose the parameter sets by multiples of the golden ratio. If every n-th set were chosen, a parametrized
        # argument with n values would have the same value in all chosen sets.
        if rows[test] * 0.6180339887 % 1 * mark.args[0] >= 1:
            item.add_marker(pytest.mark.campaign)
        rows[test] += 1


@pytest.hookimpl(tryfirst=True)  # tryfirst: the marks must be set before pytest evaluates -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark fast tests and, without a GPU, campaign tests; skip tests that need a missing GPU or root rights.

    Args:
        items: collected tests, in the order of collection.
    """
    no_gpu = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    not_root = pytest.mark.skip(reason="needs root (network namespaces)")
    has_gpu = torch.cuda.is_available()
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if not has_gpu:
        thin_out([item for item in items if not item.nodeid.startswith(FAST)])
    for item in items:
        if item.nodeid.startswith(FAST) and not item.get_closest_marker("campaign"):
            item.add_marker(pytest.mark.fast)
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("root") and not is_root:
            item.add_marker(not_root)


def pytest_collection_finish() -> None:
    """Freeze all present objects in the garbage collector.

    A test's gc.collect() would scan a million objects otherwise.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """End the processes of the rank pool. Pytest calls this hook after the last test, and also after an interrupt."""
    rank_pool = sys.modules.get("tests.support.rank_pool")
    if rank_pool is not None:
        rank_pool.shutdown()
