"""The engine of one model: hooks on its modules, forward and backward passes, and calls between passes.

Code in this room uses modules and autograd. `zeropp.order` decides when collectives are issued.
Start with `engine`, then `hooks`.
"""
