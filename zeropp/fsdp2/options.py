"""The arguments of :func:`zeropp.fsdp2.apply`, and the values that each may have."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from zeropp.comm.collective import PATIENCE
from zeropp.config.blocks import LONGEST_TIMEOUT
from zeropp.fsdp2.vectors import VALUE_BITS
from zeropp_kernels.wire import GROUPS

__all__ = ["Options"]

_CODES = tuple(sorted(GROUPS))
_WIDTHS = (*_CODES, 16, 32)


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`zeropp.fsdp2.apply`, as given."""

    weights: str | None
    secondary: str
    gradient_bits: tuple[int, int] | list[int] | None
    hadamard: bool
    feedback: str | None
    beta: float | None
    gather_hops: int
    vector_bits: int | None
    local_world_size: int | None
    hang_timeout: float

    def bits(self) -> tuple[int, int] | None:
        """``gradient_bits``, checked."""
        return None if self.gradient_bits is None else (self.gradient_bits[0], self.gradient_bits[1])

    def patience(self, result: object = None) -> float:
        """Seconds to wait for other ranks, also where what was given is yet to be refused; whatever the ``result``."""
        given = self.hang_timeout
        return given if _is_number(given) and 0.0 < given <= LONGEST_TIMEOUT else PATIENCE

    def check(self, world: int) -> None:
        """Refuse values, and combinations in which a setting would have no effect.

        Args:
            world: ranks of the whole job.

        Raises:
            ValueError: what was given, what is expected.
        """
        self._one_of("weights", self.weights, ("int8", None))
        self._one_of("secondary", self.secondary, ("values", "codes"))
        self._one_of("feedback", self.feedback, (None, "cross", "both"))
        self._one_of("gather_hops", self.gather_hops, (1, 2))
        self._one_of("vector_bits", self.vector_bits, (VALUE_BITS, None))
        self._one_of("hadamard", self.hadamard, (False, True))
        self._check_bits()
        if self.secondary == "codes" and self.weights is None:
            raise ValueError("secondary is 'codes' and weights is None; codes need weights='int8'")
        if self.beta is not None and not (_is_number(self.beta) and 0.0 <= self.beta < 1.0):
            raise ValueError(
                f"beta is {self.beta!r}; expected a number, 0 <= beta < 1: the part of the old error that is kept"
            )
        # Refused and not ignored, like every setting that another one leaves nothing to do.
        if self.beta is not None and self.feedback is None:
            raise ValueError(f"beta is {self.beta} and feedback is None; give feedback='cross' or 'both', or no beta")
        if not (_is_number(self.hang_timeout) and 0.0 < self.hang_timeout <= LONGEST_TIMEOUT):
            raise ValueError(
                f"hang_timeout is {self.hang_timeout!r}; expected a number of seconds, more than 0 and at most "
                f"{LONGEST_TIMEOUT}"
            )
        local = self.local_world_size
        # By type: True is an int to isinstance.
        if local is not None and (type(local) is not int or local < 1):
            raise ValueError(f"local_world_size is {local!r}; expected ranks per node, 1 or more, or None")
        if local is not None and local > world:
            raise ValueError(
                f"local_world_size is {local}; expected ranks per node, at most the {world} of this job, or None"
            )

    def _check_bits(self) -> None:
        bits = self.gradient_bits
        if bits is not None and not (
            isinstance(bits, (tuple, list)) and len(bits) == 2 and all(type(b) is int and b in _WIDTHS for b in bits)
        ):
            raise ValueError(
                f"gradient_bits is {bits!r}; expected None or (inside a node, between nodes), each one of {_WIDTHS}"
            )
        # None sends values, as 32 does.
        local, cross = bits or (32, 32)
        if self.hadamard and local not in _CODES and cross not in _CODES:
            raise ValueError(
                f"hadamard rotates gradients before they are encoded, and gradient_bits={bits} encodes nothing; give "
                f"one of {_CODES} for a hop, or hadamard=False"
            )
        # A single hop takes the second number, so "cross" serves it, too.
        needed = {"cross": (cross,), "both": (local, cross)}.get(self.feedback or "", ())
        if any(each not in _CODES for each in needed):
            raise ValueError(
                f"feedback={self.feedback!r} adds what encoding has lost, and gradient_bits={bits} does not encode on "
                "every hop that it names; give fewer than 16 there, or another feedback"
            )

    @staticmethod
    def _one_of(name: str, value: object, expected: tuple[object, ...]) -> None:
        # Types are compared as well: True equals 1, and 1.0 does.
        if not any(value is each or (type(value) is type(each) and value == each) for each in expected):
            raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, expected))}")


def _is_number(value: object) -> bool:
    # True is an int to isinstance.
    return isinstance(value, Real) and not isinstance(value, bool)
