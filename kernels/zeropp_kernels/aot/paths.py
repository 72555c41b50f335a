"""The instructions that a program with a complete, aligned tile executes, found in machine code.

Most instructions in a kernel's code are for tiles at an end, or for tensors at odd addresses, and few programs execute
them. Instructions of the code alone therefore say little about time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Instruction", "Path", "amd_code", "nvidia_code", "path_of"]


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: its name.
        target: label that it branches to; "" for other instructions.
        leaves: True if it ends the program.
        passes: True if the next instruction may follow.
        loaded, stored: bytes of global memory that a thread loads or stores.
        written: registers that a load writes, empty for other instructions.
        named: all registers in its operands.
    """

    opcode: str
    target: str = ""
    leaves: bool = False
    passes: bool = True
    loaded: int = 0
    stored: int = 0
    written: frozenset[int] = frozenset()
    named: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Path:
    """Counts of the instructions that a program executes.

    Attributes:
        instructions: number of instructions, with the body of a loop once.
        repeated: number of these in the body of a loop.
        in_flight: most bytes that a thread has loaded before it uses the first of them.
    """

    instructions: int
    repeated: int
    in_flight: int


# An address, a predicate, an opcode and its operands; and a label.
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_SASS_LABEL = re.compile(r"^\s*(\.L_x_\d+):\s*$")
_AMD = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\b([^;]*)")
_AMD_LABEL = re.compile(r"^(\.LBB\w+):")


