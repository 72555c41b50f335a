"""A second import of the package works: after a reload, after removal from sys.modules, or of a copy; and its version.

Each test runs in a process of its own, because an import cannot be undone completely.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zeropp_kernels

PACKAGE = Path(zeropp_kernels.__file__).parent
ROUND_TRIP = """
def check(kernels):
    import torch
    x = torch.arange(-300.0, 300.0)
    assert (kernels.dequantize(kernels.quantize(x), x.shape) - x).abs().max() < 3
"""
AGAIN = {
    "reload": "import importlib; importlib.reload(first.dispatch); importlib.reload(first.ops); again = first",
    "reload of all": "import importlib; [importlib.reload(each) for each in list(ours.values())]; again = first",
    "anew": "[sys.modules.pop(name) for name in ours]; import zeropp_kernels as again; assert again is not first",
    "anew, the first gone": (
        "[sys.modules.pop(name) for name in ours]; del first, ours; gc.collect(); import zeropp_kernels as again"
    ),
    "a copy": (
        "[sys.modules.pop(name) for name in ours]; sys.path.insert(0, sys.argv[1]); import zeropp_kernels as again; "
        "assert again.__file__.startswith(sys.argv[1])"
    ),
}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    begin = (
        "import gc, sys, zeropp_kernels as first; check(first)\n"
        "ours = {name: module for name, module in sys.modules.items() if name.split('.')[0] == 'zeropp_kernels'}\n"
    )
    path = os.pathsep.join([str(PACKAGE.parent), *(entry for entry in sys.path if entry)])
    command = [sys.executable, "-W", "error::UserWarning", "-c", ROUND_TRIP + begin + program, *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def copy_of_the_package(folder: Path) -> Path:
    copied = folder / "zeropp_kernels"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


@pytest.mark.every(4)
@pytest.mark.parametrize("way", AGAIN)
def test_a_second_import_is_no_error(way: str, tmp_path: Path) -> None:
    """torch keeps the operations that the first import registered, and every later import uses them."""
    copy_of_the_package(tmp_path)
    done = run(f"{AGAIN[way]}\ncheck(again); gc.collect(); check(again); print('both work')", str(tmp_path))
    assert done.returncode == 0 and done.stdout == "both work\n", done.stderr


DELTA = '"Tensor messages, Tensor(a!) reference, SymInt count"'
FIRST = '_register(\n    "quantize_"'
VERSIONS = {
    "other arguments": (
        (DELTA, DELTA.replace("count", "count, bool once")),
        "SymInt count, bool once) -> (); this process has zeropp::delta_apply_(Tensor messages, ",
    ),
    "one more": (
        (FIRST, f'_register("new_", "Tensor x", _quantize)\n{FIRST}'),
        "needs zeropp::new_(Tensor x) -> (); this process has no zeropp::new_, from another version",
    ),
    # Equal signatures are not enough: two releases may compute different bits.
    "another number": (
        ("from .version import __version__", '__version__ = "9.9"'),
        f"finds the operations of another version, {zeropp_kernels.__version__}, in this process",
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("difference", VERSIONS)
def test_another_version_is_refused_by_name(difference: str, tmp_path: Path) -> None:
    """The import fails if the registered operations have other signatures or another version; it registers none."""
    dispatch = copy_of_the_package(tmp_path) / "dispatch.py"
    (old, new), expected = VERSIONS[difference]
    text = dispatch.read_text()
    assert text.count(old) == 1
    dispatch.write_text(text.replace(old, new))
    program = (
        "[sys.modules.pop(name) for name in ours]; sys.path.insert(0, sys.argv[1])\n"
        "try:\n    import zeropp_kernels\n"
        "except ImportError as error:\n    print(error)\n"
        "import torch; print(hasattr(torch.ops.zeropp, 'new_')); check(first)"
    )
    done = run(program, str(tmp_path))
    assert done.returncode == 0, done.stderr
    said, defined = done.stdout.splitlines()
    number = "9.9" if difference == "another number" else zeropp_kernels.__version__
    assert said.startswith(f"zeropp_kernels {number} in {tmp_path / 'zeropp_kernels'} ")
    assert expected in said and "keep one of them on the path and restart Python" in said and defined == "False"


def test_the_version_is_that_of_the_distribution() -> None:
    try:
        expected = importlib.metadata.version("zeropp")
    except importlib.metadata.PackageNotFoundError:
        expected = "0+unknown"
    assert zeropp_kernels.__version__ == expected


def test_a_source_tree_has_no_version(tmp_path: Path) -> None:
    """A source tree that is not installed reports the version "0+unknown"."""
    copy_of_the_package(tmp_path)
    program = (
        "import importlib.metadata, sys; sys.path.insert(0, sys.argv[1])\n"
        "def version(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = version\n"
        "import zeropp_kernels; print(zeropp_kernels.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "0+unknown\n", done.stderr
