"""A flat buffer of frozen weights that exist only as 8-bit codes: the shard is the message that a gather sends.

They are encoded once, when the model is wrapped, or when other values are loaded. Whatever moves them afterwards moves
codes and scales: to encode decoded values again would change some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeropp.offload.storage_tiers import StoredTensor
from zeropp.offload.tier_choice import Tiers
from zeropp.params.unit import FlatBuffer, WeightPaths
from zeropp.partition.levels import BufferLayout, Fragment
from zeropp.wire.paths import CodedGatherPath
from zeropp_kernels import message_layout
from zeropp_kernels.wire import BLOCK

__all__ = ["CodedBuffer"]


class CodedBuffer(FlatBuffer):
    """Frozen parameters in codes.

    Attributes:
        shard: uint8, one message of this rank's piece.
        codec: of the message.
        codes: path of whole messages, for what moves them.
    """

    coded = True

    def __init__(
        self,
        unit: str,
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        main_dtype: torch.dtype,
        device: torch.device,
        paths: WeightPaths,
        codes: CodedGatherPath,
        tiers: Tiers,
    ) -> None:
        # No gradient: a parameter that is to be trained leaves for a buffer of its own, see Trainability.
        super().__init__(unit, parameters, layout, main_dtype, device, paths, None, tiers)
        self.codes = codes
        self.codec = codes.codec
        # The shard's own size says nothing of it: that is bytes of codes and scales.
        self._piece_numel = layout.numel // self.placement.mode.states

    def _take_piece(self, whole: Tensor) -> StoredTensor:
        start, stop = self.placement.slice_of(whole.numel(), self.placement.mode.states)
        shard = self.codec.empty(stop - start, 1, self.device)
        self.codec.encode_(shard, whole[start:stop])
        return self._keep(shard)

    def put(self, fragment: Fragment, values: Tensor, given: torch.dtype) -> None:
        """Encode new values of a part of a parameter; blocks that say just these values already stay as they are."""
        numel = values.numel()
        message = self.codec.empty(numel, 1, self.device)
        now = torch.empty_like(values)
        own = _Blocks(self.shard, self._piece_numel)
        part = _Blocks(message, numel)
        places = torch.arange(part.count, device=self.device)
        # Parameters start on a block and pieces are whole blocks, so a fragment does, too.
        part.copy_from(places, own, places + fragment.offset // BLOCK)
        self.codec.decode_(message, now, count=1)
        differs = torch.zeros(part.count * BLOCK, dtype=torch.bool, device=self.device)
        # Compared in the dtype that was given: a state dict in bf16 has decoded values rounded, and loading it back
        # must change nothing. What is missing of the last block counts as equal.
        differs[:numel] = now.to(given) != values.to(given)
        places = places[differs.view(-1, BLOCK).any(1)]
        self.codec.encode_(message, values)
        own.copy_from(places + fragment.offset // BLOCK, part, places)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """This rank's codes, uint8 [blocks, 256], and scales, bfloat16 [blocks]: views of the shard."""
        return _Blocks(self.shard, self._piece_numel).of_message(0)

    def decoded(self) -> Tensor:
        """This rank's values, [numel / states] in the main dtype."""
        values = torch.empty(self._piece_numel, dtype=self.main_dtype, device=self.device)
        self.codec.decode_(self.shard.to(self.device), values, count=1)
        return values

    def adopt_codes(self, source: FlatBuffer, messages: Tensor) -> None:
        """Take over parameters that another buffer has, too.

        Args:
            source: the other buffer, in codes like this.
            messages: whole, as its ``codes`` path brings them together.
        """
        piece = source.layout.numel // source.placement.mode.states
        # The model may train on another device than before.
        own = _Blocks(self.shard, self._piece_numel)
        whole = _Blocks(messages.to(self.device), piece)
        slots = zip(source.parameters, source.layout.slots, strict=True)
        offsets = {id(parameter): slot.offset for parameter, slot in slots}
        for fragment in self.fragments():
            parameter = self.parameters[fragment.slot]
            if id(parameter) not in offsets:
                continue
            # By block: the parameter lies at another place in either layout, and perhaps in another rank's piece.
            places = torch.arange(-(-(fragment.stop - fragment.start) // BLOCK), device=self.device)
            there = offsets[id(parameter)] + fragment.start
            own.copy_from(places + fragment.offset // BLOCK, whole, places + there // BLOCK)


class _Blocks:
    """Codes and scales of messages of [numel] 8-bit codes each, by number of the block."""

    def __init__(self, messages: Tensor, numel: int) -> None:
        layout = message_layout(numel, 8)
        # Blocks in one message. 8-bit codes have groups of one block, so a block has one scale, of two bytes.
        self.each = layout.groups
        self.count = layout.groups * (messages.numel() // layout.nbytes)
        rows = messages.view(-1, layout.nbytes)
        self._codes = rows[:, : layout.codes_nbytes].unflatten(1, (layout.groups, BLOCK))
        scales = rows[:, layout.scales_offset : layout.scales_offset + 2 * layout.groups]
        self._scales = scales.unflatten(1, (layout.groups, 2))

    def of_message(self, index: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of one message."""
        return self._codes[index], self._scales[index].view(torch.bfloat16)[:, 0]

    def copy_from(self, here: Tensor, source: _Blocks, there: Tensor) -> None:
        """Take the blocks ``there`` of a source to the places ``here``."""
        for own, other in ((self._codes, source._codes), (self._scales, source._scales)):
            # Codes and scales lie apart in a message, so a block is moved in two parts: [message, place in it].
            # A message may be the host's, and is told then with the host's numbers.
            take = there.to(other.device)
            put = here.to(own.device)
            found = other[take // source.each, take % source.each].to(own.device)
            own[put // self.each, put % self.each] = found
