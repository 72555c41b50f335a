"""Functions that put the stand-in for ``deepspeed`` on Python's path, so that unmodified scripts run on zeropp.

The folder ``stand_in`` holds a package ``deepspeed`` and the metadata that ``importlib.metadata`` reads. Python finds
the package only if the folder is on Python's path. There are two ways to put the folder there:

- :func:`install` changes the path of this process and of processes that this process starts.
- ``python -m zeropp.compat.deepspeed torchrun --nproc-per-node 8 train.py`` runs a whole command with the changed path.
  Launchers (``accelerate launch``) and workers that start by themselves (Ray) need this way.

Both refuse to hide an installed DeepSpeed.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["STAND_IN", "VERSION", "environment", "install", "require_not_installed", "require_not_shadowed"]

# Options that make Python run a module (-m), a text (-c) or standard input (-), also joined with other options or with
# their value: -um, -mpkg.
_JOINED = re.compile(r"-[bBdEhiOqRsSuvVx]*[cm].*|-")
# Folder for Python's path; it contains the package ``deepspeed``.
STAND_IN = str(Path(__file__).resolve().parent / "stand_in")
# DeepSpeed version whose calls the stand-in offers; libraries compare it. The metadata folder's name has it, too.
VERSION = "0.19.8"
# Libraries that look for ``deepspeed`` only once, when they are imported.
_TOO_LATE = ("accelerate", "transformers", "trl")


def install() -> None:
    """Let ``import deepspeed`` find the stand-in, in this process and in processes that it starts.

    A second call does nothing.

    Raises:
        RuntimeError: DeepSpeed is installed or imported, or an imported library has already looked for DeepSpeed.
    """
    if STAND_IN in sys.path:
        return
    require_not_installed()
    found = [name for name in _TOO_LATE if name in sys.modules]
    if found:
        raise RuntimeError(
            f"{' and '.join(found)} had been imported before zeropp.compat.deepspeed.install(), and looked for "
            "deepspeed then; call install() before the first import of them, or start the script by "
            "`python -m zeropp.compat.deepspeed python SCRIPT`"
        )
    # First on the path, so that no other ``deepspeed`` comes before it, such as a folder in the working directory.
    sys.path.insert(0, STAND_IN)
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]


def environment() -> dict[str, str]:
    """Return environment variables for a new process: those of this process, with the stand-in on ``PYTHONPATH``."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != STAND_IN]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([STAND_IN, *paths])}


def require_not_installed() -> None:
    """Raise if the stand-in would hide the real DeepSpeed.

    Raises:
        RuntimeError: DeepSpeed is installed or imported.
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
        # With both packages on the path, a script could import some modules from one and some from the other.
        raise RuntimeError(
            f"DeepSpeed is installed ({', '.join(others)}), and zeropp's stand-in would hide it; use an environment "
            "without it (pip uninstall deepspeed), or zeropp.initialize in your script"
        )


def require_not_shadowed(command: Sequence[str]) -> None:
    """Raise if the Python of a command would find another ``deepspeed`` before the stand-in on ``PYTHONPATH``.

    Args:
        command: the command and its arguments.

    Raises:
        RuntimeError: a ``deepspeed`` module lies in the script's folder, or in the working directory of a command that
            Python searches first.
    """
    # The first .py file is the script: Python searches its folder before PYTHONPATH. Later ones are its arguments.
    script = next((each for each in command if each.endswith(".py")), None)
    before = list(command if script is None else command[: command.index(script)])
    # resolve(), because Python searches the folder of the real file if the script is a symbolic link.
    folders = [] if script is None else [Path(script).resolve().parent]
    # With -m, -c or standard input Python searches the working directory first. The module may be a launcher that gets
    # the script as an argument.
    by_name = not {"-c", "-m", "--module"}.isdisjoint(before) or any(map(_JOINED.fullmatch, _options(before)))
    folders += [Path()] if by_name else []
    for found in (folder / name for folder in folders for name in ("deepspeed.py", "deepspeed/__init__.py")):
        # A script named deepspeed.py after ``-m module`` is most likely an argument of the module, so it is allowed.
        named = by_name and script is not None and found.resolve() == Path(script).resolve()
        if found.exists() and not named:
            raise RuntimeError(
                f"{found.resolve()} would be imported in place of zeropp's stand-in, since Python looks there first; "
                "rename it, or start from elsewhere"
            )


def _options(command: Sequence[str]) -> list[str]:
    """Return Python's own options in a command: the words after ``python`` that start with "-", up to the first other.

    Options before ``python`` belong to a launcher.
    """
    behind = itertools.dropwhile(lambda each: not Path(each).name.startswith("python"), command)
    return list(itertools.takewhile(lambda each: each.startswith("-"), itertools.islice(behind, 1, None)))
