"""The codec of each hop's messages, and properties of codecs that need no hop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zeropp.config import load_config
from zeropp.partition.levels import HopSpec, build_layout
from zeropp.setup.choices import choose_encoding
from zeropp.wire.codecs import BlockCodec, PlainCodec
from zeropp.wire.differences import Lossless
from zeropp.wire.encoding import Encoding
from zeropp_kernels import MOST_ESCAPES, block_table

INSIDE, BETWEEN = HopSpec(1, 2, (0, 1), "local"), HopSpec(2, 4, (0, 2), "cross")
LONE = HopSpec(1, 4, (0, 1, 2, 3), "local")
CPU = torch.device("cpu")


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Make torch.empty return memory filled with NaN, as torch does with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def encoding(**zero: object) -> Encoding:
    return choose_encoding(load_config({"zero_optimization": {"stage": 3, **zero}}))


def test_bits_of_hops() -> None:
    """A path with one hop uses the number of bits for hops between nodes, even if the hop is inside a node."""
    chosen = Encoding(bits=(8, 4), rotate=True)
    assert chosen.gradient_codecs([INSIDE, BETWEEN], torch.float32) == [BlockCodec(8, True), BlockCodec(4, True)]
    assert chosen.gradient_codecs([LONE], torch.float32) == [BlockCodec(4, True)]
    assert Encoding(bits=(16, 32)).gradient_codecs([INSIDE, BETWEEN], torch.float16) == [
        PlainCodec(torch.bfloat16), PlainCodec(torch.float32),
    ]  # fmt: skip
    assert Encoding().gradient_codecs([LONE], torch.float16) == [PlainCodec(torch.float16)]


def test_bits_of_the_configuration() -> None:
    config = {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}
    assert choose_encoding(load_config(config)).bits == (8, 4)
    bits = {"gradient_bits": {"local": 16, "cross": 8}}
    assert choose_encoding(load_config({**config, "zeropp": bits})).bits == (16, 8)


def test_hops_that_feed_back() -> None:
    path = [INSIDE, BETWEEN]
    for feedback, expected in ((None, [False, False]), ("cross", [False, True]), ("both", [True, True])):
        assert [Encoding(feedback=feedback).feeds_back(path, hop) for hop in path] == expected
        assert Encoding(feedback=feedback).feeds_back([LONE], LONE) is (feedback is not None)


def test_who_sums() -> None:
    """The backend sums if that rounds no more and sends no more bytes, or if it is asked for; it never sums codes."""
    single, half = PlainCodec(torch.float32), PlainCodec(torch.bfloat16)
    chosen = {
        (choice, codec, backend)
        for choice in ("auto", "exchange", "backend")
        for codec in (single, half, PlainCodec(torch.float64), BlockCodec(8))
        for backend in ("nccl", "gloo", "fake", "other")
        if Encoding(reduce_scatter=choice).sums_by_backend(codec, INSIDE, 2**10, backend)
    }
    asked = {("backend", codec, backend) for codec in (single, half, PlainCodec(torch.float64))
             for backend in ("nccl", "gloo", "fake", "other")}  # fmt: skip
    assert chosen == asked | {("auto", single, "nccl"), ("auto", PlainCodec(torch.float64), "nccl")}


@pytest.mark.parametrize(
    ("choice", "ranks", "link", "nbytes", "expected"),
    [
        ("low_latency", 32, "cross", 2**19 - 512, True),
        ("low_latency", 31, "cross", 2**10, False),
        ("low_latency", 32, "cross", 2**19, False),
        ("low_latency", 64, "local", 2**10, False),
        # By default no sum is rounded on the way, for any size.
        ("auto", 128, "cross", 2**10, False),
    ],
)
def test_small_parts_of_many_nodes(choice: str, ranks: int, link: str, nbytes: int, expected: bool) -> None:
    hop, half = HopSpec(ranks, 1, tuple(range(ranks)), link), PlainCodec(torch.bfloat16)
    chosen = Encoding(reduce_scatter=choice)
    assert chosen.sums_by_backend(half, hop, nbytes, "nccl") is expected
    assert not chosen.sums_by_backend(half, hop, nbytes, "gloo")
    assert chosen.sums_by_backend(PlainCodec(torch.float32), hop, nbytes, "nccl")


def test_sums_that_go_back_to_copies() -> None:
    plain, codes = PlainCodec(torch.bfloat16), BlockCodec(4, True)
    assert Encoding(rotate=True).return_codec([plain, codes]) == BlockCodec(8, True)
    assert Encoding().return_codec([plain, codes]) == Encoding().return_codec([codes, plain]) == BlockCodec(8, False)
    assert Encoding().return_codec([PlainCodec(torch.float32), plain]) == plain


@pytest.mark.filterwarnings("ignore:weights are not encoded in stage 0")
def test_codes_of_weights() -> None:
    """Encoding of frozen weights does not imply encoding of trained weights. Stage 0 gathers no weights."""
    frozen = encoding(zero_quantized_nontrainable_weights=True)
    assert (frozen.weight_codec(True), frozen.weight_codec(False)) == (None, BlockCodec(8))
    both = encoding(zero_quantized_weights=True)
    assert both.weight_codec(True) == both.weight_codec(False) == BlockCodec(8)
    none = encoding(stage=0, zero_quantized_weights=True, zero_quantized_nontrainable_weights=True)
    assert none.weight_codec(True) is none.weight_codec(False) is None


def encoded(codec: BlockCodec, values: Tensor) -> Tensor:
    message = codec.empty(values.numel(), 1, CPU)
    codec.encode_(message, values)
    return message


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_codes(dtype: torch.dtype, accumulate: bool) -> None:
    """Kernels sum in float32. For a float64 output they use temporary memory, whose former values must not count."""
    codec = BlockCodec(8)
    values = torch.arange(-127, 128).repeat(2)  # with scale 1 these values are codes, so nothing is rounded
    both = torch.cat([encoded(codec, values * factor) for factor in (1.0, 4.0)])
    out = torch.full(values.shape, 7.0, dtype=dtype)
    codec.decode_sum_(list(both.chunk(2)), out, scale=0.5, accumulate=accumulate)
    assert torch.equal(out, 2.5 * values.to(dtype) + (7.0 if accumulate else 0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_codes_decode_to_any_dtype(dtype: torch.dtype) -> None:
    codec, values = BlockCodec(8), torch.arange(-127, 128).to(dtype)
    out = torch.zeros(values.shape, dtype=dtype)
    codec.decode_(encoded(codec, values), out, count=1)
    assert torch.equal(out, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_packed_in_the_order_of_their_parameters(dtype: torch.dtype) -> None:
    """Gradients in any memory format are packed in the layout's order, and a missing gradient as zeros."""
    shape, last = (2, 3, 4, 5), (60, 1, 15, 3)
    layout = build_layout([("images", shape, last), ("unused", (9,), (1,)), ("plain", (7, 3), (3, 1))], 1)
    numels, offsets = [slot.numel for slot in layout.slots], [slot.offset for slot in layout.slots]
    images, plain = torch.randn(shape, dtype=dtype), torch.randn(3, 7, dtype=dtype).t()
    whole = torch.zeros(layout.numel)
    for view, value in zip(layout.views(whole), (images, torch.zeros(9), plain), strict=True):
        view.copy_(value)
    codec = BlockCodec(8)
    packed = codec.empty(layout.numel, 1, CPU)
    table = block_table(numels, offsets, layout.numel)
    codec.pack_(packed, [images, None, plain], layout, table, count=1, feedback=None)
    assert torch.equal(packed, encoded(codec, whole))


@pytest.mark.parametrize(("count", "factor"), [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.25), (5, 0.125), (8, 0.125)])
def test_headroom_is_no_more_than_a_sum_needs(count: int, factor: float) -> None:
    assert PlainCodec(torch.float16).headroom(count) == factor
    assert PlainCodec(torch.bfloat16).headroom(count) == BlockCodec(4).headroom(count) == 1.0


def test_differences_that_take_as_many_bytes_as_weights_are_not_taken() -> None:
    codec = Lossless()
    codec.set_capacity((0, 0), 1024, 1)
    nbytes = codec.nbytes(1024)
    assert [codec.set_capacity((0, 0), 1024, most) for most in (nbytes - 1, nbytes, nbytes + 1)] == [False, False, True]


def test_differences_with_more_escapes_than_a_message_holds_are_not_taken() -> None:
    codec, numel = Lossless(), 1 << 40
    rooms = [(MOST_ESCAPES, 0), (MOST_ESCAPES + 1, 0), (0, MOST_ESCAPES + 1)]
    assert [codec.set_capacity(room, numel, 2 * numel) for room in rooms] == [True, False, False]
