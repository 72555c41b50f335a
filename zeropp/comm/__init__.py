"""Communication between ranks: process groups, collectives, the streams that run them, and agreement between ranks.

This package works with process groups, threads and clocks. It does not interpret the bytes that it moves and does not
decide the order of collectives. Start with `hops` (one collective in one process group, and a ledger of bytes and
seconds), then read `streams` (CUDA streams and threads that run collectives). `threads` ends worker threads when the
program ends and refuses to use them in a forked child. `agreement` has the small exchanges of integers between ranks
and makes all ranks raise the same error. `watch` finds out which rank waits at which place.
"""
