"""Settings that must not change the result of training, and a short list of cases that covers all pairs of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["CORE", "DEFAULT_PERSISTENCE", "SETTINGS", "SMALL_PERSIST", "TOPOLOGIES", "pairwise"]

TOPOLOGIES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (4, 2)}  # number of ranks, number of nodes
DEFAULT_PERSISTENCE: dict[str, object] = {"stage3_param_persistence_threshold": 100_000}
SMALL_PERSIST: dict[str, object] = {"stage3_param_persistence_threshold": 100}
CORE = ("gpt", "frozen middle, segments recomputed", "tied segments, reentrant", "repeated blocks", "encoder")
# ``pairwise`` makes cases from these rows, so that any two values of different rows occur together in some case.
SETTINGS: dict[str, dict[str, Any]] = {
    "topology": {name: name for name in TOPOLOGIES},
    "how": {
        "1 backward()": {"how": "optimizer.backward"},
        "1 plain": {"how": "loss.backward"},
        "3 backward()": {"how": "optimizer.backward", "accumulation": 3},
        "3 plain": {"how": "loss.backward", "accumulation": 3},
        "3 no_sync": {"how": "no_sync", "accumulation": 3},
        "3 mixed": {"how": "no_sync mixed", "accumulation": 3},
        "3 unsynced": {"how": "no_sync only", "accumulation": 3},
    },
    "clip": {"no clip": {}, "config clip": {"clip": 0.3}, "called clip": {"clip_call": 0.3}},
    "persistence": {
        "all cut": {},
        "small kept": {"zero": SMALL_PERSIST},
        "default units": {"zero": DEFAULT_PERSISTENCE, "extension": {"unit_min_blocks": 128}},
    },
    "model": {name: {"model": name} for name in CORE},
}


def pairwise(rows: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Yield cases that cover every pair of values of two rows.

    The choice is greedy and deterministic, so that test ids are the same in every run.
    """
    product = list(itertools.product(*rows.values()))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in product}
    left = set().union(*pairs.values())
    while left:
        best = max(product, key=lambda case: len(pairs[case] & left))
        left -= pairs[best]
        yield best
