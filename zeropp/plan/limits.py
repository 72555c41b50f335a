"""Memory limits of a node: an error that lists what takes the memory and which settings reduce it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from zeropp.config import Config
from zeropp.config.base import ConfigError

__all__ = ["MemoryLimitError", "require_below", "size_text"]

_STEPPED = ("main_weights", "gradients", "optimizer_states")
_GATHERED = ("frozen_weights", "wire_weights")


class MemoryLimitError(ConfigError):
    """A configuration needs more memory than the limit allows.

    ``problems`` holds the total first, then one line per term with its bytes per rank and the settings that reduce it.
    """

    headline = "the configuration cannot stay below a limit"

    def _text(self) -> str:
        return "\n  ".join([f"{self.headline}: {self.problems[0]}", *self.problems[1:]])


def require_below(
    config: Config, local: int, place: Literal["host", "disk"], terms: Mapping[str, int], limit: float | None
) -> None:
    """Raise an error if the ranks of a node together need more bytes than a limit.

    Args:
        config: configuration whose settings the message names.
        local: number of ranks per node.
        place: memory that the limit applies to, "host" or "disk".
        terms: bytes that each rank needs there, by the name of the term.
        limit: bytes for all ranks of the node; None for no limit.

    Raises:
        TypeError: the limit is not a number.
        ValueError: the limit is negative.
        MemoryLimitError: the ranks need more than the limit.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise TypeError(f"the limit of the {place} is {limit!r}; expected a number of bytes, or None")
    if limit is not None and limit < 0:
        raise ValueError(f"the limit of the {place} is {limit}; expected bytes, 0 or more")
    # All ranks have shards of equal size, so the total is ``local`` times one rank's bytes.
    needs = local * sum(terms.values())
    if limit is None or needs <= limit:
        return
    what = "the memory of its host" if place == "host" else "its disks"
    ranks = f"the {local} ranks" if local > 1 else "the rank"
    need = "need" if local > 1 else "needs"
    total = f"{ranks} of a node {need} at least {size_text(needs)} of {what}, and {size_text(int(limit))} are allowed"
    lines = _host_lines(config, terms) if place == "host" else _disk_lines(config, terms)
    raise MemoryLimitError([total + ("; on each rank:" if local > 1 else ":"), *lines, _more_nodes(place)])


def size_text(nbytes: int) -> str:
    """Return a number of bytes as text for messages, with GiB."""
    return f"{nbytes:,} bytes ({nbytes / 2**30:.2f} GiB)"


def _sum(terms: Mapping[str, int], names: tuple[str, ...]) -> int:
    return sum(terms.get(name, 0) for name in names)


def _named(terms: Mapping[str, int], names: tuple[str, ...]) -> str:
    there = [f"{name.replace('_', ' ')} {size_text(terms[name])}" for name in names if terms.get(name)]
    return ", ".join(there)


def _host_lines(config: Config, terms: Mapping[str, int]) -> Iterator[str]:
    # Suggest only settings that reduce the memory of this configuration, each by one change.
    states = config.zero.offload_optimizer
    weights = config.zero.offload_param
    small = (
        f"rows of less than aio.block_size ({config.aio.block_size:,} bytes) stay in memory; a lower block_size moves "
        "them to files"
    )
    if _sum(terms, _STEPPED):
        if states is not None and states.device == "nvme":
            yield f"{_named(terms, _STEPPED)}: {small}"
        else:
            yield f'{_named(terms, _STEPPED)}: zero_optimization.offload_optimizer.device "nvme" keeps them in files'
    if _sum(terms, _GATHERED):
        yield f"{_named(terms, _GATHERED)}: {_less_gathered(config, small)}"
    if states is not None and terms.get("step_staging"):
        yield (
            f"step staging {size_text(terms['step_staging'])}: a lower sub_group_size ({config.zero.sub_group_size:,} "
            f"elements) or offload_optimizer.buffer_count ({states.buffer_count})"
        )
    if terms.get("upload_staging"):
        yield (
            f"upload staging {size_text(terms['upload_staging'])}: a lower sub_group_size "
            f"({config.zero.sub_group_size:,} elements)"
        )
    if weights is not None and terms.get("gather_staging"):
        yield (
            f"gather staging {size_text(terms['gather_staging'])}: a lower offload_param.buffer_size "
            f"({weights.buffer_size:,} elements) or offload_param.buffer_count ({weights.buffer_count})"
        )
    # Terms of a CPU device.
    if terms.get("largest_unit"):
        yield f"the largest unit, gathered, {size_text(terms['largest_unit'])}: zeropp.unit_numel makes units smaller"
    if terms.get("persistent_weights"):
        most = config.zero.param_persistence_threshold
        remedy = f"stage3_param_persistence_threshold ({most:,} elements)" if config.zero.stage == 3 else "stage 3"
        yield f"persistent weights {size_text(terms['persistent_weights'])}: {remedy} makes them fewer"
    # No setting reduces these terms, and together they are about one percent of the others.
    rest = tuple(name for name in ("gradient_norms", "secondary_weights", "feedback") if terms.get(name))
    if rest:
        yield _named(terms, rest)


def _less_gathered(config: Config, small: str) -> str:
    weights = config.zero.offload_param
    if weights is None or weights.device != "nvme":
        return 'zero_optimization.offload_param.device "nvme" with max_in_cpu 0 keeps them in files, in stage 3'
    # The default of max_in_cpu, as in DeepSpeed, is 1e9 elements. So most models stay in memory even with "nvme".
    if weights.max_in_cpu:
        return f"offload_param.max_in_cpu ({weights.max_in_cpu:,} elements) allows them in memory; 0 allows none"
    return small


def _disk_lines(config: Config, terms: Mapping[str, int]) -> Iterator[str]:
    if _sum(terms, _STEPPED):
        yield f'{_named(terms, _STEPPED)}: offload_optimizer.device "cpu" keeps them in the memory of the host'
    if _sum(terms, _GATHERED):
        yield f"{_named(terms, _GATHERED)}: a larger offload_param.max_in_cpu keeps more of them in memory"


def _more_nodes(place: str) -> str:
    other = "raise the limit" if place == "host" else "set nvme_path to a larger disk"
    return f"use more nodes, which need less memory each, or {other}"
