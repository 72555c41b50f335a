"""What the machine code of a kernel may hold."""

from __future__ import annotations

from collections.abc import Callable

from ..device.launch import ROWS
from .binaries import Facts
from .cases import Case

__all__ = ["REGISTERS", "check"]

# For each thread: with so many, four programs fit a multiprocessor; three where AMD's compiler takes no bound.
REGISTERS = {True: 128, False: 168}
# Of kernels that are leaner: five programs.
_LEAN = {"lossless_count": 96, "lossless_encode": 96, "lossless_decode": 96}
# Of these a multiprocessor has one program at most, which wait for the bus.
_ALONE = {"gather_pinned": 256, "scatter_pinned": 256}
# For each thread: 128 threads share ROWS rows of 128.
_ELEMENTS = ROWS


def _codes(case: Case, key: str = "BITS") -> int:
    return _ELEMENTS * int(str(case.constants[key])) // 8


def _error(case: Case) -> int:
    return _ELEMENTS if case.constants["FEEDBACK"] else 0


def _values(case: Case, name: str) -> int:
    return _ELEMENTS * (4 if case.pointers[name] == "fp32" else 2)


def _encoded(case: Case) -> int:
    # Twice in the code: as they are, and as zeros where a group is not finite.
    return 2 * (_codes(case) + _error(case))


def _quantize_moves(case: Case, name: str) -> tuple[int, int]:
    return _values(case, name) + _error(case), _encoded(case)


def _requantize_moves(case: Case) -> tuple[int, int]:
    # The first message is loaded before the loop, in it the one after that which is added.
    return 2 * _codes(case, "SOURCE_BITS") + _error(case), _encoded(case)


def _reduce_moves(case: Case) -> tuple[int, int]:
    values = _values(case, "out")
    return 2 * _codes(case) + (values if case.constants["ACCUMULATE"] else 0), values


def _sum_moves(case: Case) -> tuple[int, int]:
    # The first message and the second are loaded before the loop, in it the one after next.
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
    # 256 elements of a block among 128 threads.
    return 2 * int(str(case.constants["TILE"]))


def _section_elements(case: Case) -> int:
    # 2048 elements of a section among 128 threads.
    return 16 * int(str(case.constants["TILE"]))


def _section_values(case: Case, name: str) -> int:
    return _section_elements(case) * (4 if case.pointers[name] == "fp32" else 2)


def _lossless_moves(case: Case) -> tuple[int, int]:
    # Of codes a thread has 8 bytes of a section, which is no 128 bits.
    return _section_values(case, "values") + _section_values(case, "reference"), 0


