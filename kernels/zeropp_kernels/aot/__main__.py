"""Compile every kernel for GPUs that need not be present, and check the machine code.

    python -m zeropp_kernels.aot                     cases that together cover every pair of settings
    python -m zeropp_kernels.aot --cover each        fewer: every setting once
    python -m zeropp_kernels.aot --cover one         fewest: every kernel once
    python -m zeropp_kernels.aot --cover all         every configuration that can be launched
    python -m zeropp_kernels.aot --only quantize --targets sm_90

The columns code and path are instructions per element: all instructions of the code, and those that a program with a
complete and aligned tile executes, with the body of a loop once (column loop; of a sum, for each message after the
first). flight is the most bytes that a thread has loaded before it uses the first of them.

The exit code is 1 if a kernel does not compile, or if its code has spills, local memory, too many registers, unexpected
fused multiply-adds, or other numbers of 128-bit or of narrow loads and stores than expected. The command must run in a
process with Triton's interpreter off.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..device.tiles import INTERPRETED, tile_of
from .budgets import check
from .build import TARGETS, Job, build_all
from .cases import cases

__all__ = ["main"]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    covers = ["one", "each", "pairs", "all"]
    parser.add_argument("--cover", default="pairs", choices=covers, help="how many configurations")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--processes", type=_positive, default=os.cpu_count() or 1, help="compiler processes")
    given = parser.parse_args(arguments)
    if INTERPRETED:
        value = os.environ["TRITON_INTERPRET"]
        parser.error(f"TRITON_INTERPRET={value} is set; the interpreter and the compiler cannot share a process")
    chosen = [index for index, case in enumerate(cases(given.cover)) if given.only in case.name]
    if not chosen:
        parser.error(f"--only {given.only}: no kernel has that in its name")
    targets = list(dict.fromkeys(given.targets))
    jobs = [Job(given.cover, index, target) for index in chosen for target in targets]
    # On AMD, compile each case a second time for buffers that may exceed 2 GiB.
    jobs += [
        Job(given.cover, job.index, job.target, near=False) for job in jobs if TARGETS[job.target].backend == "hip"
    ]
    failures = 0
    print(
        f"{'kernel':<18} {'target':<7} {'code':>5} {'path':>5} {'loop':>5} {'flight':>6} {'regs':>4} {'wide':>7} "
        f"{'narrow':>7} {'shared':>6}  settings"
    )
    for job, facts in build_all(jobs, given.processes):
        case, wrong = job.case, check(job.case, facts, TARGETS[job.target].backend)
        tile, path = tile_of(case.kernel, case.constants), facts.path
        each = 4 * tile.rows / tile.warps
        failures += bool(wrong)
        print(
            f"{case.name:<18} {job.target:<7} {facts.instructions / each:>5.1f} {path.instructions / each:>5.1f} "
            f"{path.repeated / each:>5.1f} {path.in_flight:>6} {facts.registers:>4} "
            f"{facts.wide_loads:>3}/{facts.wide_stores:<3} {facts.narrow_loads:>3}/{facts.narrow_stores:<3} "
            f"{facts.shared:>6}  {case.settings}{'  WRONG: ' + ', '.join(wrong) if wrong else ''}",
            flush=True,
        )
    print(f"{len(chosen)} cases on {len(targets)} targets: {len(jobs)} compiled, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
