"""DeepSpeed's API on top of zeropp: its calls, engine, JSON optimizers, parameter attributes and checkpoint files.

This package imports the core of zeropp, and no module of the core imports this package. ``zeropp/__init__.py`` only
names its modules, so the core works without it. ``stand_in/`` holds the package that scripts import as ``deepspeed``.
Start with ``initialization.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Engine": "training_engine",
    "Lion": "json_optimizers",
    "RepeatingLoader": "data",
    "TiledLinear": "tiled",
    "environment": "stand_in_path",
    "init_distributed": "distributed",
    "initialize": "initialization",
    "install": "stand_in_path",
}


def __getattr__(name: str) -> Any:
    """Return a public name of this package and import the module that defines it only now.

    Most programs use few of these names, so importing all modules at once would only slow down their start.
    """
    if name not in _PLACES:
        raise AttributeError(f"module 'zeropp.deepspeed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"zeropp.deepspeed.{_PLACES[name]}"), name)
