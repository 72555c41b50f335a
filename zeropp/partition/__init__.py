"""Shares: levels, pieces, flat layouts and units, that is, who has what. Pure arithmetic.

Knows a model's shapes, and numbers of ranks and nodes; no process, no tensor's values.
Start with `levels` (the number of ranks that each part is sharded over, and the layout of flat buffers), then `units`
(the cut of a model).
"""
