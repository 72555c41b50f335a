"""The engine of one model: hooks on modules, passes, and what happens between them.

Knows modules and autograd; asks `zeropp.order` for whatever is to be gathered or sent.
Start with `engine`, then `hooks`.
"""
