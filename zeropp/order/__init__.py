"""The order of gathers and reductions: which are issued, and when; the same on every rank.

Knows units by number and state, and what ranks have told each other; no module, no autograd, no process group.
Start with `schedule`, which decides, and releases what is not used; `known_orders` remembers, `prefetch` plans what to
fetch ahead, `reductions` is the gradients' part, `refresh` renews what is cached.
"""
