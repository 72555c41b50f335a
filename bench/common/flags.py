"""The model and the data that systems are compared on, as flags of a launcher and of the ranks it starts."""

from __future__ import annotations

import argparse

__all__ = ["add_model_flags", "given_flags"]

_DEFAULTS = {"layers": 6, "d-model": 384, "heads": 6, "seq-len": 128, "batch": 4, "seed": 0}
_HELP = {"batch": "windows a rank"}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command line say how large the model and its batches are."""
    for name, default in _DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=_HELP.get(name))


def given_flags(args: argparse.Namespace) -> dict[str, int]:
    """The same, to be passed on."""
    return {name: getattr(args, name.replace("-", "_")) for name in _DEFAULTS}
