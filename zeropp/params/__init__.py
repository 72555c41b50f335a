"""What a rank holds of a model: units of flat buffers, their gradients, and the guard on released parameters.

Knows how a unit is gathered, released and reduced; not when.
Start with `unit`, then `flat_buffer`: only it allocates, empties and swaps a parameter's storage; `guard` answers for
released parameters. Values arrive through the paths of `zeropp.wire`.
"""
