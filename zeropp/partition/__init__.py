"""Levels, slices, flat layouts and units: the arithmetic of which rank owns which elements.

The input is a model's shapes and the numbers of ranks and nodes. No module here uses a process group or the values of a
tensor. Start with `levels` (the number of ranks that share each copy, and the layout of flat buffers), then `units`
(the cut of a model into units).
"""
