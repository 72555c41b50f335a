"""Positions of parameters in a flat buffer, and the parts of parameters in each piece."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp.partition.levels import BLOCK, BufferLayout, build_layout, dense_strides

shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple) | st.tuples(st.integers(0, 3000))
worlds = st.integers(1, 9) | st.sampled_from([16, 64, 512, 1024])


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return dense_strides(shape, torch.empty(shape, device="meta").stride())


def lay(shape_list: list[tuple[int, ...]], world: int) -> BufferLayout:
    return build_layout([(f"p{i}", shape, contiguous(shape)) for i, shape in enumerate(shape_list)], world)


# Offsets, gaps and pieces.


@given(st.lists(shapes, min_size=1, max_size=12), worlds)
@settings(max_examples=150)
def test_slots_and_gaps_tile_the_buffer(shape_list: list[tuple[int, ...]], world: int) -> None:
    layout = lay(shape_list, world)
    assert [slot.shape for slot in layout.slots] == shape_list
    assert all(slot.offset % BLOCK == 0 for slot in layout.slots)
    ranges = [(slot.offset, slot.offset + slot.numel) for slot in layout.slots if slot.numel] + list(layout.gaps)
    place = 0
    for start, stop in sorted(ranges):
        assert start == place and stop > start, "an overlap or a hole"
        place = stop
    assert place == layout.numel
    assert layout.used_numel == sum(torch.Size(shape).numel() for shape in shape_list)
    assert layout.numel - layout.used_numel == sum(stop - start for start, stop in layout.gaps)
    assert layout.piece_numel % BLOCK == 0 and layout.piece_numel * world == layout.numel > 0
    assert all(stop - start < BLOCK for start, stop in layout.gaps[:-1]), "only the last gap may pad for the world size"
    assert layout.numel - max(slot.offset + slot.numel for slot in layout.slots) < BLOCK * (world + 1)


@given(st.lists(shapes, min_size=1, max_size=12), worlds)
@settings(max_examples=100)
def test_pieces_reassemble_every_parameter_once(shape_list: list[tuple[int, ...]], world: int) -> None:
    layout = lay(shape_list, world)
    found: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(shape_list))}
    for piece in range(world):
        start, stop = layout.slice_range(piece, world)
        assert stop - start == layout.piece_numel
        last = 0
        for fragment in layout.fragments(piece, world):
            slot = layout.slots[fragment.slot]
            assert 0 <= fragment.start < fragment.stop <= slot.numel
            assert start + fragment.offset == slot.offset + fragment.start, "piece and buffer disagree on the place"
            assert fragment.offset >= last and fragment.offset % BLOCK == 0
            last = fragment.offset + fragment.stop - fragment.start
            assert last <= layout.piece_numel
            assert fragment.start % BLOCK == 0, "pieces must be cut at blocks"
            found[fragment.slot].append((fragment.start, fragment.stop))
    for index, ranges in found.items():
        numel = layout.slots[index].numel
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])][: len(ranges)]
        assert (ranges[-1][1] if ranges else 0) == numel


@given(st.lists(shapes, min_size=1, max_size=8))
@settings(max_examples=50)
def test_offsets_do_not_depend_on_the_world(shape_list: list[tuple[int, ...]]) -> None:
    assert {lay(shape_list, world).slots for world in (1, 2, 8, 1024)} == {lay(shape_list, 1).slots}


@given(st.lists(shapes, min_size=1, max_size=6), st.sampled_from([(1, 2, 4), (1, 3, 12), (1, 8)]))
def test_slices_at_every_level_tile_the_buffer(shape_list: list[tuple[int, ...]], levels: tuple[int, ...]) -> None:
    layout = lay(shape_list, levels[-1])
    for level in levels:
        ranges = [layout.slice_range(index, level) for index in range(level)]
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
        assert ranges[-1][1] == layout.numel


def test_by_hand() -> None:
    layout = lay([(3, 100), (1,), (512,)], 2)
    assert [slot.offset for slot in layout.slots] == [0, 512, 768]
    assert (layout.numel, layout.piece_numel, layout.used_numel) == (1536, 768, 813)
    assert layout.gaps == ((300, 512), (513, 768), (1280, 1536))
    first, second = layout.fragments(0, 2), layout.fragments(1, 2)
    assert [(f.slot, f.start, f.stop, f.offset) for f in first] == [(0, 0, 300, 0), (1, 0, 1, 512)]
    assert [(f.slot, f.start, f.stop, f.offset) for f in second] == [(2, 0, 512, 0)]


def test_parameters_without_elements() -> None:
    layout = lay([(0, 4), (0,)], 4)
    assert (layout.numel, layout.used_numel, layout.gaps) == (4 * BLOCK, 0, ((0, 4 * BLOCK),))
    assert all(layout.fragments(piece, 4) == [] for piece in range(4))
    between = lay([(5,), (0,), (7,)], 1)
    assert [slot.offset for slot in between.slots] == [0, 256, 256]


def test_no_parameter_at_all() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        build_layout([], 2)


# Strides.


def kept(tensor: torch.Tensor) -> tuple[int, ...]:
    return dense_strides(tuple(tensor.shape), tensor.stride())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, 3, 5, 6),
        torch.empty(4, 3, 5, 6).to(memory_format=torch.channels_last),
        torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.empty(8, 5).t(),
        torch.empty(2, 3, 4).permute(2, 0, 1),
        torch.empty(7),
        torch.empty(()),
        torch.empty(1, 4, 1, 3),
        torch.empty(1, 4, 1, 3).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}/{tensor.stride()}",
)
def test_dense_tensors_keep_their_strides(tensor: torch.Tensor) -> None:
    assert kept(tensor) == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(1, 5).expand(4, 5),
        torch.empty(5, 1).expand(5, 4),
        torch.empty(10).as_strided((4, 3), (1, 1)),  # elements overlap
        torch.empty(8, 8)[:, ::2],  # has holes
        torch.empty(8, 8)[:4, :4],
        torch.empty(8)[::2],
        torch.empty(3, 0, 4).transpose(0, 2),
        torch.empty(()).expand(3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}/{tensor.stride()}",
)
def test_the_rest_becomes_contiguous(tensor: torch.Tensor) -> None:
    assert kept(tensor) == torch.empty(tensor.shape).stride()


@given(st.lists(st.integers(0, 4), max_size=5), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=200)
def test_kept_strides_fill_exactly_numel_places(shape: list[int], rng: object, odd: bool) -> None:
    order = list(range(len(shape)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty([shape[i] for i in order]).permute([order.index(i) for i in range(len(order))])
    strides = list(kept(tensor))
    if tensor.numel():
        assert tuple(strides) == tensor.stride()
    places = torch.arange(max(tensor.numel(), 1)).as_strided(tensor.shape, strides).flatten()
    assert sorted(places.tolist()) == list(range(tensor.numel()))
    if odd and 1 in shape:  # the stride of a dimension of size 1 has no meaning
        given = list(tensor.stride())
        given[shape.index(1)] = 12345
        again = dense_strides(tuple(shape), given)
        assert torch.arange(max(tensor.numel(), 1)).as_strided(tensor.shape, again).flatten().equal(places)
