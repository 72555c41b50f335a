"""A simulator of CUDA streams and memory on the CPU, which checks that waits order every access to memory.

zeropp runs on one rank of torch's fake process group as on a GPU (``card``). The trainings cover each placement, codec
and kind of offload, and FSDP2 (``runs``). Vector clocks determine if two accesses to the same bytes are ordered by
waits (``clocks``). So a missing wait is detected independently of timing. ``seams`` removes single waits from zeropp,
and tests check that a race is then reported.

Rules: An operation begins after all operations that its stream received before, and after everything that the launching
thread has done or waited for. Streams wait for streams and events. Host threads wait for events, for numbers that they
read from the device, and for copies that are not ``non_blocking`` or do not use pinned memory. Thread queues and thread
events pass the clock of the sending thread to the receiving thread. A write comes after all earlier accesses to its
bytes, and a read after all earlier writes. Freed memory returns at once to the stream it was allocated on, and the next
allocation there may reuse it. Before reuse, the allocator waits for the streams named with ``record_stream``.

Not simulated: Other ranks; collectives give every rank the values of this rank. Autograd's threads, because the caller
waits for all of them. Waits that CUDA's driver or torch's allocator add, such as in ``cudaMalloc``. Each read or write
of a file has its own timeline, and accesses to a memory-mapped file are not tracked. A kernel accesses the arguments
that its schema declares, each from its first byte to its last.
"""
