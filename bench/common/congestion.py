"""TCP's congestion control in a network namespace: chosen from what the kernel allows there.

    ip netns exec NODE python bench/common/congestion.py [NAME]

Not every kernel lets a namespace have cubic, and figures taken under different ones are not alike, so reports name it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["allowed", "choice", "in_force", "settle"]

_SETTINGS = Path("/proc/sys/net/ipv4")  # those of the namespace of the process that reads and writes them
# The first is what most machines have. Both send until something is lost; bbr leaves a link idle at times to probe it.
_PREFERRED = ("cubic", "reno")


def choice(names: Sequence[str], default: str) -> str:
    """cubic, else reno, if it is among the names that the kernel allows; else the default."""
    return next((name for name in _PREFERRED if name in names), default)


def allowed() -> list[str]:
    """The names that the kernel allows in a namespace; none where it does not say."""
    try:
        return (_SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    except OSError:
        return []


def in_force() -> str:
    """What new connections of this process's namespace use; "unknown" where the kernel does not say."""
    try:
        return (_SETTINGS / "tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


def settle(wanted: str | None = None) -> None:
    """Have this process's namespace use ``wanted``; without one, what is chosen, or what it has if that is refused.

    Raises:
        RuntimeError: ``wanted`` is refused.
    """
    name = wanted or choice(allowed(), in_force())
    if name != in_force():
        with contextlib.suppress(OSError):  # what came of it is read back
            (_SETTINGS / "tcp_congestion_control").write_text(name)
    if wanted is not None and in_force() != wanted:
        names = ", ".join(allowed()) or "none by name"
        raise RuntimeError(f"TCP's congestion control stays {in_force()} instead of {wanted}; allowed: {names}")


def main() -> None:
    try:
        settle(*sys.argv[1:])
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
