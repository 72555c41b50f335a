"""Patches of single functions by their source, for tests that break a check and must then see a difference."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any
from unittest import mock

__all__ = ["edit"]


def edit(owner: Any, name: str, old: str, new: str) -> Callable[[], Any]:
    """Return a function that makes a mock patch, which puts ``new`` in place of ``old`` in a function's source.

    Args:
        owner: module or class of the function.
        name: name of the function.
        old: piece of the source, which must be in it exactly once.
        new: replacement.
    """
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {source.count(old)} of {old!r}"
    made: dict[str, Any] = {}
    code = compile(source.replace(old, new), f"<{name} with a fault>", "exec", annotations.compiler_flag)
    exec(code, function.__globals__, made)
    return lambda: mock.patch.object(owner, name, made[name])
