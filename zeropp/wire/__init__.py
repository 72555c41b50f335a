"""Messages: codecs, the one of each hop, and paths, which are hops with codecs for their messages.

Knows flat tensors and hops; no parameter, no module, no order.
Start with `codecs`, then `paths`; `encoding` has the codec of each hop.
"""
