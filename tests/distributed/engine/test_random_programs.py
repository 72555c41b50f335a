"""Random training programs give the results of plain torch, and the same bits under settings that must not matter.

Run as a script, this file runs one program: ``python -m tests.distributed.engine.test_random_programs SEED --world 2``.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.support.random_models import FORMS, LEAVES, ONE, TWO
from tests.support.random_programs import CALLS, FAILED, run_programs
from tests.support.rank_pool import RankFailure, run_ranks

CHUNK = 100  # programs in one call of run_ranks, which share a process group


def check(seeds: range, world: int, length: int, folder: Path) -> Counter[str]:
    """Run random programs, and go on after one that fails.

    Args:
        seeds: seeds of the programs.
        world: number of ranks.
        length: number of drawn calls of each program.
        folder: folder for checkpoints.

    Returns:
        Number of programs by feature and by result.
    """
    found: Counter[str] = Counter()
    failures: list[str] = []
    first = seeds.start
    while first < seeds.stop:
        chunk = range(first, min(first + CHUNK, seeds.stop))
        nodes = 2 if world == 4 else None
        limit = 100.0 + CHUNK * length
        results = run_ranks(
            world, run_programs, chunk, str(folder), length, local_world_size=nodes, catch=True, timeout=limit
        )
        first = chunk.stop
        failed = [result for result in results if isinstance(result, RankFailure)]
        if failed:
            named = [re.search(rf"{FAILED} (\d+)", failure.message) for failure in failed]
            # Go on after the first failed program. Some ranks may name the next one, because they had begun it when the
            # failure of another rank reached them.
            first = min((int(match[1]) for match in named if match), default=chunk.stop - 1) + 1
            failures += [f"rank {failure.rank}: {failure.message}\n{failure.text}" for failure in failed]
        else:
            found.update(results[0])
    assert not failures, "\n".join(failures)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 300), marks=pytest.mark.campaign)], ids=str)
def test_programs(seeds: range, tmp_path: Path) -> None:
    found = check(seeds, 2, 2, tmp_path)
    wanted = {*CALLS, *LEAVES, *ONE, *TWO, *FORMS, *(f"stage {number}" for number in range(4))}
    assert not wanted - found.keys(), f"no program had {wanted - found.keys()}"
    assert found["right"] >= 0.95 * len(seeds), found
    assert found["unprepared"] >= len(seeds) / 3, found


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("world", "count"), [(2, 2000), (3, 500), (4, 500)])
def test_thousands_of_programs(world: int, count: int, tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(2**32)
    found = check(range(first, first + count), world, 10, tmp_path)
    assert found["right"] >= 0.95 * count, found


def main() -> None:
    parser = argparse.ArgumentParser(description="one random program")
    parser.add_argument("seed", type=int)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--length", type=int, default=3, help="number of drawn calls")
    parser.add_argument("--keep", help="numbers of the calls to make; all by default")
    options = parser.parse_args()
    keep = [int(number) for number in options.keep.split(",")] if options.keep is not None else None
    nodes = 2 if options.world == 4 else None
    with tempfile.TemporaryDirectory() as folder:
        given = ([options.seed], folder, options.length, keep)
        print(*run_ranks(options.world, run_programs, *given, local_world_size=nodes), sep="\n")


if __name__ == "__main__":
    main()
