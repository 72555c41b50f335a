"""Which gathers and reductions are issued, and in which order: the same on every rank.

Knows units by number and state, and what ranks have told each other; no module, no autograd, no process group.
Start with `schedule`, which decides; `known_orders` remembers, `prefetch` plans what to fetch ahead, `reductions` is
the gradients' part, `refresh` renews what is cached, `live_units` has what stays gathered and is not in use.
"""
