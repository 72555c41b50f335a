"""What the model computes with: main weights as they arrive at every rank, after each optimizer step.

All ranks hold the same decoded values (tests/distributed/wire/test_quantized.py), so one copy stands for all of them.
Buffers are whole: pieces of ranks lie one behind the other, in the order in which their messages do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.wire.codecs import BlockCodec
from zeropp.wire.differences import BASES, Lossless, make_difference_codec


class Plain:
    """Cast to bfloat16.

    Attributes:
        bits: of an element on the wire, in the last refresh.
    """

    bits = 16.0

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """``seen``, bfloat16 [numel], becomes what ranks compute with, given float32 ``main`` [numel]."""
        seen.copy_(main)

    def state_dict(self) -> dict[str, object]:
        """What the next refresh depends on beside ``main`` and ``seen``."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take back what :meth:`state_dict` gave."""


class Coded(Plain):
    """Codes of the main weights (qwZ), one message a rank."""

    def __init__(self, numel: int, world: int, codec: BlockCodec, device: torch.device) -> None:
        self._codec = codec
        self._world = world
        self._messages = codec.empty(numel // world, world, device)
        self.bits = 8 * self._messages.nbytes / numel

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """See :class:`Plain`."""
        self._codec.encode_(self._messages, main, count=self._world)
        self._codec.decode_(self._messages, seen, count=self._world)


class Differences(Plain):
    """Differences to what every rank holds, in the engine's codecs; at first a plain refresh.

    Lossless ones lead to the bits of a plain refresh, so one in ``every`` is made with them and compared, and the
    others are plain. Their messages have room for exactly the escapes of their rank.
    """

    def __init__(self, kind: str, world: int, every: int) -> None:
        self._codec = make_difference_codec(kind)
        self._world = world
        self._every = every if kind == "lossless" else 1
        self._refreshes = 0

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """See :class:`Plain`; lossless, reads the escapes' numbers on the host.

        Raises:
            RuntimeError: lossless, what was decoded is not the bfloat16 cast, bit for bit.
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
        """See :class:`Plain`."""
        return {"refreshes": self._refreshes}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See :class:`Plain`."""
        self._refreshes = state["refreshes"]


def make_weights(
    kind: str, numel: int, world: int, codec: BlockCodec | None, device: torch.device, check_every: int
) -> Plain:
    """How a flat buffer of [numel] travels.

    Args:
        kind: "config" for what the configuration says, "delta4" or "lossless".
        codec: of the configuration, None for plain values.
        check_every: steps, of lossless messages.
    """
    if kind in BASES:
        return Differences(kind, world, check_every)
    if kind != "config":
        raise ValueError(f"weights travel as 'config' or one of {list(BASES)}, got {kind!r}")
    return Plain() if codec is None else Coded(numel, world, codec, device)
