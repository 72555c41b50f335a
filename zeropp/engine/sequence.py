"""The agreed order of a phase, and the ledger of what has been issued.

A phase is one forward of the model or one backward. Phases of the same kind usually issue the same collectives in the
same order; that order is learned once, by all ranks together, and followed afterwards without a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["IssueHash", "PhaseKey", "Sequence", "Sequences"]

PhaseKey = tuple[object, ...]
"""What tells kinds of phases apart; equal on every rank, made of plain values."""

_VARIANTS = 8  # orders remembered for one kind of phase, most recent first


@dataclass
class Sequence:
    """One learned phase; the same object contents on every rank.

    Attributes:
        uses: units in order of first need.
        reductions: units in the order their gradients are sent.
        fires: for each unit reduced, how often each of its parameters receives a gradient in this phase.
    """

    uses: tuple[int, ...] = ()
    reductions: tuple[int, ...] = ()
    fires: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def find(self, unit: int, start: int) -> int | None:
        """First position of a unit at or after ``start``."""
        try:
            return self.uses.index(unit, start)
        except ValueError:
            return None


class Sequences:
    """Known sequences for each kind of phase."""

    def __init__(self) -> None:
        self._known: dict[PhaseKey, list[Sequence]] = {}

    def variants(self, key: PhaseKey) -> list[Sequence]:
        """Known orders, the most recently followed first."""
        return self._known.get(key, [])

    def latest(self, key: PhaseKey | None) -> Sequence | None:
        """The order followed last."""
        variants = self._known.get(key, []) if key is not None else []
        return variants[0] if variants else None

    def remember(self, key: PhaseKey, sequence: Sequence) -> None:
        """Put a sequence first."""
        variants = self._known.setdefault(key, [])
        if sequence in variants:
            variants.remove(sequence)
        variants.insert(0, sequence)
        del variants[_VARIANTS:]

    def forget_backwards(self) -> None:
        """Learn backwards anew: gradients came that no known one expects."""
        self._known = {key: value for key, value in self._known.items() if key[0] != "backward"}


class IssueHash:
    """Running hash of (kind, unit, version) of everything issued, small enough to be summed exactly over ranks.

    24 bits, so that sums over thousands of ranks of the value and of each half of its square are exact in float64.
    """

    _PRIME = (1 << 24) - 3

    def __init__(self) -> None:
        self.value = 1

    def add(self, kind: int, unit: int, version: int) -> None:
        """Take in one issued collective."""
        self.value = (self.value * 65599 + kind * 8191 + unit * 131 + version + 1) % self._PRIME

    def reset(self) -> None:
        """Start again, at a boundary."""
        self.value = 1
