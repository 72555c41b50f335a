"""How ranks talk: hops over process groups, the streams they run on, and what is counted, watched and agreed meanwhile.

Knows process groups, threads and clocks; not what the bytes mean, nor whose turn it is.
Start with `hops`; `agreement` is how ranks agree and how they fail together.
"""
