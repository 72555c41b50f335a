"""What a model takes of the host's memory while it is built in pieces, held against ``zeropp.host_memory_limit``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from zeropp.plan.limits import MemoryLimitError, size_text

__all__ = ["PieceLimit"]


class PieceLimit:
    """Refuses parameters whose pieces a host cannot hold.

    What is trained later takes more than pieces: gradients, states. It is for the ZeroOptimizer to count, when it is
    known which parameters are frozen.
    """

    def __init__(self, limit: int | None, world: int, local: int) -> None:
        """Count from nothing.

        Args:
            limit: bytes of a node's ranks together; None for none, and where pieces are not in the host's memory.
            world: ranks that have a piece each.
            local: ranks of a node.
        """
        self._limit = limit
        self._world = world
        self._local = local
        # By identity, since tensors compare by elements; weakly, since parts may be given up while they are built.
        self._built: dict[int, weakref.ref[nn.Parameter]] = {}
        self._most = 0  # bytes of all that were ever counted

    def add(self, parameter: nn.Parameter) -> None:
        """Count one that has been built, unless it was counted before.

        Raises:
            MemoryLimitError: pieces of all there are so far take more than the limit.
        """
        # On the meta device it takes nothing yet, and a weak reference would be in the way of its getting values.
        if self._limit is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return
        # Modules give each other what was counted when the first of them got it.
        if self._find(id(parameter)) is not parameter:
            self._built[id(parameter)] = weakref.ref(parameter)
            self._most += self._nbytes(parameter)
        if self._most > self._limit:
            there = [found for each in self._built if (found := self._find(each)) is not None]
            # As they are now: some may have gone, or been cast.
            self._built = {id(each): weakref.ref(each) for each in there}
            self._most = self.require(there)

    def forget(self) -> None:
        """Nothing is built any more; torch gives no parameter another device while something refers to it weakly."""
        self._built.clear()

    def require(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes on a node of the pieces of a whole model, if it may have so many.

        Raises:
            MemoryLimitError: it may not.
        """
        there = [each for each in parameters if not nn.parameter.is_lazy(each)]
        nbytes = sum(map(self._nbytes, there))
        if self._limit is not None and nbytes > self._limit:
            ranks = f"the {self._local} ranks" if self._local > 1 else "the rank"
            raise MemoryLimitError(
                [
                    f"zeropp.host_memory_limit allows {ranks} of a node {size_text(self._limit)}, and pieces of the "
                    f"{len(there)} parameters there are so far, {sum(each.numel() for each in there):,} elements, take "
                    f"{size_text(nbytes)}",
                    "pieces of a narrower dtype take less, as of zero.Init(dtype=torch.bfloat16)",
                    "more nodes take less each, as does a larger limit if there is one",
                ]
            )
        return nbytes

    def _find(self, number: int) -> nn.Parameter | None:
        found = self._built.get(number)
        return None if found is None else found()

    def _nbytes(self, parameter: nn.Parameter) -> int:
        """Bytes that all pieces on a node take."""
        return self._local * -(-parameter.numel() // self._world) * parameter.element_size()
