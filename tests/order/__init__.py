"""zeropp's order of collectives, simulated: several ranks in one process, without tensors, groups and clocks.

Each rank runs zeropp's own schedule, known orders, reductions, live units, prefetch plan and uses of backward
(``rank``), in a world that takes the place of everything between ranks (``world``). ``programs`` says what ranks do,
``families`` lists programs, ``trial`` runs one and checks what must hold, ``refusals`` tells when ranks may be refused.
``faults`` are changes of one line that the tests must find.

Here are forwards and backwards that vary, evaluation, several micro-batches, ``no_sync``, late gradients, modules run
again inside a backward, persistent units, freezing, and errors. Left out is what needs tensors or threads: refreshes,
but for the order that they are issued in; comm streams, on which work overlaps; parameters touched outside of their
modules; new buffers for parameters that were frozen when the model was wrapped, after which all backwards are
forgotten; and how many bytes of gradients may be under way.

``engines`` has the same world for whole engines with models, and notes what each rank gives each process group.
"""
