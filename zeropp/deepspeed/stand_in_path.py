"""The path of the stand-in for the ``deepspeed`` package, with which unmodified scripts run on zeropp.

The folder ``stand_in`` holds a package ``deepspeed``, and the metadata by which package managers know it. It is found
when it is on Python's path: :func:`install` puts it there for this process and those that it starts, and

    python -m zeropp.compat.deepspeed torchrun --nproc-per-node 8 train.py

for a whole command, which is the way for launchers (``accelerate launch``) and workers that begin by themselves (Ray).
It is never on the path by itself, and refuses to stand before DeepSpeed where that is installed.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["STAND_IN", "VERSION", "environment", "install", "require_alone", "require_first"]

# Python's options for a module, a text or its standard input, joined to others or to what they name: -um, -mpkg, -.
_JOINED = re.compile(r"-[bBdEhiOqRsSuvVx]*[cm].*|-")
# A folder that is no package: what is on the path has to hold the package, and may not be it.
STAND_IN = str(Path(__file__).resolve().parent / "stand_in")
# Whose calls these are, as libraries ask for; the folder with its metadata has the same one in its name.
VERSION = "0.19.8"
# What looks for the package once, as it is imported, and remembers the answer.
_TOO_LATE = ("accelerate", "transformers", "trl")


def install() -> None:
    """Let ``import deepspeed`` find the stand-in, here and in processes that this one starts; called again, do nothing.

    Raises:
        RuntimeError: DeepSpeed is installed, or imported; or so is a library that looks for it only as it is imported.
    """
    if STAND_IN in sys.path:
        return
    require_alone()
    found = [name for name in _TOO_LATE if name in sys.modules]
    if found:
        raise RuntimeError(
            f"{' and '.join(found)} had been imported before zeropp.compat.deepspeed.install(), and looked for "
            "deepspeed then; call install() before the first import of them, or start the script by "
            "`python -m zeropp.compat.deepspeed python SCRIPT`"
        )
    # First: nothing else of that name may come before it, not even a folder in the working directory.
    sys.path.insert(0, STAND_IN)
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]


def environment() -> dict[str, str]:
    """A copy of this process's environment variables, with the stand-in on ``PYTHONPATH``: for one to be started."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STAND_IN]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([STAND_IN, *paths])}


def require_alone() -> None:
    """Refuse to stand where DeepSpeed itself is.

    Raises:
        RuntimeError: it is installed, or imported.
    """
    others = [
        each.version
        for each in importlib.metadata.distributions(name="deepspeed")
        if Path(str(each.locate_file(""))).resolve() != Path(STAND_IN)
    ]
    loaded = getattr(sys.modules.get("deepspeed"), "__file__", None)
    if loaded is not None and not Path(loaded).resolve().is_relative_to(STAND_IN):
        others.append(f"at {loaded}")
    if others:
        # Half of a script would get one of them, and half the other.
        raise RuntimeError(
            f"DeepSpeed is installed ({', '.join(others)}), and zeropp's stand-in would hide it; use an environment "
            "without it (pip uninstall deepspeed), or zeropp.initialize in your script"
        )


def require_first(command: Sequence[str]) -> None:
    """Refuse a command whose Python would find another ``deepspeed`` before what is on ``PYTHONPATH``.

    Raises:
        RuntimeError: one lies beside a script of the command; or in the working directory, where that comes first.
    """
    # The first is the script, whose folder Python looks in; others are arguments, such as a configuration in Python.
    script = next((each for each in command if each.endswith(".py")), None)
    before = list(command if script is None else command[: command.index(script)])
    # The real one, where the script is a link to a file elsewhere.
    folders = [] if script is None else [Path(script).resolve().parent]
    # A module or a text is looked for in the working directory; it may be a launcher, whose argument the script is.
    by_name = not {"-c", "-m", "--module"}.isdisjoint(before) or any(map(_JOINED.fullmatch, _options(before)))
    folders += [Path()] if by_name else []
    for found in (folder / name for folder in folders for name in ("deepspeed.py", "deepspeed/__init__.py")):
        # Behind a module it is an argument, most likely: a script of that name would find itself.
        named = by_name and script is not None and found.resolve() == Path(script).resolve()
        if found.exists() and not named:
            raise RuntimeError(
                f"{found.resolve()} would be imported in place of zeropp's stand-in, since Python looks there first; "
                "rename it, or start from elsewhere"
            )


def _options(command: Sequence[str]) -> list[str]:
    """The options after Python in a command, up to the first other word: launchers have options of their own."""
    behind = itertools.dropwhile(lambda each: not Path(each).name.startswith("python"), command)
    return list(itertools.takewhile(lambda each: each.startswith("-"), itertools.islice(behind, 1, None)))
