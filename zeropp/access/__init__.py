"""Access to a wrapped model outside of its own forward and backward.

This package implements state dicts, GatheredParameters, weight averages, changes of ``requires_grad``, wrapping a model
again, and errors for unsupported changes of a wrapped model. It calls the engine between passes and never runs the
optimizer. Only `accumulate` runs passes itself.
Start with `state`.
"""
