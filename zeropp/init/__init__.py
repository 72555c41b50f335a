"""Models that never exist whole: parameters are partitioned as they are built, or get memory in pieces alone.

Knows how modules come to their parameters; what pieces are is known by `zeropp.params.sharded_build`, and a ZeroOptimizer
takes them over.
Start with `context`.
"""
