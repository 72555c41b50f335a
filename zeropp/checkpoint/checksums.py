"""Checksums of stretches of files: XXH3 where the package xxhash is installed, else zlib's CRC-32."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zeropp.checkpoint.errors import CheckpointError

__all__ = ["STRETCH", "Checksums"]

STRETCH = 1 << 20
"""Bytes that one checksum covers: what a rank reads of a file is rounded to them."""


@dataclass(frozen=True)
class Checksums:
    """One algorithm.

    Attributes:
        name: as files say it.
        width: bytes of a checksum.
        of_bytes: the checksum of anything that has a buffer.
    """

    name: str
    width: int
    of_bytes: Callable[[Any], int]

    def hexdigest(self, data: bytes) -> str:
        """A checksum in hexadecimal digits."""
        return f"{self.of_bytes(data):0{2 * self.width}x}"

    @staticmethod
    def best() -> Checksums:
        """The faster one that is there."""
        found = _xxhash()
        return found if found is not None else _CRC32

    @staticmethod
    def common(names: Iterable[str]) -> Checksums:
        """The faster one that all ranks have.

        Args:
            names: of :meth:`best` of each, this one's among them.
        """
        best = Checksums.best()
        return best if all(name == best.name for name in names) else _CRC32

    @staticmethod
    def crc32() -> Checksums:
        """The one that is always there."""
        return _CRC32

    @staticmethod
    def of(name: object) -> Checksums:
        """The algorithm of that name.

        Raises:
            CheckpointError: it is not here.
        """
        if name == _CRC32.name:
            return _CRC32
        if name == "xxh3_64":
            found = _xxhash()
            if found is not None:
                return found
            raise CheckpointError(
                "the checkpoint has XXH3 checksums, which need the package xxhash: pip install xxhash"
            )
        raise CheckpointError(f"the checkpoint has checksums of the unknown kind {name!r}")


_CRC32 = Checksums("crc32", 4, zlib.crc32)


def _xxhash() -> Checksums | None:
    try:
        module = importlib.import_module("xxhash")
    except ImportError:
        return None
    return Checksums("xxh3_64", 8, module.xxh3_64_intdigest)
