"""What several suites share: systems that take turns, namespaces, congestion control, flags."""

from __future__ import annotations

__all__ = ["COMPARED"]

COMPARED = 4
"""First steps, whose losses and norms systems are held to each other by."""
