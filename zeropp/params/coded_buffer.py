"""A flat buffer of frozen weights stored only as 8-bit codes: the shard is the message that a gather sends.

Weights are encoded once, when the model is wrapped or when other values are loaded. Afterwards only codes and scales
are copied or moved. Decoding and encoding again would change some of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeropp.offload.storage_tiers import StoredTensor
from zeropp.offload.tier_choice import Tiers
from zeropp.params.flat_buffer import FlatBuffer, WeightPaths
from zeropp.params.parameter_swap import Generation
from zeropp.partition.levels import BufferLayout, Fragment
from zeropp.wire.paths import CodedGatherPath
from zeropp_kernels import message_layout
from zeropp_kernels.wire import BLOCK

__all__ = ["CodedBuffer"]


class CodedBuffer(FlatBuffer):
    """A flat buffer of frozen parameters whose shard is an 8-bit codec message.

    Attributes:
        shard: uint8 message with the codes and scales of this rank's slice.
        codec: codec of the message.
        codes: path that gathers the messages of all ranks without decoding them, for moving codes to another buffer.
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
        generation: Generation,
    ) -> None:
        # Coded buffers have no gradient. When a parameter becomes trained, `Trainability` moves it to a plain buffer.
        super().__init__(unit, parameters, layout, main_dtype, device, paths, None, tiers, generation)
        self.codes = codes
        self.codec = codes.codec
        # ``shard.numel()`` counts bytes of codes and scales, so the number of weights is stored here.
        self._piece_numel = layout.numel // self.placement.mode.states

    def _take_piece(self, whole: Tensor) -> StoredTensor:
        """Encode this rank's slice of whole values as the shard."""
        start, stop = self.placement.slice_of(whole.numel(), self.placement.mode.states)
        shard = self.codec.empty(stop - start, 1, self.device)
        self.codec.encode_(shard, whole[start:stop])
        return self._keep(shard)

    def put(self, fragment: Fragment, values: Tensor, given: torch.dtype) -> None:
        """Encode new values of a part of a parameter, except blocks that already decode to these values.

        Args:
            fragment: part of a parameter in this rank's shard.
            values: [numel of the fragment] new values in the main dtype, on the device.
            given: dtype that the user's values had before they were cast to the main dtype.
        """
        numel = values.numel()
        message = self.codec.empty(numel, 1, self.device)
        now = torch.empty_like(values)
        own = _Blocks(self.shard, self._piece_numel)
        part = _Blocks(message, numel)
        places = torch.arange(part.count, device=self.device)
        # A fragment starts on a block, because parameters start on a block and every shard is a whole number of blocks.
        part.copy_from(places, own, places + fragment.offset // BLOCK)
        self.codec.decode_(message, now, count=1)
        differs = torch.zeros(part.count * BLOCK, dtype=torch.bool, device=self.device)
        # Compare in the dtype of the given values. A bf16 state dict holds decoded values rounded to bf16, and loading
        # it back must not change the codes. The missing end of the last block counts as equal.
        differs[:numel] = now.to(given) != values.to(given)
        places = places[differs.view(-1, BLOCK).any(1)]
        self.codec.encode_(message, values)
        own.copy_from(places + fragment.offset // BLOCK, part, places)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Return views of the shard: this rank's codes, uint8 [blocks, 256], and scales, bfloat16 [blocks]."""
        return _Blocks(self.shard, self._piece_numel).of_message(0)

    def decoded(self) -> Tensor:
        """Return the values of this rank's slice, [layout.numel / states] in the main dtype, on the device."""
        values = torch.empty(self._piece_numel, dtype=self.main_dtype, device=self.device)
        self.codec.decode_(self.shard.to(self.device), values, count=1)
        return values

    def adopt_codes(self, source: FlatBuffer, messages: Tensor) -> None:
        """Copy the codes of all parameters that this buffer shares with another coded buffer.

        Args:
            source: coded buffer to copy from.
            messages: messages of all ranks of ``source``, as gathered by its ``codes`` path.
        """
        piece = source.layout.numel // source.placement.mode.states
        # The new engine may train on another device than the one that gathered ``messages``.
        own = _Blocks(self.shard, self._piece_numel)
        whole = _Blocks(messages.to(self.device), piece)
        slots = zip(source.parameters, source.layout.slots, strict=True)
        offsets = {id(parameter): slot.offset for parameter, slot in slots}
        for fragment in self.fragments():
            parameter = self.parameters[fragment.slot]
            if id(parameter) not in offsets:
                continue
            # Copy block by block, because the parameter has another offset in each layout and may belong to another
            # rank's slice.
            places = torch.arange(-(-(fragment.stop - fragment.start) // BLOCK), device=self.device)
            there = offsets[id(parameter)] + fragment.start
            own.copy_from(places + fragment.offset // BLOCK, whole, places + there // BLOCK)


class _Blocks:
    """Access by block number to the codes and scales in messages of [numel] 8-bit codes each."""

    def __init__(self, messages: Tensor, numel: int) -> None:
        layout = message_layout(numel, 8)
        # Blocks in one message. 8-bit codes have one scale of two bytes per block.
        self.each = layout.groups
        self.count = layout.groups * (messages.numel() // layout.nbytes)
        rows = messages.view(-1, layout.nbytes)
        self._codes = rows[:, : layout.codes_nbytes].unflatten(1, (layout.groups, BLOCK))
        scales = rows[:, layout.scales_offset : layout.scales_offset + 2 * layout.groups]
        self._scales = scales.unflatten(1, (layout.groups, 2))

    def of_message(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the codes, uint8 [blocks, 256], and scales, bfloat16 [blocks], of one message."""
        return self._codes[index], self._scales[index].view(torch.bfloat16)[:, 0]

    def copy_from(self, here: Tensor, source: _Blocks, there: Tensor) -> None:
        """Copy the source's blocks number ``there`` to this object's blocks number ``here``."""
        for own, other in ((self._codes, source._codes), (self._scales, source._scales)):
            # A message stores codes and scales in separate sections, so each block is copied in two parts. The indices
            # are moved to the device of the tensor that they index, because a message may be in host memory.
            take = there.to(other.device)
            put = here.to(own.device)
            found = other[take // source.each, take % source.each].to(own.device)
            own[put // self.each, put % self.each] = found
