"""A file system in memory, for tests of disks that are full, read-only or gone."""

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
    """One that is mounted at a new folder; the test is skipped, with the reason, where that cannot be done."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(place)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    try:
        yield place
    finally:
        # Lazily: a test that failed may have left a file open there.
        subprocess.run(["umount", "-l", str(place)], check=True)
