"""Which gathers and reductions are issued, and in which order: the same on every rank.

Knows units by number and state, and what ranks have told each other; no module, no autograd, no codec.
Start with `schedule`; `prefetch` is the pure plan of what to fetch ahead, `reductions` the gradients' part.
"""
