"""Command-line flags for the model and its data, shared by the launcher of a comparison and its ranks."""

from __future__ import annotations

import argparse

__all__ = ["add_model_flags", "given_flags"]

_DEFAULTS = {"layers": 6, "d-model": 384, "heads": 6, "vocab": 256, "seq-len": 128, "batch": 4, "seed": 0}
_HELP = {"batch": "windows per rank", "vocab": "rows of the embedding; the text is bytes and uses 256 of them"}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for the sizes of the model and of its batches."""
    for name, default in _DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=_HELP.get(name))


def given_flags(args: argparse.Namespace) -> dict[str, int]:
    """Return the values of the flags by name, for the command line of the ranks."""
    return {name: getattr(args, name.replace("-", "_")) for name in _DEFAULTS}
