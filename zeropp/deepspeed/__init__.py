"""Everything that exists because of DeepSpeed's API: its calls, engine, JSON optimizers, attributes and file formats.

Imports the core, which does not know of it. ``stand_in/`` is the package that scripts import as ``deepspeed``.
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
    """A public name, whose module is imported at its first use: most programs need few of them."""
    if name not in _PLACES:
        raise AttributeError(f"module 'zeropp.deepspeed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"zeropp.deepspeed.{_PLACES[name]}"), name)
