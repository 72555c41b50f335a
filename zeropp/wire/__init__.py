"""Messages: codecs, the choice of one for each hop, and paths, which are hops with codecs for their messages.

Knows flat tensors and hops; no parameter, no module, no order.
Start with `codecs`, then `paths`; `encoding` chooses codecs for a configuration.
"""
