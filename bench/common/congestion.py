"""Choice of TCP's congestion control in a network namespace, among those that the kernel allows there.

    ip netns exec NODE python bench/common/congestion.py [NAME]

Some kernels do not allow cubic in a namespace. Results under different congestion controls cannot be compared, so
reports name the one in use.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["allowed", "choice", "in_force", "settle"]

_SETTINGS = Path("/proc/sys/net/ipv4")  # settings of the namespace of the process that reads or writes them
# cubic is the default of most machines. Both send until a packet is lost; bbr sometimes leaves a link idle to probe it.
_PREFERRED = ("cubic", "reno")


def choice(names: Sequence[str], default: str) -> str:
    """Return cubic if ``names`` has it, else reno, else ``default``."""
    return next((name for name in _PREFERRED if name in names), default)


def allowed() -> list[str]:
    """Return the names that the kernel allows in a namespace; an empty list if it does not report them."""
    try:
        return (_SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    except OSError:
        return []


def in_force() -> str:
    """Return the congestion control of new connections in this namespace; "unknown" if it cannot be read."""
    try:
        return (_SETTINGS / "tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


def settle(wanted: str | None = None) -> None:
    """Set the congestion control of this process's namespace.

    Args:
        wanted: name; None for the preferred one among the allowed, or the current one if the kernel refuses.

    Raises:
        RuntimeError: the kernel refuses ``wanted``.
    """
    name = wanted or choice(allowed(), in_force())
    if name != in_force():
        with contextlib.suppress(OSError):  # the result is read back below
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
