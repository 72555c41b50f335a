"""A simulation of zeropp's order of collectives, with several ranks in one process.

The simulation has no tensors, process groups or clocks.

Each rank runs zeropp's own Schedule, KnownOrders, Reductions, LiveUnits, prefetch plan and BackwardUses (``rank``). A
simulated world replaces everything between ranks (``world``). ``programs`` describes the work of ranks, ``families``
enumerates programs, ``trial`` runs a program and checks the results, and ``refusals`` decides whether a deadlock is
allowed. ``faults`` are one-line changes that the tests must detect.

Simulated: forwards and backwards that vary, evaluation, several micro-batches, ``no_sync``, late gradients, modules run
again inside a backward, persistent units, freezing, and errors. Not simulated, because they need tensors or threads:
refreshes, except the order in which they are issued; overlap on comm streams; parameters used outside of their modules
(except in ``branching``); new buffers for parameters that were frozen at wrapping; and the limit on bytes of gradients
in flight.

``engines`` runs whole engines with models in the same world, and records the collectives that each rank gives each
process group.
"""
