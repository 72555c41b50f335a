"""From a model and a configuration to an engine.

Knows every room below it, and nothing that happens after the model is wrapped.
Start with `build`.
"""
