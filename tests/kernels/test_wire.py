"""Message layouts: sizes, offsets and alignment, computed from integers without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp_kernels import MessageLayout, lossless_layout, message_layout, state_layout
from zeropp_kernels.wire import BLOCK, GROUPS, SECTION

numels = st.integers(0, 1 << 34)
bits = st.sampled_from(sorted(GROUPS))


@given(numels, bits)
def test_parts_follow_each_other_aligned(numel: int, bits: int) -> None:
    layout = message_layout(numel, bits)
    assert layout.groups * layout.group >= numel > (layout.groups - 1) * layout.group or numel == layout.groups == 0
    assert layout.codes_nbytes * 8 == layout.groups * layout.group * bits
    assert layout.codes_nbytes <= layout.scales_offset < layout.codes_nbytes + 16 and layout.scales_offset % 16 == 0
    end = layout.scales_offset + 2 * layout.groups
    assert end <= layout.nbytes < end + 128 and layout.nbytes % 128 == 0
    assert layout.slots >= layout.groups and layout.scales_offset + 2 * layout.slots == layout.nbytes


@given(st.integers(1, 1 << 25), bits)
def test_bits_of_an_element(blocks: int, bits: int) -> None:
    """An element takes ``bits + 16 / group`` bits (8.06 or 4.125), plus at most 128 bytes of padding per message."""
    layout = message_layout(blocks * BLOCK, bits)
    assert layout.nbytes * 8 <= blocks * BLOCK * (bits + 16 / GROUPS[bits]) + 128 * 8


@given(numels, numels, bits)
def test_messages_grow_with_their_elements(a: int, b: int, bits: int) -> None:
    small, large = sorted((a, b))
    assert message_layout(small, bits).nbytes <= message_layout(large, bits).nbytes


@given(numels, bits)
def test_state_has_a_byte_an_element_in_the_message_s_groups(numel: int, bits: int) -> None:
    state, message = state_layout(numel, bits), message_layout(numel, bits)
    assert (state.groups, state.group, state.bits) == (message.groups, message.group, 8)
    assert state.codes_nbytes == state.groups * state.group


@given(numels, st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_lossless_parts_follow_each_other_aligned(numel: int, room8: int, room16: int) -> None:
    layout = lossless_layout(numel, room8, room16)
    assert layout.codes_nbytes == layout.blocks * 128 and layout.blocks == -(-numel // BLOCK)
    assert layout.starts_offset == layout.codes_nbytes and layout.sections == -(-numel // SECTION)
    assert layout.room8_offset == layout.starts_offset + 8 * layout.sections
    end8 = layout.room8_offset + room8
    assert end8 <= layout.room16_offset < end8 + 16 and layout.room16_offset % 16 == 0
    end = layout.room16_offset + 2 * room16
    assert end <= layout.nbytes < end + 128 and layout.nbytes % 128 == 0


@given(numels, bits)
def test_a_layout_is_made_once(numel: int, bits: int) -> None:
    """Layouts are cached because every call needs one; two layouts are equal if elements, bits and group are equal."""
    layout = message_layout(numel, bits)
    assert message_layout(numel, bits) is layout and state_layout(numel, bits) is state_layout(numel, bits)
    assert layout == MessageLayout(numel, bits, GROUPS[bits]) != message_layout(numel + 1, bits)
    assert repr(layout) == f"MessageLayout(numel={numel}, bits={bits}, group={GROUPS[bits]})"


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="bits is 5"):
        message_layout(10, 5)
    with pytest.raises(ValueError, match="numel is -1"):
        _ = message_layout(-1, 8).groups
    with pytest.raises(ValueError, match="room8 is -1"):
        lossless_layout(10, -1, 0)
