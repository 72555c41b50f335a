"""Placeholders for the builders of DeepSpeed's compiled operations. Scripts query them before using an operation."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["AsyncIOBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLambBuilder"]

# Python treats a module with __path__ as a package. An import of a submodule then reaches RefusingFinder, whose error
# gives the reason; without __path__, Python's own error would not.
__path__: list[str] = []


class OpBuilder:
    """Builder of one compiled operation; the base class of the others.

    Attributes:
        NAME: DeepSpeed's name of the operation.
        HERE: True if zeropp has a replacement for the operation.
    """

    NAME = ""
    HERE = True

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if zeropp has a replacement; the configuration turns the replacement on."""
        return self.HERE

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse to load the operation.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self.NAME} is a compiled operation of DeepSpeed's, and is not in zeropp's stand-in; what zeropp does in "
            "its place is set in the configuration, see docs/migrating.md of zeropp"
        )


class AsyncIOBuilder(OpBuilder):
    """Asynchronous file access; in zeropp, ``offload_optimizer`` or ``offload_param`` with device "nvme"."""

    NAME = "async_io"


class CPUAdamBuilder(OpBuilder):
    """Adam on the host; in zeropp, ``offload_optimizer`` with device "cpu"."""

    NAME = "cpu_adam"


class CPULionBuilder(OpBuilder):
    """Lion on the host; in zeropp, ``offload_optimizer`` with device "cpu"."""

    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Adam in one fused kernel; in zeropp, torch's fused Adam."""

    NAME = "fused_adam"


class FusedLambBuilder(OpBuilder):
    """LAMB, which needs norms of whole parameters; zeropp has no replacement."""

    NAME = "fused_lamb"
    HERE = False
