"""Construction of models that do not fit one rank: parameters are sharded while the modules are built.

This package hooks into the construction of modules. `zeropp.params.sharded_build` stores the shards, and a
ZeroOptimizer takes them over.
Start with `context`.
"""
