"""The check that every rank's parameter groups have the same numbers: learning rates, above all.

Ranks that step their slices at different rates would silently diverge, as after a ReduceLROnPlateau that each fed with
its own loss. A hash of all numbers travels with the reduction before each step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from zeropp.comm.agreement import Agreement

__all__ = ["GroupSettings", "fold"]

# As few as the hash of what is issued has: the square must be exact in float64.
_BITS = 24
# Any odd number, so that no bit is lost; less 2**64, since it multiplies int64.
_ODD = 0x9E3779B97F4A7C15 - 2**64
# What each rank has of its own: its slices, and their names.
_OWN = ("params", "param_names")


class GroupSettings:
    """Numbers in the groups of one optimizer.

    Args:
        groups: gives them as they are now.
        agreement: for naming what differs.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]], agreement: Agreement) -> None:
        self._groups = groups
        self._agreement = agreement

    def code(self) -> int | Tensor:
        """24 bits; an int64 scalar on a card if some setting is a tensor there, which the host must not wait for."""
        numbers, tensors = [], []
        for name, value in self._numbers():
            if isinstance(value, Tensor):
                tensors.append(value)
                # Its place and kind are compared on the host, its bits on the device.
                numbers.append((name, "on a card"))
            else:
                numbers.append((name, _written(value)))
        # Not hash(), which Python salts for each process.
        host = zlib.crc32(repr(numbers).encode()) >> (32 - _BITS)
        return fold(host, tensors) if tensors else host

    def disagreement(self, *, late: bool = False) -> RuntimeError:
        """The error for codes that differ: which setting of which group, and what each rank has. Collective.

        Of a step that is over, ``late``, it has what this rank has, and is local: one rank alone may ask for it, in the
        middle of what the others do.
        """
        # There is an error already, and waiting for the device costs nothing any more.
        own = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._numbers()}
        if late:
            return self._late_disagreement(own)
        tables = self._agreement.exchange_objects(own, "comparing the settings of parameter groups")
        names = dict.fromkeys(name for table in tables for name in table)
        differing = [name for name in names if len({repr(table.get(name)) for table in tables}) > 1]
        given = {name: [table.get(name) for table in tables] for name in differing[:3]}
        if not differing:
            return RuntimeError(
                "parameter groups differed between ranks at the last step, which was left out for it, and are alike by "
                "now. Every rank must set the same numbers before it calls step()"
            )
        return RuntimeError(
            "parameter groups differ between ranks, and nothing was stepped: "
            + "; ".join(f"{name} is {_by_rank(values)}" for name, values in given.items())
            + ("; ..." if differing[3:] else "")
            + ". Every rank must set the same: give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _late_disagreement(self, own: dict[str, Any]) -> RuntimeError:
        # Rates first: they are what schedulers set, and there may be many groups.
        own = dict(sorted(own.items(), key=lambda each: not each[0].endswith(" lr")))
        shown = ", ".join(f"{name} is {value!r}" for name, value in [*own.items()][:8])
        return RuntimeError(
            "parameter groups differed between ranks at the last step, which was left out for it on every rank; rank "
            f"{self._agreement.comm.rank} has: {shown}{', ...' if len(own) > 8 else ''}. Every rank must set the same: "
            "give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """(group and key, number); tensors that the host can read at once count as numbers, too."""
        for index, group in enumerate(self._groups()):
            for key, value in group.items():
                if key not in _OWN:
                    yield from _numbers_in(f"group {index} {key}", value)


def fold(code: int, tensors: Sequence[Tensor]) -> Tensor:
    """A hash and the bits of tensors as another hash: an int64 scalar of 24 bits, on their device; nobody waits."""
    total: Tensor = torch.full((), code, dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        # In float64, so that one value has the same bits in every dtype that a rank may give it.
        for bits in tensor.detach().double().reshape(-1).view(torch.int64).unbind():
            total = (total ^ bits) * _ODD
    folded: Tensor = (total >> (64 - _BITS)) & (2**_BITS - 1)
    return folded


def _numbers_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.tolist() if value.is_cpu else value
    elif isinstance(value, (list, tuple)):
        for position, entry in enumerate(value):
            yield from _numbers_in(f"{name}[{position}]", entry)
    # Strings and objects were compared when ranks wrapped; numbers are what schedulers change. A bool is a number,
    # too.
    elif isinstance(value, Real):
        yield name, value


def _written(value: Any) -> str:
    """The value to nine digits, since mathematical libraries of different machines may differ in later ones."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.9g}" if isinstance(value, float) and math.isfinite(value) else repr(value)


def _by_rank(values: list[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on ranks {of[:4]}{'...' if of[4:] else ''}" for value, of in ranks.items())
