"""Expected properties of the machine code of each kernel, and the check against them."""

from __future__ import annotations

from collections.abc import Callable

from ..device.tiles import tile_of
from .binaries import Facts
from .cases import Case

__all__ = ["REGISTERS", "check"]

# Most registers per thread on AMD, whose compiler has no option for a bound, by Case.even. Some kernels use the second
# number, see _most_registers.
REGISTERS = {True: 128, False: 168}
_AMD = {
    "gather_pinned": 256, "scatter_pinned": 256, "lossless_count": 96, "lossless_encode": 96, "lossless_decode": 96,
}  # fmt: skip
# Elements per thread of most kernels. Sums of plain values and lossless kernels have 16.
_ELEMENTS = 32
# Kernels that compute scales, and their fused multiply-adds per scale. A thread has the elements of one group.
_ENCODERS = ("quantize", "quantize_tensors", "reduce_quantize", "delta_encode")
_PER_SCALE = 4


def _codes(case: Case, key: str = "BITS") -> int:
    return _ELEMENTS * int(str(case.constants[key])) // 8


def _error(case: Case) -> int:
    return _ELEMENTS if case.constants["FEEDBACK"] else 0


def _values(case: Case, name: str) -> int:
    return _ELEMENTS * (4 if case.pointers[name] == "fp32" else 2)


def _encoded(case: Case) -> int:
    # Codes and errors are stored in two places in the code: as they are, and as zeros for groups with Inf or NaN.
    return 2 * (_codes(case) + _error(case))


def _quantize_moves(case: Case, name: str) -> tuple[int, int]:
    return _values(case, name) + _error(case), _encoded(case)


def _requantize_moves(case: Case) -> tuple[int, int]:
    # The first two messages are loaded before the loop; in the loop, the message after the next one.
    return 3 * _codes(case, "SOURCE_BITS") + _error(case), _encoded(case)


def _wide_codes(case: Case) -> int:
    # Codes whose values are stored as they are have narrower loads, see load_words.
    return _codes(case) if case.constants["ROTATE"] else 0


def _reduce_moves(case: Case) -> tuple[int, int]:
    values = _values(case, "out")
    return 3 * _wide_codes(case) + (values if case.constants["ACCUMULATE"] else 0), values


def _sum_moves(case: Case) -> tuple[int, int]:
    # The first two messages are loaded before the loop; in the loop, the message after the next one.
    share = _block_elements(case)
    size = 4 if case.pointers["messages"] == "fp32" else 2
    return share * (3 * size + 4 * bool(case.constants["ACCUMULATE"])), 4 * share


def _gather_moves(case: Case) -> tuple[int, int]:
    values = _values(case, "flat")
    return _values(case, "") + (values if case.constants["ACCUMULATE"] else 0), values


def _delta_moves(case: Case) -> tuple[int, int]:
    held = _values(case, "reference")
    return _values(case, "shard") + held, _ELEMENTS + (held if case.constants["UPDATE"] else 0)


def _block_elements(case: Case) -> int:
    # 128 threads share the 256 elements of a block.
    return 2 * int(str(case.constants["TILE"]))


def _section_elements(case: Case) -> int:
    # 128 threads share the 2048 elements of a section.
    return 16 * int(str(case.constants["TILE"]))


def _section_values(case: Case, name: str) -> int:
    return _section_elements(case) * (4 if case.pointers[name] == "fp32" else 2)


def _lossless_moves(case: Case) -> tuple[int, int]:
    # Codes do not count: a thread has 8 bytes of a section's codes, fewer than 128 bits.
    return _section_values(case, "values") + _section_values(case, "reference"), 0


# Bytes per thread of values, codes and errors that the code (loads, stores) with 128-bit accesses, by kernel. A loop's
# body counts once.
_MOVED: dict[str, Callable[[Case], tuple[int, int]]] = {
    "quantize": lambda case: _quantize_moves(case, "x"),
    "quantize_tensors": lambda case: _quantize_moves(case, ""),
    "reduce_quantize": _requantize_moves,
    # Codes are loaded in both branches.
    "dequantize": lambda case: (2 * _wide_codes(case), _values(case, "out")),
    "reduce": _reduce_moves,
    "sum": _sum_moves,
    "delta_encode": _delta_moves,
    "delta_apply": lambda case: (_values(case, "reference"), _values(case, "reference")),
    "gather": _gather_moves,
    "gather_pinned": _gather_moves,
    "scatter": lambda case: (_values(case, "flat"), _values(case, "")),
    "scatter_pinned": lambda case: (_values(case, "flat"), _values(case, "")),
    "lossless_count": _lossless_moves,
    "lossless_encode": _lossless_moves,
    "lossless_decode": lambda case: (_section_values(case, "reference"), _section_values(case, "out")),
}
# Names of the pointers (loaded, stored) that a thread accesses element by element in tiles at an end or misaligned, by
# kernel. "" is the tensors of a table.
_ONE_BY_ONE: dict[str, tuple[str | None, str | None]] = {
    "quantize": ("x", None),
    "quantize_tensors": ("", None),
    "dequantize": (None, "out"),
    "reduce": (None, "out"),
    # A tile of sum_kernel is half as large, but has two loads: one message before the loop and one in it.
    "sum": ("messages", None),
    "delta_encode": ("reference", "reference"),
    "delta_apply": ("reference", "reference"),
    "gather": ("", "flat"),
    "gather_pinned": ("", "flat"),
    "scatter": ("flat", ""),
    "scatter_pinned": ("flat", ""),
}


