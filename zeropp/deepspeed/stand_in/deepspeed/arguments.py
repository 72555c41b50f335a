"""``add_config_arguments``: DeepSpeed's arguments for a script's command line."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, a flag for the script itself, and ``--deepspeed_config``, which `initialize` reads."""
    group = parser.add_argument_group("DeepSpeed", "configurations of DeepSpeed")
    group.add_argument("--deepspeed", default=False, action="store_true", help="a flag for the script; not read here")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the JSON's path")
    return parser
