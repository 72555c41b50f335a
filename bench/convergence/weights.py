"""Refresh of the weights that the model computes with, from the main weights, after each optimizer step.

All ranks decode the same values (tests/distributed/wire/test_quantized.py), so one copy represents all ranks. Buffers
are whole: the ranks' pieces lie one after another, in the order of their messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.wire.codecs import BlockCodec
from zeropp.wire.differences import BASES, Lossless, make_difference_codec


class Plain:
    """Refresh by a cast to bfloat16.

    Attributes:
        bits: bits per element sent in the last refresh.
    """

    bits = 16.0

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """Write to ``seen``, bfloat16 [numel], the weights that ranks compute with, from float32 ``main`` [numel]."""
        seen.copy_(main)

    def state_dict(self) -> dict[str, object]:
        """Return the state that the next refresh depends on in addition to ``main`` and ``seen``."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a state of :meth:`state_dict`."""


class Coded(Plain):
    """Refresh by quantized weights (qwZ), one message per rank."""

    def __init__(self, numel: int, world: int, codec: BlockCodec, device: torch.device) -> None:
        self._codec = codec
        self._world = world
        self._messages = codec.empty(numel // world, world, device)
        self.bits = 8 * self._messages.nbytes / numel

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """Write the decoded weights to ``seen``."""
        self._codec.encode_(self._messages, main, count=self._world)
        self._codec.decode_(self._messages, seen, count=self._world)


class Differences(Plain):
    """Refresh by encoded differences to the weights that every rank has. The first refresh is a plain cast.

    Lossless differences give the same bits as a plain cast. So only one refresh in ``every`` uses them and is compared,
    and the others are plain casts. A lossless message has exactly the room for its rank's escaped values.
    """

    def __init__(self, kind: str, world: int, every: int) -> None:
        self._codec = make_difference_codec(kind)
        self._world = world
        self._every = every if kind == "lossless" else 1
        self._refreshes = 0

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """Write the new weights to ``seen``. With lossless differences the host reads the number of escaped values.

        Raises:
            RuntimeError: lossless differences do not give the bits of the bfloat16 cast.
        """
        self._refreshes += 1
        if self._refreshes == 1 or (self._refreshes - 1) % self._every:
            seen.copy_(main)
            return
        codec, nbytes = self._codec, 0
        for shard, held in zip(main.chunk(self._world), seen.chunk(self._world), strict=True):
            if isinstance(codec, Lossless):
                codec.room = tuple(codec.count_escapes(shard, held).tolist())
            message = torch.empty(codec.nbytes(shard.numel()), dtype=torch.uint8, device=main.device)
            codec.encode_(message, shard, held)
            codec.decode_(message, held, count=1)
            nbytes += message.nbytes
        self.bits = 8 * nbytes / main.numel()
        same = torch.equal(seen.view(torch.int16), main.bfloat16().view(torch.int16))
        if isinstance(codec, Lossless) and not same:
            raise RuntimeError(f"lossless: refresh {self._refreshes} does not have the bits of the bfloat16 cast")

    def state_dict(self) -> dict[str, object]:
        """Return the number of refreshes."""
        return {"refreshes": self._refreshes}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load the number of refreshes."""
        self._refreshes = state["refreshes"]


def make_weights(
    kind: str, numel: int, world: int, codec: BlockCodec | None, device: torch.device, check_every: int
) -> Plain:
    """Return the refresh of a flat buffer.

    Args:
        kind: "config" for the configured codec, "delta4" or "lossless".
        numel: elements of the buffer.
        world: number of ranks.
        codec: the configured codec; None for plain values.
        device: device of the buffer.
        check_every: number of refreshes from one check of lossless differences to the next.
    """
    if kind in BASES:
        return Differences(kind, world, check_every)
    if kind != "config":
        raise ValueError(f"weights travel as 'config' or one of {list(BASES)}, got {kind!r}")
    return Plain() if codec is None else Coded(numel, world, codec, device)
