"""One call of one operation between the marks that a profiler of counters looks for, its results compared first.

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
    """Call it both ways, which move their states on by one step each.

    Raises:
        SystemExit: the results have other bits.
    """
    ours = twin.ours()
    for left, right in zip(ours, twin.by_hand() if twin.by_hand is not None else ours, strict=True):
        if not torch.equal(left, right.view(left.shape)):
            raise SystemExit(f"{name}: other bits than by hand")


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """The marks, with nothing else under way between them."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    operations = {operation.name: operation for operation in OPERATIONS}
    parser.add_argument("--operation", choices=operations, required=True)
    parser.add_argument("--mebibytes", type=int, required=True, help="of bfloat16 values")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    twin = operations[given.operation].make(given.mebibytes << 19, device)
    check(given.operation, twin)  # and compiles
    with profiled() if device == "cuda" else contextlib.nullcontext():
        twin.ours()


if __name__ == "__main__":
    main()
