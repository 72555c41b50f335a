"""The functions that return new messages, and views of a message's codes and scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zeropp_kernels as kernels
from tests.kernels import statement
from tests.kernels.cases import BITS, DTYPES, LENGTHS, values
from tests.kernels.operations import messages_for
from zeropp_kernels import message_layout


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("numel", [0, *LENGTHS])
def test_split(numel: int, bits: int) -> None:
    """Codes and scales of two messages equal ``statement.unpack``, and their products are the decoded values."""
    x = values(2 * numel, torch.float32, spoilt=False)
    messages = kernels.quantize(x, bits=bits, count=2)
    codes, scales = kernels.split(messages, numel, bits, count=2)
    layout = message_layout(numel, bits)
    assert codes.shape == (2, layout.groups, 256 if bits == 8 else 64)
    assert (codes.dtype, scales.dtype) == (torch.int8 if bits == 8 else torch.uint8, torch.bfloat16)
    assert scales.shape == (2, layout.groups)
    for index in range(2):
        wanted, wanted_scales = statement.unpack(messages[index * layout.nbytes :].numpy(), numel, bits)
        signed = codes[index].to(torch.int8)
        if bits == 4:
            packed = codes[index].view(torch.int8)
            signed = torch.cat([(packed << 4) >> 4, packed >> 4], dim=1)
        assert torch.equal(signed.double(), torch.from_numpy(wanted))
        assert torch.equal(scales[index].double(), torch.from_numpy(wanted_scales))
        found = (signed.float() * scales[index].float()[:, None]).view(-1)[:numel]
        assert torch.equal(found, kernels.dequantize(messages, 2 * numel, bits=bits, count=2).view(2, -1)[index])


@pytest.mark.parametrize("bits", BITS)
def test_split_returns_views_of_the_message(bits: int) -> None:
    messages = kernels.quantize(torch.ones(600), bits=bits)
    before = kernels.dequantize(messages, 600, bits=bits)
    codes, scales = kernels.split(messages, 600, bits)
    scales *= 2
    codes[0, 1, :] = 0
    out = kernels.dequantize(messages, 600, bits=bits)
    width = 256 if bits == 8 else 128
    expected = 2 * before
    expected[width : 2 * width] = 0
    assert torch.equal(out, expected) and before.all()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_in_new_memory_equal_those_in_given_memory(dtype: torch.dtype, bits: int, rotate: bool) -> None:
    x = values(6 * 100, dtype).view(6, 100).t()
    message, out = messages_for(300, bits, 2), torch.empty(600, dtype=dtype)
    kernels.quantize_(x.flatten(), message, bits=bits, count=2, rotate=rotate)
    kernels.dequantize_(message, out, bits=bits, count=2, rotate=rotate)
    assert torch.equal(kernels.quantize(x, bits=bits, count=2, rotate=rotate), message)
    for size in (600, (100, 6), x.shape):
        found = kernels.dequantize(message, size, dtype=dtype, bits=bits, count=2, rotate=rotate)
        assert found.shape == torch.Size([size] if isinstance(size, int) else size) and found.dtype == dtype
        assert torch.equal(found.view(-1), out)


def test_inside_a_compiled_region() -> None:
    """The functions compile without graph breaks, into one graph for the first size and one for all other sizes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def decoded(x: Tensor) -> tuple[Tensor, Tensor]:
        messages = kernels.quantize(x * 2, bits=8)
        codes, scales = kernels.split(messages, x.numel(), 8)
        return kernels.dequantize(messages, x.shape), (codes.float() * scales.float().unsqueeze(2)).flatten()

    compiled = torch.compile(decoded, fullgraph=True, backend="aot_eager")
    for rows in range(3, 9):
        found, products = compiled(torch.ones(rows, 100))
        expected, wanted = decoded(torch.ones(rows, 100))
        assert torch.equal(found, expected) and torch.equal(products, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_wrong_arguments_are_named() -> None:
    message = kernels.quantize(torch.ones(600))
    with pytest.raises(TypeError, match="x is list; expected a dense tensor"):
        kernels.quantize([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x has 600 elements, which count=7 does not divide"):
        kernels.quantize(torch.ones(600), count=7)
    with pytest.raises(TypeError, match="x is float64; expected float32"):
        kernels.quantize(torch.ones(600).double())
    with pytest.raises(TypeError, match="messages is NoneType; expected a dense tensor"):
        kernels.dequantize(None, 600)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="messages has 896 bytes; expected 1152: 1 x 1152 for 900 elements"):
        kernels.dequantize(message, (9, 100))
    with pytest.raises(ValueError, match="messages has 896 bytes; expected 1792: 2 x 896"):
        kernels.split(message, 600, 8, count=2)
    with pytest.raises(ValueError, match="bits is 5"):
        kernels.split(message, 600, 5)
    with pytest.raises(ValueError, match="count is 0; expected 1 to 65535"):
        kernels.split(message[:0], 600, 8, count=0)
    with pytest.raises(ValueError, match="messages begins at an odd byte"):
        kernels.split(torch.cat([message[:1], message])[1:], 600, 8)
