"""What the model computes with: main weights as they arrive at every rank, after each optimizer step.

All ranks hold the same decoded values (tests/distributed/test_quantized.py), so one copy stands for all of them.
Buffers are whole: pieces of ranks lie one behind the other, in the order in which their messages do.
"""

from __future__ import annotations

import torch
from torch import Tensor

import zeropp_kernels as kernels
from zeropp.codecs import BlockCodec
from zeropp.layout import BLOCK

CHECK_EVERY = 50  # refreshes after which owners' copies are compared with receivers'


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


class Delta4(Plain):
    """Four-bit differences to what every rank holds (SDP4Bit, arXiv 2410.15526); at first a plain refresh."""

    def __init__(self, numel: int, world: int, device: torch.device) -> None:
        layout = kernels.message_layout(numel // world, 4)
        self._messages = torch.empty(world, layout.nbytes, dtype=torch.uint8, device=device)
        self._owned = torch.empty(numel, dtype=torch.bfloat16, device=device)  # owners' copies, each of its piece
        self._world = world
        self._refreshes = 0
        self.bits = 8 * self._messages.nbytes / numel

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """See :class:`Plain`.

        Raises:
            RuntimeError: an owner and the receivers ended with different bits.
        """
        if self._refreshes == 0:
            seen.copy_(main)
            self._owned.copy_(seen)
        else:
            pieces = zip(main.chunk(self._world), self._owned.chunk(self._world), self._messages, strict=True)
            for shard, reference, message in pieces:
                kernels.delta_encode_(shard, reference, message)
            kernels.delta_apply_(self._messages.view(-1), seen, count=self._world)
        self._refreshes += 1
        if self._refreshes % CHECK_EVERY == 0 and not torch.equal(self._owned, seen):
            raise RuntimeError(f"delta4: copies of owners and receivers differ after {self._refreshes} refreshes")

    def state_dict(self) -> dict[str, object]:
        """See :class:`Plain`."""
        return {"owned": self._owned, "refreshes": self._refreshes}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See :class:`Plain`."""
        self._owned.copy_(state["owned"])
        self._refreshes = state["refreshes"]


class Lossless(Plain):
    """Exact differences of bfloat16 encodings to what every rank holds.

    They lead to the bits of a plain refresh, so one in ``every`` is made with them and compared, and the others are
    plain. Messages have room for exactly the escapes of their rank.
    """

    def __init__(self, numel: int, world: int, device: torch.device, every: int) -> None:
        self._world = world
        self._every = every
        blocks = -(-(numel // world) // BLOCK)
        self._offsets = torch.empty(2, blocks + 1, dtype=torch.int64, device=device)
        self._refreshes = 0

    def refresh(self, main: Tensor, seen: Tensor) -> None:
        """See :class:`Plain`; reads the escapes' numbers on the host.

        Raises:
            RuntimeError: what was decoded is not the bfloat16 cast, bit for bit.
        """
        self._refreshes += 1
        if self._refreshes == 1 or (self._refreshes - 1) % self._every:
            seen.copy_(main)
            return
        nbytes = 0
        for shard, held in zip(main.chunk(self._world), seen.chunk(self._world), strict=True):
            kernels.lossless_count_(shard, held, self._offsets)
            room8, room16 = map(int, self._offsets[:, -1].tolist())
            layout = kernels.lossless_layout(shard.numel(), room8, room16)
            message = torch.empty(layout.nbytes, dtype=torch.uint8, device=main.device)
            kernels.lossless_encode_(shard, held, self._offsets, message, room8=room8, room16=room16)
            work = torch.empty_like(self._offsets)[None]
            kernels.lossless_decode_(message, held, held, work, count=1, room8=room8, room16=room16)
            nbytes += layout.nbytes
        self.bits = 8 * nbytes / main.numel()
        if not torch.equal(seen.view(torch.int16), main.to(torch.bfloat16).view(torch.int16)):
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
    if kind == "delta4":
        return Delta4(numel, world, device)
    if kind == "lossless":
        return Lossless(numel, world, device, check_every)
    if kind != "config":
        raise ValueError(f"weights travel as 'config', 'delta4' or 'lossless', got {kind!r}")
    return Plain() if codec is None else Coded(numel, world, codec, device)
