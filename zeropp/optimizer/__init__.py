"""The wrapper that users hold: a torch optimizer on this rank's slices.

Knows the engine and torch's optimizers; not how values travel.
Start with `wrapper`, then `slices`.
"""
