"""Compilation of cases to machine code, through Triton's cache."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from ..device.launch import launch_options
from ..device.tiles import tile_of
from .binaries import Facts, inspect
from .cases import Case, cases

__all__ = ["TARGETS", "Job", "build", "build_all"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Job:
    """One case on one target, in a form that can be sent to another process.

    Attributes:
        cover: argument of ``cases`` that gives the list of cases.
        index: index of the case in that list.
        target: name of the target, a key of ``TARGETS``.
        near: True if buffers are assumed to be below 2 GiB, see ``Case.near``.
    """

    cover: str
    index: int
    target: str
    near: bool = True

    @property
    def case(self) -> Case:
        return replace(_listed(self.cover)[self.index], near=self.near)


@functools.cache
def _listed(cover: str) -> list[Case]:
    return cases(cover)


def build(case: Case, target: GPUTarget) -> Any:
    """Compile a case for a target and return the result of ``triton.compile``."""
    options = launch_options(target.backend, tile_of(case.kernel, case.constants))
    return triton.compile(case.source(target), target=target, options=options)


def _facts(job: Job) -> Facts:
    return inspect(build(job.case, TARGETS[job.target]))


def build_all(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Facts]]:
    """Yield (job, facts) for every job, in order. Compiles in this process if ``processes`` is 1."""
    if processes == 1:
        yield from ((job, _facts(job)) for job in jobs)
        return
    # spawn, because a fork copies Triton's state, but not its threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        # Send jobs, not cases: each process makes the same list of cases and finds its case by index.
        yield from zip(jobs, pool.map(_facts, jobs, chunksize=4), strict=True)
