"""Ways to a wrapped model's values besides forward and backward: state dicts, lending, averages, and what is refused.

Knows the engine from outside, between passes; trains nothing.
Start with `state`.
"""