def nvidia_code(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions and {label: place} of the output of ``nvdisasm -c``."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label.group(1)] = len(code)
        elif found := _SASS.search(line):
            predicate, opcode, operands = found.groups()
            code.append(_nvidia(opcode, operands, bool(predicate)))
    return code, labels


def _nvidia(opcode: str, operands: str, predicated: bool) -> Instruction:
    kind = opcode.split(".")[0]
    if kind == "BRA":
        target = re.search(r"`\((\S+?)\)", operands)
        # A branch may have its predicate among the operands.
        conditional = predicated or bool(re.match(r"!?U?P\w", operands))
        return Instruction(opcode, target.group(1) if target else "", passes=conditional)
    if kind in ("EXIT", "RET", "BRX"):
        return Instruction(opcode, leaves=True, passes=predicated)
    named = frozenset(int(number) for number in re.findall(r"\bR(\d+)\b", operands))
    nbytes = _nvidia_width(opcode)
    if kind == "LDG":
        first = re.match(r"R(\d+)", operands)
        start = int(first.group(1)) if first else 0
        written = frozenset(range(start, start + max(nbytes // 4, 1)))
        return Instruction(opcode, loaded=nbytes, written=written, named=named | written)
    return Instruction(opcode, stored=nbytes if kind == "STG" else 0, named=named)


def _nvidia_width(opcode: str) -> int:
    for size, nbytes in (("256", 32), ("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if size in opcode.split("."):
            return nbytes
    return 4


def amd_code(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions and {label: place} of AMD assembly."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _AMD_LABEL.match(line):
            labels[label.group(1)] = len(code)
        elif found := _AMD.match(line):
            opcode, operands = found.groups()
            code.append(_amd(opcode, operands))
    return code, labels


def _amd(opcode: str, operands: str) -> Instruction:
    if opcode == "s_cbranch_execz":
        # Skips accesses that no thread makes.
        return Instruction(opcode)
    if opcode.startswith(("s_branch", "s_cbranch")):
        return Instruction(opcode, operands.strip(), passes=opcode.startswith("s_cbranch"))
    if opcode == "s_endpgm":
        return Instruction(opcode, leaves=True, passes=False)
    ranges = re.findall(r"\bv\[(\d+):(\d+)\]|\bv(\d+)\b", operands)
    registers = [range(int(a), int(b) + 1) if a else range(int(c), int(c) + 1) for a, b, c in ranges]
    named = frozenset(number for each in registers for number in each)
    memory = re.match(r"(global|buffer|flat)_(load|store)_[us]?(byte|short|dword)(x[234])?", opcode)
    if memory is None:
        return Instruction(opcode, named=named)
    nbytes = {"byte": 1, "short": 2, "dword": 4}[memory.group(3)] * int((memory.group(4) or "x1")[1:])
    if memory.group(2) == "store":
        return Instruction(opcode, stored=nbytes, named=named)
    return Instruction(opcode, loaded=nbytes, written=frozenset(registers[0] if registers else ()), named=named)


def _blocks(code: Sequence[Instruction], labels: Mapping[str, int]) -> dict[int, tuple[int, list[int]]]:
    """Return {first instruction: (end, first instructions of the blocks that may follow)} of each block."""
    starts = {0, *labels.values(), *(at + 1 for at, each in enumerate(code) if each.target or each.leaves)}
    ordered = sorted(start for start in starts if start < len(code))
    found = {}
    for start, end in zip(ordered, [*ordered[1:], len(code)], strict=True):
        last = code[end - 1]
        follow = [end] if last.passes and end < len(code) else []
        if last.target in labels and labels[last.target] < len(code):
            follow.append(labels[last.target])
        found[start] = end, follow
    return found


def _ordered(blocks: Mapping[int, tuple[int, list[int]]]) -> tuple[list[int], set[tuple[int, int]]]:
    """Return the blocks with each one behind all that may follow it, and the branches (from, to) that end a loop."""
    behind: list[int] = []
    back: set[tuple[int, int]] = set()
    state: dict[int, bool] = {}  # block -> True once all that may follow it are known
    stack = [(0, iter(blocks[0][1]))]
    state[0] = False
    while stack:
        start, follow = stack[-1]
        after = next(follow, None)
        if after is None:
            state[start] = True
            behind.append(start)
            stack.pop()
        elif after not in state:
            state[after] = False
            stack.append((after, iter(blocks[after][1])))
        elif not state[after]:
            back.add((start, after))
    return behind, back


def _body(blocks: Mapping[int, tuple[int, list[int]]], end: int, head: int) -> set[int]:
    """Return the blocks of the loop from ``head`` to ``end``."""
    before: dict[int, list[int]] = {start: [] for start in blocks}
    for start, (_, follow) in blocks.items():
        for after in follow:
            before[after].append(start)
    found, waiting = {head}, [end]
    while waiting:
        start = waiting.pop()
        if start not in found:
            found.add(start)
            waiting += before[start]
    return found


_NOTHING: tuple[tuple[int, ...], list[int]] = (0, 0, 0, 0, 0), []


def path_of(code: Sequence[Instruction], labels: Mapping[str, int]) -> Path:
    """Return the path through a kernel that a program with a complete and aligned tile takes.

    It is the path with the most 128-bit accesses. Among such paths it has the most loops, then the fewest accesses
    below 32 bits, then the fewest bytes, then the fewest instructions. The body of a loop is on it once.
    """
    blocks = _blocks(code, labels)
    behind, back = _ordered(blocks)
    best: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for start in behind:
        end, follow = blocks[start]
        sizes = [size for each in code[start:end] for size in (each.loaded, each.stored) if size]
        loops = sum((start, after) in back for after in follow)
        own = sum(size >= 16 for size in sizes), loops, -sum(size < 4 for size in sizes), -sum(sizes), start - end
        rests = [best[after] for after in follow if (start, after) not in back]
        # Threads that store nothing more leave early.
        rest = max([*rests, _NOTHING] if code[end - 1].leaves or not rests else rests)
        best[start] = tuple(a + b for a, b in zip(own, rest[0], strict=True)), [start, *rest[1]]
    chosen = best[0][1]
    looped = {each for end, head in back if end in chosen for each in _body(blocks, end, head)}
    most, number, repeated = 0, 0, 0
    waiting: list[Instruction] = []
    for start in chosen:
        for each in code[start : blocks[start][0]]:
            number += 1
            repeated += start in looped
            # Loads arrive in order, so the use of one waits for all before it, too.
            used = [place for place, load in enumerate(waiting) if load.written & each.named]
            waiting = waiting[used[-1] + 1 :] if used else waiting
            if each.loaded:
                waiting.append(each)
                most = max(most, sum(load.loaded for load in waiting))
    return Path(number, repeated, most)
