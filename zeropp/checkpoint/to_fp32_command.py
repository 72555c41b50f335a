"""The script that runs ``zero_to_fp32`` from a folder of checkpoints, where DeepSpeed leaves one of its own."""

from __future__ import annotations

import logging
import os
from pathlib import Path

__all__ = ["SCRIPT", "make_executable", "write_script"]

_log = logging.getLogger("zeropp")

SCRIPT = "zero_to_fp32.py"
_TEXT = '''#!/usr/bin/env python3
"""Whole float32 weights from the checkpoints beside this file: python zero_to_fp32.py . WEIGHTS --safe_serialization"""

from zeropp.checkpoint.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


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
