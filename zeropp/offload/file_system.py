"""Which file system a path is on."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["LOCAL", "file_system_of"]

LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs")
"""Those that one machine alone has, so that a lock of another machine can be none that still counts."""


def file_system_of(path: Path) -> str:
    """Its type as the kernel calls it, such as "ext4"; "unknown" where the kernel does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return "unknown"
    place, found, longest = os.path.realpath(os.fsencode(path)), b"unknown", -1
    for line in lines:
        # Optional fields, as many as there are, end at a dash; the type comes after it.
        fields, _, rest = line.partition(b" - ")
        # Spaces and the like are there as octal numbers.
        point = re.sub(rb"\\(\d{3})", lambda match: bytes([int(match[1], 8)]), fields.split(b" ")[4])
        # Of several mounts on one folder the last one is seen.
        if os.path.commonpath([point, place]) == point and len(point) >= longest:
            found, longest = rest.split(b" ")[0], len(point)
    return os.fsdecode(found)
