"""Interface for extensions of the core, which add attributes to parameters and read further checkpoint formats.

The core does not import extensions. `zeropp/__init__.py` lists their modules in :data:`MODULES`. They are imported when
a model is built or wrapped, or when a checkpoint of unknown format is read.
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
"""Dotted names of the extensions' modules. Each module has an ``EXTENSION``, an instance of :class:`Extension`."""


class Extension:
    """Base class of extensions. Its methods do nothing.

    Attributes:
        released: attributes by name, for the class that parameters have while their unit is resharded.
        checkpoint_formats: descriptions of the formats that :meth:`read_checkpoint` reads, for error messages.
    """

    released: Mapping[str, object] = {}
    checkpoint_formats: tuple[str, ...] = ()

    def model_wrapped(self, model: nn.Module, engine: Any) -> None:
        """Handle the wrapping of a model. Called when ``engine``, a `zeropp.engine.engine.Engine`, manages it."""

    def piece_changed(self, parameter: nn.Parameter, piece: Any) -> None:
        """Handle a change of a parameter that ``zero.Init`` builds.

        Called when a parameter gets its ``piece``, a `zeropp.params.sharded_build.Piece`, and when its whole values are
        gathered or freed.
        """

    def parameter_freed(self, parameter: nn.Parameter) -> None:
        """Handle the release of a parameter. Called when neither an engine nor a `Piece` manages the parameter."""

    def read_checkpoint(self, path: Path, group_keys: frozenset[str] | None) -> tuple[Path, Any, Any] | None:
        """Read the metadata of a checkpoint in a format of this extension.

        Args:
            path: file or folder of the checkpoint.
            group_keys: keys of the optimizer's parameter groups; None to leave out optimizer states.

        Returns:
            The folder, files and tensors for `zeropp.checkpoint.foreign.metadata_of`; None for other formats.
        """
        return None


@functools.cache
def extensions() -> tuple[Extension, ...]:
    """Return all extensions. Their modules are imported at the first call."""
    return tuple(importlib.import_module(name).EXTENSION for name in MODULES)
