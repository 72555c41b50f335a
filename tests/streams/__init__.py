"""CUDA's streams and memory, simulated on a CPU: every access of every stream to memory is ordered by waits.

zeropp runs as it does on a card, on one rank of torch's fake group (``card``), through trainings in each placement,
codec and kind of offload, and under FSDP2 (``runs``). Vector clocks tell of any two accesses to the same bytes whether
one ends before the other begins (``clocks``); so they find a missing wait however the timing was. ``seams`` takes waits
out of zeropp.

The rules are: an operation begins after all that its stream was given before, and after all that the launching thread
has done or waited for. Streams wait for streams and events, threads of the host for events, for numbers that they read,
and for copies that are not ``non_blocking`` or not from pinned memory; queues and events of threads hand on what a
thread has waited for. A write comes after all earlier accesses to its bytes, a read after all earlier writes. Memory
that is freed goes back to the stream it was allocated on, at once, and from there to whatever comes next; the streams
that ``record_stream`` has named are waited for.

Left out: other ranks, since collectives give every rank what this one has; autograd's own threads, for all of which
the caller waits; and what CUDA's driver and torch's allocator add, as a wait of the host in ``cudaMalloc``. Files are
read and written by timelines of their own, and a mapping of a file that is read as memory is not followed. A kernel
reads and writes what its schema declares, all bytes between a tensor's first and last.
"""
