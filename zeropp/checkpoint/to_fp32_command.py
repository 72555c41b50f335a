"""``zero_to_fp32`` as a command, by DeepSpeed's arguments; and the script that runs it from a folder of checkpoints."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from zeropp.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

__all__ = ["SCRIPT", "main", "make_executable", "write_script"]

_log = logging.getLogger("zeropp")

SCRIPT = "zero_to_fp32.py"
_TEXT = '''#!/usr/bin/env python3
"""Whole float32 weights from the checkpoints beside this file: python zero_to_fp32.py . WEIGHTS --safe_serialization"""

from zeropp.checkpoint.to_fp32_command import main

if __name__ == "__main__":
    main()
'''


def main(argv: list[str] | None = None) -> None:
    """Convert."""
    parser = argparse.ArgumentParser(
        prog=SCRIPT, description="Whole float32 weights from a checkpoint, zeropp's or DeepSpeed's, without processes."
    )
    parser.add_argument("checkpoint_dir", help="the folder that has latest")
    parser.add_argument("output_dir", help="where the weights go")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file; default: 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of torch's files")
    parser.add_argument("-t", "--tag", help="of the checkpoint; default: the one that latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="trained ones alone")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; without effect")
    args = parser.parse_args(argv)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir, args.output_dir, max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization, tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )  # fmt: skip


def write_script(folder: Path) -> None:
    """Leave the script in a folder of checkpoints, where guides to DeepSpeed tell people to look for it."""
    path = folder / SCRIPT
    path.write_text(_TEXT)
    make_executable(path)


def make_executable(path: str | os.PathLike[str]) -> None:
    """Let the script be run by its name; a file system without permissions, or without the file, is only logged."""
    try:
        os.chmod(path, os.stat(path).st_mode | 0o100)
    except OSError as error:
        _log.info("%s was not made executable (%s); run it by python", path, error)
