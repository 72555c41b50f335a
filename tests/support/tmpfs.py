"""A file system in memory, for tests with a disk that is full, read-only or removed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["tmpfs"]


@contextmanager
def tmpfs(place: Path, *options: str) -> Iterator[Path]:
    """Mount a tmpfs at the new folder ``place`` and yield the folder.

    The test is skipped, with the reason, if this process may not mount.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(place)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    try:
        yield place
    finally:
        # A lazy unmount succeeds even if a failed test has left a file open in the folder.
        subprocess.run(["umount", "-l", str(place)], check=True)
