"""Encoding and transport of weights and gradients: codecs, the codec of each hop, and paths of hops.

This package handles flat tensors and hops. It does not depend on parameters, modules or the order of collectives.
Start with `codecs`, then `paths`; `encoding` chooses the codec of each hop, and `differences` sends weight differences.
"""
