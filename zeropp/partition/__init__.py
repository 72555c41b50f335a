"""Shares: levels, pieces, flat layouts and units, that is, who has what. Pure arithmetic.

Knows a model's shapes, and numbers of ranks and nodes; no process, no tensor's values.
Start with `levels` (over how many ranks each part is spread), then `layout` (flat buffers) and `units` (the cut of a
model).
"""
