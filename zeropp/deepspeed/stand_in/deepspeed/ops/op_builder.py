"""What scripts ask before they use an operation that DeepSpeed compiles; zeropp compiles nothing before it runs."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["AsyncIOBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLambBuilder"]

# As a package has one: else an import from below is refused in Python's words, which give no reason.
__path__: list[str] = []


class OpBuilder:
    """One operation.

    Attributes:
        NAME: DeepSpeed's.
        HERE: whether zeropp does the same in another way.
    """

    NAME = ""
    HERE = True

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it can be used: by the configuration, which is how zeropp is told."""
        return self.HERE

    def load(self, verbose: bool = True) -> NoReturn:
        """Nothing can be loaded.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self.NAME} is a compiled operation of DeepSpeed's, and is not in zeropp's stand-in; what zeropp does in "
            "its place is set in the configuration, see docs/migrating.md of zeropp"
        )


class AsyncIOBuilder(OpBuilder):
    """Files beside training: ``offload_optimizer`` and ``offload_param`` to "nvme"."""

    NAME = "async_io"


class CPUAdamBuilder(OpBuilder):
    """Adam on the host: ``offload_optimizer`` to "cpu"."""

    NAME = "cpu_adam"


class CPULionBuilder(OpBuilder):
    """Lion on the host."""

    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Adam in one pass: torch's."""

    NAME = "fused_adam"


class FusedLambBuilder(OpBuilder):
    """LAMB, which needs norms of whole parameters."""

    NAME = "fused_lamb"
    HERE = False
