"""Division: of all that is stepped, which part is the device's and which the host's.

Decided buffer by buffer, in the order in which the model defines them, which mostly is that of forward: what the next
forward wants first is stepped on the device, and the host's part has until later. The border may lie within a buffer.
Then the device has its main weights and gradients, and of the optimizer's states the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeropp.config import Config
from zeropp.offload.home import Home
from zeropp.offload.homes import ALL, Homes
from zeropp.partition.layout import BLOCK

__all__ = ["Division"]


class Division:
    """Gives each trainable buffer its homes."""

    def __init__(self, config: Config, homes: Homes, memory: Home, numels: Sequence[int]) -> None:
        """Divide.

        Args:
            config: says which fraction is the host's.
            homes: of what is the host's, or of everything.
            memory: of the device.
            numels: elements of the shards of all trainable buffers.
        """
        block = config.zero.offload_optimizer
        self._homes = homes
        self._left = 0
        # Whatever is not stepped stays where it would be, and is read from there.
        self._near = replace(homes, main=memory, states=memory, gradients=memory, device_numel=ALL)
        if config.steps_on_host and block is not None:
            self._left = sum(numels) - round(block.ratio * sum(numels))

    def next(self, numel: int) -> Homes:
        """Homes of the next buffer, in the order of ``numels``, whose shard has so many elements."""
        if numel <= self._left:
            self._left -= numel
            return self._near
        # Whole blocks: kernels step what lies behind a multiple of their vectors to the same bits as in one call.
        here, self._left = self._left // BLOCK * BLOCK, 0
        return replace(self._near, states=self._homes.states, device_numel=here) if here else self._homes
