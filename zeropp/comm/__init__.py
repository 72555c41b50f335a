"""Communication between ranks: process groups, hops over them, streams that they run on, and agreement between ranks.

Knows process groups, threads and clocks; not the meaning of the bytes, nor whose turn it is.
Start with `hops`, whose ledger counts bytes and times, then `streams`; `threads` ends threads with the program and
refuses forked children, `agreement` has the ways in which ranks agree and fail together, and `watch` finds out who
waits where.
"""
