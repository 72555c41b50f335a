"""Tracing of executed lines of bench/gpu, in this process and in subprocesses by a ``sitecustomize`` module."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["FOLDER", "executable", "make_wheel", "read_lines", "traced"]

FOLDER = "TRACED_LINES"  # environment variable with the folder to which processes write their lines
MARK = "/bench/gpu/"

# Source of sitecustomize.py, which Python runs at the start of every process that finds it.
_SITE = f"""
import atexit, os, sys
seen = set()
def line(frame, event, arg):
    seen.add((os.path.basename(frame.f_code.co_filename), frame.f_lineno))
    return line
def call(frame, event, arg):
    return line(frame, event, arg) if {MARK!r} in frame.f_code.co_filename else None
def write():
    sys.settrace(None)
    with open(os.path.join(os.environ[{FOLDER!r}], str(os.getpid())), "w") as file:
        file.writelines(f"{{name}} {{number}}\\n" for name, number in seen)
if {FOLDER!r} in os.environ and any("bench.gpu" in word for word in sys.orig_argv):
    atexit.register(write)
    sys.settrace(call)
"""


def make_wheel(folder: Path) -> Path:
    """Write a wheel that installs ``sitecustomize``, and return its path; bench/gpu.sh installs wheels of a folder."""
    path, info = folder / "traced-1.0-py3-none-any.whl", "traced-1.0.dist-info"
    files = {
        "sitecustomize.py": _SITE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: traced\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return path


def read_lines(folder: Path) -> set[tuple[str, int]]:
    """Return (file, line) of all lines that traced processes have written."""
    pairs = (line.split() for path in folder.iterdir() for line in path.read_text().splitlines())
    return {(name, int(number)) for name, number in pairs}


@contextlib.contextmanager
def traced() -> Iterator[set[tuple[str, int]]]:
    """Context that yields the set of (file, line) executed in this thread, filled while the context is active."""
    seen: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, arg: object) -> Any:
        seen.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, arg: object) -> Any:
        return line(frame, event, arg) if MARK in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield seen
    finally:
        sys.settrace(before)


def executable(path: Path) -> set[int]:
    """Return the lines of a file that have code."""
    found: set[int] = set()
    codes: list[CodeType] = [compile(path.read_text(), str(path), "exec")]
    while codes:
        code = codes.pop()
        found |= {number for _, _, number in code.co_lines() if number}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found
