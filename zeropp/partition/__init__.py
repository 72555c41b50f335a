"""Who has what: levels, pieces, flat layouts, units. Pure arithmetic.

Knows a model's shapes, and numbers of ranks and nodes; no process, no tensor's values.
Start with `topology` (pieces and levels), then `levels` (a configuration as levels) and `units` (the cut of a model).
"""
