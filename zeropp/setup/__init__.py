"""From a model and a configuration to an engine.

Knows the rooms that make an engine and its ways in (not `plan` and `fsdp2`), and nothing that happens after the model
is wrapped.
Start with `build`.
"""