def _section_words(case: Case) -> int:
    # A word has the codes of 8 elements.
    return _section_elements(case) // 8


# Expected narrow accesses (loads, stores) of the lossless kernels. Escaped values are 8 or 16 bits wide, and their
# addresses depend on the data, so these accesses cannot be vectorised: one of 8 bits per element, and one of 16 bits
# per word in the body of a loop. The encoder loads these values again, and clears unused bytes, 512 at a time with 128
# threads, which is 512 / 128 stores a thread.
_ESCAPES: dict[str, Callable[[Case], tuple[int, int]]] = {
    "lossless_encode": lambda case: (
        _section_words(case) if case.pointers["values"] != "fp32" else 0,
        _section_elements(case) + _section_words(case) + 512 // 128,
    ),
    "lossless_decode": lambda case: (_section_elements(case) + _section_words(case), _section_words(case)),
}


def _unrolled(case: Case, backend: str, loads: int, expected: int) -> bool:
    """Return True if the loads beyond ``expected`` are whole messages of a loop that AMD's compiler has unrolled."""
    if case.name != "sum" or backend != "hip":
        return False
    message = _block_elements(case) * (4 if case.pointers["messages"] == "fp32" else 2) // 16
    return loads > expected and (loads - expected) % message == 0


def _narrow(case: Case) -> tuple[int, int]:
    """Return the largest allowed number of (loads, stores) below 32 bits per thread."""
    names = _ONE_BY_ONE.get(case.name, (None, None))
    values = (0 if name is None or case.pointers[name] == "fp32" else _ELEMENTS for name in names)
    # 16-bit scales: up to 4 accesses per thread, and as many for each of the three messages whose loads are in the code
    # of sums. In tiles at an end, the code of Triton 3.6 loads a scale again for each value that a thread stores.
    scales = {"dequantize": 20, "reduce": 12, "reduce_quantize": 6}.get(case.name, 4)
    loads, stores = values
    return loads + scales, stores + 4


def _most_registers(case: Case, backend: str) -> int:
    if backend != "hip":
        return tile_of(case.kernel, case.constants).registers
    if (own := _AMD.get(case.name)) is not None:
        return own
    # In these kernels AMD's compiler keeps several unrolled messages, rotated values, or masks of stores in registers.
    return REGISTERS[case.even and case.name not in ("reduce", "sum", "scatter")]


def _fused(case: Case) -> int:
    """Return the number of fused multiply-adds that do not change bits, because their products or sums are exact."""
    constants = case.constants
    number = 0
    if case.name in ("reduce", "reduce_quantize"):
        # One per element in the loop over messages.
        number += _ELEMENTS
    if case.name in _ENCODERS:
        # Two for the quotient that is a group's scale, and two for its inverse.
        number += _PER_SCALE
    if constants.get("FEEDBACK"):
        # One per element for the error, which has scales, too.
        number += _ELEMENTS + _PER_SCALE
    if constants.get("ROTATE") and case.name in ("quantize", "quantize_tensors"):
        # One per element in the first step of a rotation of 16-bit values.
        number += _ELEMENTS * ("fp32" not in case.pointers.values())
    return number


def check(case: Case, facts: Facts, backend: str) -> list[str]:
    """Return the deviations of a kernel's machine code from the expected properties, as texts; empty if there are none.

    Args:
        case: the configuration that was compiled.
        facts: facts about its machine code.
        backend: Triton's name of the backend, "cuda" or "hip".
    """
    wrong = []
    if facts.spilled:
        wrong.append(f"{facts.spilled} spilled or on the stack")
    bound = _most_registers(case, backend)
    if facts.registers > bound:
        wrong.append(f"{facts.registers} registers, more than {bound}")
    fused = _fused(case)
    # Triton may compute one or two scales again, in whole or in part, in the layout in which it stores them. A quotient
    # and an inverse have two multiply-adds each.
    again = 2 * _PER_SCALE if case.name in _ENCODERS else 0
    # AMD's compiler combines conversions from float16 with some of a rotation's multiply-adds, in instructions that do
    # not count.
    merged = _ELEMENTS if backend == "hip" and case.constants.get("ROTATE") and "fp16" in case.pointers.values() else 0
    if facts.fused not in range(max(fused - merged, 0), fused + again + 1, 2):
        wrong.append(f"{facts.fused} fused multiply-adds, not {fused}")
    if case.even and case.name in _MOVED:
        # Exact numbers, because more loads than the bytes need are as suspicious as fewer.
        expected = tuple(nbytes // 16 for nbytes in _MOVED[case.name](case))
        loads = expected[0] if _unrolled(case, backend, facts.wide_loads, expected[0]) else facts.wide_loads
        if (loads, facts.wide_stores) != expected:
            found = f"{facts.wide_loads} loads and {facts.wide_stores} stores"
            wrong.append(f"{found} of 128 bits, not {expected[0]} and {expected[1]}")
    if case.even:
        narrow = facts.narrow_loads, facts.narrow_stores
        # Escapes need exactly one narrow access each. Fewer would mean wide accesses to places that need not be
        # adjacent.
        escapes = _ESCAPES.get(case.name)
        most = _narrow(case)
        right = narrow == escapes(case) if escapes else narrow[0] <= most[0] and narrow[1] <= most[1]
        if not right:
            wrong.append(f"{narrow[0]} loads and {narrow[1]} stores below 32 bits")
    return wrong
