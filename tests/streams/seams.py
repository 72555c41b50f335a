"""The places where zeropp makes one timeline wait for another, and a context that removes such waits.

A seam is a call that waits, a call that records an event, or a call of ``used_here``; or the keyword ``after`` of a
call; or the method ``record`` or ``synchronize``, passed on as a callback. If a call is removed, its object and
positional arguments are still computed, and the result is True. A removed ``after`` becomes None. A removed callback
does nothing.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Seam", "seams", "without"]

_ROOT = Path(__file__).resolve().parents[2]
_WAITS = {
    "after=",
    "record",
    "record_stream",
    "synchronize",
    "used_here",
    "wait",
    "wait_for_all",
    "wait_event",
    "wait_for_unshard",
    "wait_for_refresh",
    "wait_for_step",
    "wait_stream",
    "wait_for_copies",
    "wait_for_event",
    "wait_for_reductions",
    "wait_for_result",
    "wait_for_save",
}


@dataclass(frozen=True)
class Seam:
    """A call, keyword argument or callback in zeropp that orders timelines, and that tests can remove.

    Attributes:
        module: path of the file in the repository.
        function: qualified name of the outermost function around the seam.
        number: number of the seam among the seams of that function, from 1.
        text: source of the seam.
        line: line in which the seam begins.
    """

    module: str
    function: str
    number: int
    text: str
    line: int

    @property
    def name(self) -> str:
        """A name that does not change when lines are added elsewhere."""
        return f"{self.module.removeprefix('zeropp/')} {self.function} {self.number}"


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    # The keyword ``after`` of a call makes work wait; ``record`` and ``synchronize`` may also be passed on as
    # callbacks.
    if isinstance(node, ast.keyword) and node.arg == "after":
        return "after="
    return node.attr if isinstance(node, ast.Attribute) and node.attr in ("record", "synchronize") else ""


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield outermost functions and methods with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _calls(function: ast.FunctionDef) -> list[ast.AST]:
    inner = {node.func for node in ast.walk(function) if isinstance(node, ast.Call)}
    found = [node for node in ast.walk(function) if _called(node) in _WAITS and node not in inner]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]


def seams(*folders: str) -> list[Seam]:
    """Return all seams in the files that match patterns relative to the folder zeropp, such as "order/*.py"."""
    found = []
    for path in sorted(path for folder in folders for path in _ROOT.glob(f"zeropp/{folder}")):
        module = str(path.relative_to(_ROOT))
        for name, function in _functions(ast.parse(path.read_text())):
            for number, node in enumerate(_calls(function), 1):
                line: int = node.lineno  # type: ignore[attr-defined]
                found.append(Seam(module, name, number, ast.unparse(node), line))
    return found


class _Without(ast.NodeTransformer):
    def __init__(self, calls: Sequence[ast.AST]) -> None:
        self._calls = calls

    def visit(self, node: ast.AST) -> ast.AST:
        if not any(node is call for call in self._calls):
            return self.generic_visit(node)
        if isinstance(node, ast.keyword):
            return ast.keyword("after", ast.Constant(None))
        if not isinstance(node, ast.Call):
            return ast.parse("lambda *given: None", mode="eval").body
        given = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args]
        # The replaced expression has the value True, because a wait returns True when it has ended.
        kept = ast.Tuple([*given, ast.Constant(True)], ast.Load())
        return ast.Subscript(kept, ast.UnaryOp(ast.USub(), ast.Constant(1)), ast.Load())


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _plain(seam: Seam, lines: range) -> types.FunctionType:
    """Return the function that contains a seam, without its decorators."""
    owner: object = importlib.import_module(seam.module.removesuffix(".py").replace("/", "."))
    *outer, name = seam.function.split(".")
    for part in outer:
        owner = getattr(owner, part)
    found = vars(owner)[name]
    parts = [found.fget, found.fset] if isinstance(found, property) else [getattr(found, "__func__", found)]
    plain = [inspect.unwrap(part) for part in parts if part is not None]
    return next(each for each in plain if each.__code__.co_firstlineno in lines)


@contextlib.contextmanager
def without(*gone: Seam) -> Iterator[None]:
    """Remove some seams from zeropp in the block. Engines may be created before the block or inside."""
    before: list[tuple[types.FunctionType, types.CodeType]] = []
    for module in dict.fromkeys(seam.module for seam in gone):
        path, own = _ROOT / module, [seam for seam in gone if seam.module == module]
        tree = ast.parse(path.read_text())
        functions = [function for _, function in _functions(tree)]
        there = [next(f for f in functions if f.lineno <= seam.line <= (f.end_lineno or 0)) for seam in own]
        calls = [_calls(function)[seam.number - 1] for seam, function in zip(own, there, strict=True)]
        changed = compile(ast.fix_missing_locations(_Without(calls).visit(tree)), str(path), "exec")
        for seam, function in zip(own, there, strict=True):
            # The code object of a decorated function begins at its first decorator.
            first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
            plain = _plain(seam, range(first, function.lineno + 1))
            before.append((plain, plain.__code__))
            name = function.name
            plain.__code__ = next(
                code for code in _codes(changed)
                if code.co_name == name and code.co_firstlineno in range(first, function.lineno + 1)
            )  # fmt: skip
    try:
        yield
    finally:
        for plain, code in reversed(before):
            plain.__code__ = code
