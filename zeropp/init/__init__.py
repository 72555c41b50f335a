"""Models that never exist whole: parameters are partitioned as they are built, or get memory in pieces alone.

Knows how modules come to their parameters. `zeropp.params.sharded_build` knows their pieces, and a ZeroOptimizer takes
them over. Start with `context`.
"""
