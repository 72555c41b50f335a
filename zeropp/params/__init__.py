"""What a rank holds of a model: units of flat buffers, their gradients, and the guard on released parameters.

Knows how a unit is gathered, released and reduced; not when.
Start with `unit`, then `flat_buffer`; whatever may touch a parameter's storage is in `flat_buffer` and `guard`.
"""
