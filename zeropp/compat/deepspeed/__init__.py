"""A stand-in for the ``deepspeed`` package: unmodified scripts, Accelerate and transformers run on zeropp.

The folder ``stand_in`` holds a package ``deepspeed`` and what package managers would know of it. It is found when it is
on Python's path: :func:`install` puts it there for this process and those that it starts, and

    python -m zeropp.compat.deepspeed torchrun --nproc-per-node 8 train.py

for a whole command, which is the way for launchers (``accelerate launch``) and workers that begin by themselves (Ray).
It is never on the path by itself, and refuses to stand before DeepSpeed where that is installed.
"""

from __future__ import annotations

import os
import sys

from zeropp.compat.deepspeed.place import STAND_IN, require_alone

__all__ = ["environment", "install"]

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
