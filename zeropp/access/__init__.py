"""Ways to a wrapped model besides its own forward and backward: state dicts, lending, averages, and what is refused.

Knows the engine from outside, between passes; steps nothing. `accumulate` runs passes of its own, stage by stage.
Start with `state`.
"""
