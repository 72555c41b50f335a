"""The arguments of :func:`zeropp.fsdp2.apply` and their checks."""

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
    """The arguments of :func:`zeropp.fsdp2.apply` as the caller gave them."""

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
        """Return ``gradient_bits`` as a tuple (intra-node, inter-node), or None; call after :meth:`check`."""
        return None if self.gradient_bits is None else (self.gradient_bits[0], self.gradient_bits[1])

    def patience(self, result: object = None) -> float:
        """Return the seconds to wait for other ranks: ``hang_timeout`` if it is valid, else a default.

        The default applies until `check` refuses an invalid value, because ranks must exchange that error. ``result``
        is unused.
        """
        given = self.hang_timeout
        return given if _is_number(given) and 0.0 < given <= LONGEST_TIMEOUT else PATIENCE

    def check(self, world: int) -> None:
        """Raise an error for invalid values, and for settings that have no effect in combination with another one.

        Args:
            world: number of ranks of the whole job.

        Raises:
            ValueError: an argument is invalid; the message has the given and the expected value.
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
        # Refuse beta without feedback, like every setting that has no effect, instead of ignoring it.
        if self.beta is not None and self.feedback is None:
            raise ValueError(f"beta is {self.beta} and feedback is None; give feedback='cross' or 'both', or no beta")
        if not (_is_number(self.hang_timeout) and 0.0 < self.hang_timeout <= LONGEST_TIMEOUT):
            raise ValueError(
                f"hang_timeout is {self.hang_timeout!r}; expected a number of seconds, more than 0 and at most "
                f"{LONGEST_TIMEOUT}"
            )
        local = self.local_world_size
        # Compare the type, because isinstance(True, int) holds.
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
        # None sends plain values, so it counts as 32 bits.
        local, cross = bits or (32, 32)
        if self.hadamard and local not in _CODES and cross not in _CODES:
            raise ValueError(
                f"hadamard rotates gradients before they are quantized, and gradient_bits={bits} quantizes nothing; "
                f"give one of {_CODES} for a hop, or hadamard=False"
            )
        # A single hop uses the second number, as a hop between nodes does. So "cross" includes a single hop.
        needed = {"cross": (cross,), "both": (local, cross)}.get(self.feedback or "", ())
        if any(each not in _CODES for each in needed):
            raise ValueError(
                f"feedback={self.feedback!r} compensates quantization errors, and gradient_bits={bits} does not "
                f"quantize on every hop with feedback; give one of {_CODES} for these hops, or another feedback"
            )

    @staticmethod
    def _one_of(name: str, value: object, expected: tuple[object, ...]) -> None:
        # Compare types, too, because True == 1 and 1.0 == 1.
        if not any(value is each or (type(value) is type(each) and value == each) for each in expected):
            raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, expected))}")


def _is_number(value: object) -> bool:
    # Exclude bool, because isinstance(True, int) holds.
    return isinstance(value, Real) and not isinstance(value, bool)
