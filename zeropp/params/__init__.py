"""One rank's parts of a model: units of flat buffers, their gradients, and the guard on released parameters.

Knows how a unit is gathered, released and reduced; not when.
Start with `unit`, then `flat_buffer`: from the cut of a model on only it allocates, empties and swaps a parameter's
storage (before that, `zeropp.setup.placing` brings parameters to their device), and paths of `zeropp.wire` fill it;
main weights are written by the optimizer's slices, loads and averages, too. `guard` answers for released parameters.
"""
