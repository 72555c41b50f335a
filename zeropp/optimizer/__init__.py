"""The wrapper that users hold: a torch optimizer on this rank's slices.

Knows the engine, torch's optimizers, and which hops and codecs paths have; not what those do.
Start with `wrapper`, then `sharded_params`; `step_sync` is the one sum by which ranks agree on a step.
"""