# Bytes of values, codes and errors that a thread (loads, stores). Of n messages two are in the code, one in a loop.
_MOVED: dict[str, Callable[[Case], tuple[int, int]]] = {
    "quantize": lambda case: _quantize_moves(case, "x"),
    "quantize_tensors": lambda case: _quantize_moves(case, ""),
    "reduce_quantize": _requantize_moves,
    # Decoded in both branches.
    "dequantize": lambda case: (2 * _codes(case), _values(case, "out")),
    "reduce": _reduce_moves,
    "sum": _sum_moves,
    "delta_encode": _delta_moves,
    "delta_apply": lambda case: (_values(case, "reference") + _ELEMENTS // 2, _values(case, "reference")),
    "gather": _gather_moves,
    "gather_pinned": _gather_moves,
    "scatter": lambda case: (_values(case, "flat"), _values(case, "")),
    "scatter_pinned": lambda case: (_values(case, "flat"), _values(case, "")),
    "lossless_count": _lossless_moves,
    "lossless_encode": _lossless_moves,
    "lossless_decode": lambda case: (_section_values(case, "reference"), _section_values(case, "out")),
}
# Tensors of values (loaded, stored) that a thread accesses one by one where a tile is not all there, or not aligned.
_ONE_BY_ONE: dict[str, tuple[str | None, str | None]] = {
    "quantize": ("x", None),
    "quantize_tensors": ("", None),
    "dequantize": (None, "out"),
    "reduce": (None, "out"),
    # Half of the other tiles, twice: a message before the loop and one in it.
    "sum": ("messages", None),
    "delta_encode": ("reference", "reference"),
    "delta_apply": ("reference", "reference"),
    "gather": ("", "flat"),
    "gather_pinned": ("", "flat"),
    "scatter": ("flat", ""),
    "scatter_pinned": ("flat", ""),
}
# Accesses (loads, stores) below 32 bits where places depend on the data: for each element one of 8 bits and one of 16.
# Encoding also clears the ends of rooms, 512 bytes at a time.
_ESCAPES: dict[str, Callable[[Case], tuple[int, int]]] = {
    "lossless_encode": lambda case: (0, 2 * _section_elements(case) + 512 // 128),
    "lossless_decode": lambda case: (2 * _section_elements(case), 0),
}


# In the loop over messages, where products are exact.
_SUMS = ("reduce", "reduce_quantize")


def _unrolled(case: Case, backend: str, loads: int, expected: int) -> bool:
    """Whether more loads than expected are whole messages of a loop, which AMD's compiler unrolls at its liking."""
    if case.name != "sum" or backend != "hip":
        return False
    message = _block_elements(case) * (4 if case.pointers["messages"] == "fp32" else 2) // 16
    return loads > expected and (loads - expected) % message == 0


def _narrow(case: Case) -> tuple[int, int]:
    """Most (loads, stores) of a thread below 32 bits."""
    names = _ONE_BY_ONE.get(case.name, (None, None))
    values = (0 if name is None or case.pointers[name] == "fp32" else _ELEMENTS for name in names)
    # Scales are 16 bits each: one access of a thread, or of a thread and message.
    loads, stores = (4 + each for each in values)
    # At an end Triton 3.6 looks scales up again, one for each value that a thread then stores.
    return loads + (16 if case.name == "dequantize" else 0), stores


def _most_registers(case: Case, backend: str) -> int:
    if (own := _ALONE.get(case.name) or _LEAN.get(case.name)) is not None:
        return own
    # AMD's compiler takes no bound: unrolled, several messages are in registers, rotated ones, and masks of stores.
    return REGISTERS[case.even and (backend != "hip" or case.name not in ("reduce", "sum", "scatter"))]


def check(case: Case, facts: Facts, backend: str) -> list[str]:
    """What is wrong with the machine code that Triton's ``backend``, "cuda" or "hip", has made."""
    wrong = []
    if facts.spilled:
        wrong.append(f"{facts.spilled} spilled or on the stack")
    bound = _most_registers(case, backend)
    if facts.registers > bound:
        wrong.append(f"{facts.registers} registers, more than {bound}")
    # One for each element in the loop's body.
    fused = _ELEMENTS if case.name in _SUMS else 0
    if facts.fused != fused:
        wrong.append(f"{facts.fused} fused multiply-adds, not {fused}")
    if case.even and case.name in _MOVED:
        # Equal and not at least: more loads than bytes need are as suspicious as fewer.
        expected = tuple(nbytes // 16 for nbytes in _MOVED[case.name](case))
        loads = expected[0] if _unrolled(case, backend, facts.wide_loads, expected[0]) else facts.wide_loads
        if (loads, facts.wide_stores) != expected:
            found = f"{facts.wide_loads} loads and {facts.wide_stores} stores"
            wrong.append(f"{found} of 128 bits, not {expected[0]} and {expected[1]}")
    if case.even:
        narrow = facts.narrow_loads, facts.narrow_stores
        # Fewer escapes than elements would be wide accesses to places that need not follow each other.
        escapes = _ESCAPES.get(case.name)
        most = _narrow(case)
        right = narrow == escapes(case) if escapes else narrow[0] <= most[0] and narrow[1] <= most[1]
        if not right:
            wrong.append(f"{narrow[0]} loads and {narrow[1]} stores below 32 bits")
    return wrong
