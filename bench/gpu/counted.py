"""One call of one operation inside the range that a profiler counts; first its results are compared with eager code.

ncu --profile-from-start off ... python -m bench.gpu.counted --operation "quantize int8" --mebibytes 256
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch

from bench.kernels.operations import OPERATIONS, Twin

__all__ = ["main"]


def check(name: str, twin: Twin) -> None:
    """Run the operation and its eager version once, and compare their results.

    Operations with a state update it once in both versions, so the results stay comparable.

    Raises:
        SystemExit: the results differ.
    """
    ours = twin.ours()
    for left, right in zip(ours, twin.by_hand() if twin.by_hand is not None else ours, strict=True):
        if not torch.equal(left, right.view(left.shape)):
            raise SystemExit(f"{name}: other bits than by hand")


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Context that the profiler counts; the device is idle at its start and at its end."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    operations = {operation.name: operation for operation in OPERATIONS}
    parser.add_argument("--operation", choices=operations, required=True)
    parser.add_argument("--mebibytes", type=int, required=True, help="MiB of bfloat16 values")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    twin = operations[given.operation].make(given.mebibytes << 19, device)
    check(given.operation, twin)  # also compiles the kernels
    with profiled() if device == "cuda" else contextlib.nullcontext():
        twin.ours()


if __name__ == "__main__":
    main()
