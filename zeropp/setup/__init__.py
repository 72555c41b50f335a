"""Construction of an engine: a model and a configuration give a blueprint, and a blueprint gives an engine.

This package uses the packages that make up an engine, but not `fsdp2`, and does no work after the model is wrapped. The
packages below it do not see the configuration; `choices` converts it to the values that they take.
Start with `blueprint`, then `build`.
"""
