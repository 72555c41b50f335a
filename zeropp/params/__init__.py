"""One rank's parts of a model: units of flat buffers, their gradients, and the guard of released parameters.

This package implements how a unit is gathered, released and reduced. `order` decides when. Start with `unit`: flat
buffers allocate, free and replace the storage of parameters, and the paths of `zeropp.wire` fill that storage. `guard`
handles each access to a released parameter.

Other packages touch the same memory: `zeropp.setup.placing` moves parameters to their device before the model is cut
into units, `zeropp.offload.parked` moves storages off the device between phases, and optimizer steps, loads and
averages write main weights.
"""
