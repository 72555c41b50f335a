"""One rank's parts of a model: units of flat buffers, their gradients, and the guard on released parameters.

Knows how a unit is gathered, released and reduced; not when.
Start with `unit`: its flat buffers allocate, empty and swap the storage of parameters, and paths of `zeropp.wire` fill
it. Before the model is cut, `zeropp.setup.placing` brings parameters to their device; between phases,
`zeropp.offload.parked` takes storage off it. The optimizer's slices, loads and averages write main weights, too.
`guard` answers for released parameters.
"""
