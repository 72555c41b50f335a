"""From a model and a configuration to a blueprint, and from that to an engine.

Knows the rooms that make an engine and its ways in (not `fsdp2`), and nothing that happens after the model is wrapped.
The rooms below see no configuration: `choices` makes the values that they take.
Start with `blueprint`, then `build`.
"""
