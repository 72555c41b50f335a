"""Measures the kernels, torch, DeepSpeed and torchao, and prints a table.

python -m bench.kernels --sizes 16                # other arguments than --save are passed to pytest
python -m bench.kernels --save cpu --sizes 16     # also writes bench/results/<date>_cpu.{md,json,png}, _cpu-shares.png
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pytest

from bench.kernels import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="NAME")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "measured.json"
        code = pytest.main(["-q", str(Path(__file__).parent), f"--benchmark-json={measured}", *rest])
        if code != 0 or not measured.exists():
            raise SystemExit(f"pytest ended with exit code {int(code)}; nothing to report")
        report.main([str(measured), *(["--save", args.save] if args.save else [])])


if __name__ == "__main__":
    sys.exit(main())
