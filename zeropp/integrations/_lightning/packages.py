"""``Packages``: the two halves of Lightning, under whichever names they are installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["Packages"]


@dataclass(frozen=True)
class Packages:
    """Lightning as modules; their contents are looked up when they are needed, and are nobody's types.

    Attributes:
        pytorch: what has the Trainer.
        fabric: what has Fabric.
    """

    pytorch: Any
    fabric: Any

    @classmethod
    def named(cls, pytorch: str, fabric: str) -> Packages:
        """Import them.

        Raises:
            ImportError: one is not installed.
        """
        # Both: a Trainer's strategies raise Fabric's errors.
        return cls(importlib.import_module(pytorch), importlib.import_module(fabric))

    def find(self, half: str, name: str) -> Any:
        """What a name below ``"pytorch"`` or ``"fabric"`` stands for, as in ``utilities.exceptions.Some``."""
        place, _, last = name.rpartition(".")
        # By import, since not every module below is an attribute of the one above.
        return getattr(importlib.import_module(f"{getattr(self, half).__name__}.{place}"), last)

    def misuse(self, message: str) -> Exception:
        """Lightning's own error for settings that do not go together."""
        error: Exception = self.find("fabric", "utilities.exceptions.MisconfigurationException")(message)
        return error
