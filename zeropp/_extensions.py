"""Packages that add to the core from outside: attributes of parameters, and checkpoint formats.

The core imports none of them. `zeropp/__init__.py` names their modules in :data:`MODULES`. They are imported when a
model is built or wrapped, or when a checkpoint of unknown format is read.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["MODULES", "Extension", "extensions"]

MODULES: list[str] = []
"""Dotted names of modules that have an ``EXTENSION``."""


class Extension:
    """Base class of extensions; each method of it does nothing.

    Attributes:
        released: class attributes of parameters whose values are released.
        checkpoint_formats: descriptions of the formats that :meth:`read_checkpoint` reads, for errors.
    """

    released: Mapping[str, object] = {}
    checkpoint_formats: tuple[str, ...] = ()

    def model_wrapped(self, model: nn.Module, engine: Any) -> None:
        """Called when ``engine``, a `zeropp.engine.engine.Engine`, has taken a model over."""

    def piece_changed(self, parameter: nn.Parameter, piece: Any) -> None:
        """Called when the `zeropp.params.sharded_build.Piece` of a parameter begins, or its values come or go."""

    def parameter_freed(self, parameter: nn.Parameter) -> None:
        """Called when a parameter is a plain one again, or no piece any more."""

    def read_checkpoint(self, path: Path, group_keys: frozenset[str] | None) -> tuple[Path, Any, Any] | None:
        """Read the metadata of a checkpoint in a format of this extension.

        Args:
            path: a file or a folder.
            group_keys: keys of the optimizer's parameter groups; None if its states are not wanted.

        Returns:
            The folder, files and tensors for `zeropp.checkpoint.foreign.metadata_of`; None for other formats.
        """
        return None


@functools.cache
def extensions() -> tuple[Extension, ...]:
    """The extensions of this process, which are imported at the first call."""
    return tuple(importlib.import_module(name).EXTENSION for name in MODULES)
