"""``Packages``: the Trainer's and Fabric's modules of Lightning, under the names of the installed package."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["Packages"]


@dataclass(frozen=True)
class Packages:
    """Two modules of Lightning. Names inside them are looked up at run time, so they have no static types.

    Attributes:
        pytorch: module with the Trainer, ``lightning.pytorch`` or ``pytorch_lightning``.
        fabric: module with Fabric, ``lightning.fabric`` or ``lightning_fabric``.
    """

    pytorch: Any
    fabric: Any

    @classmethod
    def named(cls, pytorch: str, fabric: str) -> Packages:
        """Import both modules by their names.

        Raises:
            ImportError: one of the modules is not installed.
        """
        # Both are always needed: a Trainer's strategy raises errors that Fabric's module defines.
        return cls(importlib.import_module(pytorch), importlib.import_module(fabric))

    def find(self, half: str, name: str) -> Any:
        """Return the object of a dotted name below a module, as in ``find("fabric", "utilities.exceptions.Some")``."""
        place, _, last = name.rpartition(".")
        # Import the submodule, because not every submodule is an attribute of its parent.
        return getattr(importlib.import_module(f"{getattr(self, half).__name__}.{place}"), last)

    def misuse(self, message: str) -> Exception:
        """Return Lightning's ``MisconfigurationException`` with a message, for settings that contradict each other."""
        error: Exception = self.find("fabric", "utilities.exceptions.MisconfigurationException")(message)
        return error
